"""Opaque modules: one op each, and what a real run shows of them."""
