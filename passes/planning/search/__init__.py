"""Candidates of a search over the whole space: likely ones, and what was tried of them."""
