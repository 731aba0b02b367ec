"""Plans for torch.distributed.pipelining."""
