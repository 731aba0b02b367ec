"""What stages hold: they run once, forward and backward, on tensors without memory."""
