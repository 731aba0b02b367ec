"""Shares of a sum over experts: which ops parts may compute of their shares, before the total.

A product by groups that is split along its experts gives each part the rows of its own experts and
zeros for all others.  What keeps zeros row by row, as an activation does, or is linear gives the
share of its result: so tokens are summed over parts once they are mixed, and hidden units never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdcompile.passes.costs.costed_op import words
from pdcompile.passes.parts.atoms import Run

if TYPE_CHECKING:
    from pdcompile.passes.parts.axes import OpAxes

GROUPED = "groupedmm"
_LINEAR = words(
    "mul div neg to float half bfloat16 type contiguous clone view reshape flatten unflatten "
    "squeeze unsqueeze transpose swapaxes swapdims permute t expand getitem indexselect sum mean "
    "chunk split splitwithsizes narrow select"
)
#: Functions of one operand that are zero for zero, with a slope there.
_ZERO_FOR_ZERO = words("silu gelu relu relu6 tanh mish elu selu leakyrelu hardswish")


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a value: dimension `dim` are rows in groups that end where the value `ends` says.

    Every part has the rows of its own share of the experts.  `ends` is "" where rows were mixed.
    """

    experts: Run
    ends: str = ""
    dim: int = 0


def passed_on(op: OpAxes, read: Mapping[int, Shares]) -> tuple[tuple[int, ...], Shares | None]:
    """The operands of which an op may take shares, of those that are had in shares, and what it
    then makes; (), None where it needs their totals."""
    call = op.call
    if call.name == GROUPED:
        offs = call.role(2, "offs")
        if offs is None or "e" not in op.loops:  # one expert
            return (), None
        made = Shares(op.loops["e"].run, f"{call.operands[offs]}")
        own = {i for i, one in read.items() if (one.ends, one.dim) == (made.ends, 0)}
        return tuple(own & {call.role(0, "mat_a")}), made
    if not read:
        return (), None
    numbers = tuple(read)
    first, dim = read[numbers[0]], _rows(op, read)
    known, one = call.graph.values[call.op.name], len(read) == 1 and call.name == "mul"
    linear = call.name in _LINEAR and (numbers == (0,) or one)
    if call.name == "div" and call.argument(-1, "rounding_mode") is not None:
        return (), None
    zero = dim is not None and (call.name in _ZERO_FOR_ZERO or call.name == "mul")
    if not (linear or zero) or (known.is_tensor and "float" not in known.dtype):
        return (), None
    return numbers, Shares(first.experts) if dim is None else Shares(first.experts, first.ends, dim)


def _rows(op: OpAxes, read: Mapping[int, Shares]) -> int | None:
    """The dimension of results that has the rows of the operands, each where it was; None where
    there is none, or the operands are of different groups."""
    if any(not one.ends or i not in op.reads for i, one in read.items()):
        return None
    (_, letters), *others = {(one.ends, op.reads[i][one.dim]) for i, one in read.items()}
    if others or not letters or any(op.loops[one].kind != "free" for one in letters):
        return None
    found = {_place(letters, term) for term in op.makes.values()}
    return found.pop() if len(found) == 1 else None


def _place(letters: Sequence[str], term: Sequence[Sequence[str]]) -> int | None:
    return next((dim for dim, own in enumerate(term) if own == letters), None)
