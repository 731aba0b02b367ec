"""Merges recordings into one graph: batch sizes, branches, sizes that depend on values."""
