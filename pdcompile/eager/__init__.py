"""Behaviour of plain PyTorch: modes, random numbers, autograd's sums, autocast, optimizers."""
