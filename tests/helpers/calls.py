"""Calls of models with several kinds of arguments."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import FlatCall, flatten_call

Point = namedtuple("Point", ["x", "y"])


def rows(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


class Two(nn.Module):
    def forward(self, x: Any, y: Any = None, scale: float = 1.0) -> Any:
        return x


class Stars(nn.Module):
    def forward(self, first: Any, /, *args: Any, flag: bool = True, **more: Any) -> Any:
        return first, args, flag, more


class HasTarget(nn.Module):
    def forward(self, x: Any, target: Any) -> Any:
        return x


def call(*args: Any, target: Any = None, **kwargs: Any) -> FlatCall:
    return flatten_call(Two(), args, kwargs, target)
