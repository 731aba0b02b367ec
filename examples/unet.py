"""A U-Net that finds discs in noise: each level's activation skips to the other side.

    pdcompile plan examples/unet.py:build --cluster 1x3
    torchrun --nproc-per-node=2 -m pdcompile run examples/unet.py:build

Whichever way it is cut, a skip goes over stages in between; it is sent once, straight to where it
is used, and its gradient comes straight back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile import Workload


def double(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(outside, outside, 3, padding=1),
        nn.GELU(),
    )


class UNet(nn.Module):
    """Images (b, 1, 32, 32) -> a logit for each pixel (b, 1, 32, 32)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels
        self.down1, self.down2, self.middle = double(1, c), double(c, 2 * c), double(2 * c, 4 * c)
        self.up2, self.up1 = double(6 * c, 2 * c), double(3 * c, c)
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.up2(torch.cat([second, F.interpolate(x, scale_factor=2.0)], dim=1))
        x = self.up1(torch.cat([first, F.interpolate(x, scale_factor=2.0)], dim=1))
        return self.head(x)


def batches(batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """A disc in noise, and the mask of the disc."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.arange(32.0)
    while True:
        place = 8 + 16 * torch.rand(batch_size, 2, 1, 1, generator=generator)
        radius = 3 + 5 * torch.rand(batch_size, 1, 1, generator=generator)
        away = (grid[None, :, None] - place[:, 0]) ** 2 + (grid[None, None, :] - place[:, 1]) ** 2
        mask = (away < radius**2).float()[:, None]
        yield mask + torch.randn(mask.shape, generator=generator), mask


def build(channels: int = 8, batch_size: int = 16) -> Workload:
    torch.manual_seed(0)
    inputs, _ = next(batches(batch_size))
    loss = F.binary_cross_entropy_with_logits
    return Workload(UNet(channels), inputs, loss, lambda: batches(batch_size))
