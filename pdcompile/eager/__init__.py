"""PyTorch as it behaves without pdcompile: modes, random numbers, autograd's sums, optimizers."""
