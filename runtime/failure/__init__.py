"""Failures of ranks: the first one, the end of its process, and agreement on calls."""
