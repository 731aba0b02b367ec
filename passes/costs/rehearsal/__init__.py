"""Memory of stages: they run once, forward and backward, on tensors without memory."""
