"""Entry of a value from another stage into a stage's part of autograd.

A leaf's own ``.grad`` would not do for the gradient that is handed back: AccumulateGrad gives it
the leaf's layout in memory, while eager hands on whatever layout its kernels made, and kernels
that sum over another layout round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Entrance:
    """A received value under autograd.

    `value` is what the stage computes with: a view of a leaf, since a leaf itself could be no
    root of a backward that goes on.  After backward `gradient` is the summed gradient in the
    layout that autograd's kernels gave it, None when none came.
    """

    __slots__ = ("_found", "value")

    def __init__(self, received: Tensor) -> None:
        leaf = received.detach().requires_grad_()
        self.value = leaf.view_as(leaf)
        self._found: list[Tensor] = []
        node = self.value.grad_fn
        assert node is not None
        node.register_prehook(_taker(self._found))

    @property
    def gradient(self) -> Tensor | None:
        return self._found[0] if self._found else None

    def gradient_or_zeros(self) -> Tensor:
        return torch.zeros_like(self.value) if self.gradient is None else self.gradient


def _taker(found: list[Tensor]) -> Callable[[tuple[Tensor, ...]], tuple[None]]:
    """A hook that keeps the gradient and lets nothing through to the leaf.

    It holds the list alone: a hook that held the tensor would keep it alive for ever, because
    Python's collector cannot look into autograd's nodes.
    """

    def take(gradients: tuple[Tensor, ...]) -> tuple[None]:
        found.extend(one for one in gradients if one is not None)
        return (None,)

    return take
