"""Entrance: takes a value of another stage into a stage's autograd graph.

The gradient that goes back cannot be a leaf's ``.grad``: AccumulateGrad gives that the leaf's
memory layout, while eager passes on the layout that its kernels made, and kernels that sum over
another layout round differently.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Entrance:
    """A received value under autograd.

    The stage computes with `value`, a view of a leaf: backward has to stop before a leaf.  After
    backward `gradient` is the summed gradient in the layout of autograd's kernels, None if there
    was none.
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
    def leaf(self) -> Tensor:
        """End of backward towards the value; nothing is accumulated there."""
        node = self.value.grad_fn
        assert node is not None
        (accumulator, _), *_ = node.next_functions
        leaf: Tensor = accumulator.variable  # type: ignore[union-attr]
        return leaf

    @property
    def gradient(self) -> Tensor | None:
        return self._found[0] if self._found else None

    def take(self) -> Tensor | None:
        """The gradient; autograd's graph does not keep it alive from now on."""
        return self._found.pop() if self._found else None


def _taker(found: list[Tensor]) -> Callable[[tuple[Tensor, ...]], tuple[None]]:
    """A hook that appends the gradient to a list and passes none to the leaf.

    It refers to the list alone: a reference to the tensor would keep it alive for ever, because
    Python's collector does not see autograd's nodes.
    """

    def take(gradients: tuple[Tensor, ...]) -> tuple[None]:
        found.extend(one for one in gradients if one is not None)
        return (None,)

    return take
