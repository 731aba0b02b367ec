"""One body for both modes where evaluation returns more: caches, logits, hidden states.

Training of which only the loss is wanted (``outputs="none"``) leaves out results that it computes
anyway.  Blocks return them in both modes then, and the stage returns fewer of them in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdcompile.ir.graph import Op
from pdcompile.ir.stage_interface import Port, StageInterface
from pdcompile.passes.codegen.pairs import pair
from pdcompile.passes.codegen.tree import Call


def twins(
    train: Sequence[Op], evaluation: Sequence[Op], interface: StageInterface
) -> dict[str, str] | None:
    """Value of evaluation -> value of training, if evaluation returns more and may do so alike.

    None where both return the same, and where one mode has other ops or inputs.
    """
    ours, theirs = interface.train, interface.eval
    if len(train) != len(evaluation) or len(ours.inputs) != len(theirs.inputs):
        return None
    found = {b.value: a.value for a, b in zip(ours.inputs, theirs.inputs, strict=True)}
    found |= {b.name: a.name for a, b in zip(train, evaluation, strict=True)}
    returned = [found.get(port.value) for port in theirs.outputs]
    mine = [port.value for port in ours.outputs]
    if None in returned or mine == returned or not set(mine) < set(returned):
        return None
    return found


def wider(ports: Sequence[Port], twin: dict[str, str]) -> tuple[Port, ...]:
    """What evaluation returns, as values of training."""
    return tuple(replace(port, value=twin[port.value]) for port in ports)


def fits(train: Call, evaluation: Call, interface: StageInterface, twin: dict[str, str]) -> bool:
    """Whether both modes' calls of the stage are one body, but for what training returns."""
    ours, theirs = interface.train, interface.eval
    one = replace(
        train,
        inputs=tuple(port.value for port in ours.inputs),
        outputs=tuple(port.value for port in wider(theirs.outputs, twin)),
    )
    other = replace(
        evaluation,
        inputs=tuple(port.value for port in theirs.inputs),
        outputs=tuple(port.value for port in theirs.outputs),
    )
    return pair(one, other) is not None
