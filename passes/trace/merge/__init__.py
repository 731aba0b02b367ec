"""Several recordings as one graph: batch sizes, branches, sizes that depend on values."""
