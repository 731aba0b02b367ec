"""A multi-layer perceptron that learns which of two spirals a point lies on.

pdcompile run examples/mlp.py:build --cluster local:3 --schedule 2bw --steps 200
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile import Workload


class MLP(nn.Module):
    """Points (b, 2) -> logits (b, 2)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.last = nn.Linear(width, 2)

    def forward(self, points: Tensor) -> Tensor:
        x = torch.tanh(self.first(points))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)


def batches(batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Points of two spirals, one turned half around, and which of the two they belong to."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        label = torch.randint(2, (batch_size,), generator=generator)
        turn = torch.rand(batch_size, generator=generator) * 2 * torch.pi
        angle = turn + label * torch.pi
        yield torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 6.3, label


def build(layers: int = 6, width: int = 64, batch_size: int = 64) -> Workload:
    torch.manual_seed(0)
    inputs, _ = next(batches(batch_size))
    return Workload(MLP(layers, width), inputs, F.cross_entropy, lambda: batches(batch_size))
