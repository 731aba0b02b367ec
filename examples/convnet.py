"""A convolutional network with batch norm that tells the direction of stripes.

    pdcompile run examples/convnet.py:build --cluster local:2 --microbatches 4 --steps 50

Batch norm sees one microbatch at a time, as in gradient accumulation: with several microbatches
its statistics are not those of the whole minibatch, and `pdcompile plan` notes it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile import Workload

DIRECTIONS = 8


class Residual(nn.Module):
    """(b, channels, h, w) -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ConvNet(nn.Module):
    """Images (b, 1, 32, 32) -> logits (b, 8)."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, DIRECTIONS)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(images))))
        return self.head(x.mean(dim=(2, 3)))


def batches(batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy stripes of random phase, and the index of their direction."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.arange(32.0)
    while True:
        label = torch.randint(DIRECTIONS, (batch_size,), generator=generator)
        angle = (label * torch.pi / DIRECTIONS)[:, None, None]
        phase = torch.rand(batch_size, 1, 1, generator=generator) * 2 * torch.pi
        along = angle.cos() * grid[None, :, None] + angle.sin() * grid[None, None, :]
        noise = torch.randn(batch_size, 32, 32, generator=generator)
        yield (torch.sin(0.8 * along + phase) + 0.5 * noise)[:, None], label


def build(channels: int = 16, blocks: int = 4, batch_size: int = 16) -> Workload:
    torch.manual_seed(0)
    inputs, _ = next(batches(batch_size))
    return Workload(ConvNet(channels, blocks), inputs, F.cross_entropy, lambda: batches(batch_size))
