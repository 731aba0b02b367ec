"""Values that Python reads and sizes that depend on values, while tensors have none."""
