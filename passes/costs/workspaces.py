"""The workspace that oneDNN's LSTM keeps for backward: parts, each rounded up to whole pages.

What other kernels keep is a polynomial in the sizes.  The parts of this one (gates, three layers
of states and gradients with padded rows, two with plain rows, and the result of the cells) were
read off measured sizes, which is how they are checked, too: what remains when they are taken
away has to be a polynomial.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdcompile.passes.costs.costed_op import CostedOp

PAGE = 4096  # bytes
FLOAT = 4  # bytes
LINE = 16  # floats of a cache line
Number = Any  # an int, or a sympy expression in b and s


@dataclass(frozen=True, slots=True)
class Workspace:
    """The workspace of one nn.LSTM: kernels (inputs, units), steps and rows of the input."""

    kernels: tuple[tuple[int, int], ...]
    steps: Number
    rows: Number

    @property
    def bytes(self) -> Number:
        """An int for ints, else a sympy expression with ceilings."""
        return sum(_kernel(*sizes, self.steps, self.rows) for sizes in self.kernels)


def workspace(call: CostedOp) -> Workspace | None:
    """The workspace of a float32 nn.LSTM without projections; None for other ops."""
    made: dict[str, Any] = dict(call.op.constructor)
    if call.op.target != "torch.nn.LSTM" or call.op.kind != "module" or not call.inputs:
        return None
    given = call.inputs[0]
    if given.dtype != "float32" or len(given.shape) != 3 or made.get("proj_size"):
        return None
    steps, rows = given.shape[:2]
    if made.get("batch_first"):
        steps, rows = rows, steps
    units: int = made["hidden_size"]
    directions = 2 if made.get("bidirectional") else 1
    inputs = [made["input_size"]] + [units * directions] * (made.get("num_layers", 1) - 1)
    kernels = tuple((size, units) for size in inputs for _ in range(directions))
    return Workspace(kernels, steps, rows)


def _kernel(inputs: int, units: int, steps: Number, rows: Number) -> Number:
    """Bytes of one layer in one direction."""
    states = 2 * (steps + 1) * rows
    return (
        _pages(steps * rows * _padded(4 * units))
        + 3 * _pages(states * _padded(max(inputs, units)))
        + 2 * _pages(states * units)
        + _pages(steps * rows * _padded(units))
    )


def _padded(floats: int) -> int:
    """Whole cache lines, and one more where rows would fall on the same sets of the cache."""
    found = -(-floats // LINE) * LINE
    return found + LINE if found % 256 == 0 else found


def _pages(floats: Any) -> Number:
    """Bytes of whole pages."""
    if isinstance(floats, int):
        return -(-floats * FLOAT // PAGE) * PAGE
    import sympy  # type: ignore[import-untyped]

    return PAGE * sympy.ceiling(floats * FLOAT / sympy.Integer(PAGE))
