"""Values that Python reads from fake tensors, and sizes that depend on values."""
