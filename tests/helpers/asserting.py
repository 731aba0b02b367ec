"""A forward with an assert as Python compiles it; pytest rewrites those of test files."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def asserted(self: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    assert torch.all(labels < 8).item(), "labels below 8"
    return self.lin(x)
