"""The tape: one run of the model's Python on fake tensors, and the ops that it records."""
