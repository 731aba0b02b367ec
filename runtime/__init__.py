"""The runtime: small, interprets a schedule on torch.distributed."""
