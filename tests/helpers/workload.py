"""Workload that tests of verbs plan and train: small, so that a verb takes little more than its own
time."""

from __future__ import annotations

import torch
from torch import nn

from pdcompile import Workload


def build() -> Workload:
    """Four dense layers, each with a tanh, and one minibatch of eight samples."""
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())]
    inputs, target = torch.randn(8, 64), torch.randn(8, 64)
    return Workload(
        nn.Sequential(*layers), inputs, nn.functional.mse_loss, lambda: iter([(inputs, target)])
    )
