"""The model's tensors by name: where they start, what the user gets and gives as state."""
