"""Values that cross boundaries of stages, of which each talks to its two neighbours alone.

A value that a later stage reads is handed on by every stage between (a skip connection), and its
gradient comes back the same way, where autograd adds it to that of the stage itself.  What stages
read of the call is given to each of them by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdcompile.ir.stage_interface import Port, StageInterface
from pdcompile.passes.stages.naming import unique


@dataclass(frozen=True, slots=True)
class NeighbourStage:
    """One stage in training: what it gets and gives, each value under one name everywhere.

    Args:
        received: from the stage before it, in order; of the first one its inputs from the call.
        from_call: further inputs from the call, by name.
        handed_on: of `received`, what later stages need and this one does not make.
        sent: to the next stage, in order; of the last one all its outputs.
        shared: some of what the first stage reads of the call, later ones read too.
    """

    interface: StageInterface
    received: tuple[Port, ...]
    from_call: tuple[Port, ...]
    handed_on: tuple[Port, ...]
    sent: tuple[Port, ...]
    shared: bool = False


def neighbour_stages(interfaces: Sequence[StageInterface]) -> tuple[NeighbourStage, ...]:
    """The stages of a plan as a chain."""
    found: list[NeighbourStage] = []
    before: tuple[Port, ...] = ()
    for k, interface in enumerate(interfaces):
        inputs = interface.train.inputs
        called = tuple(port for port in inputs if port.path is not None)
        own = {port.value for port in interface.train.outputs}
        last = k == len(interfaces) - 1
        later = _needed_after(interfaces, k)
        handed_on = tuple(p for p in before if p.value in later and p.value not in own)
        made = tuple(p for p in interface.train.outputs if p.value in later)
        sent = (*(interface.train.outputs if last else made), *handed_on)
        received, from_call = (called, ()) if k == 0 else (before, called)
        again = {p.value for one in interfaces[1:] for p in one.train.inputs}
        shared = k == 0 and any(port.value in again for port in called)
        found.append(NeighbourStage(interface, received, from_call, handed_on, sent, shared))
        before = sent
    return tuple(found)


def _needed_after(interfaces: Sequence[StageInterface], k: int) -> set[str]:
    """Values, none of the call's, that stages after k or the loss read."""
    ports = [port for later in interfaces[k + 1 :] for port in later.train.inputs]
    return {p.value for p in (*ports, *interfaces[-1].train.loss_inputs) if p.path is None}


def value_names(stages: Sequence[NeighbourStage], taken: Sequence[str]) -> dict[str, str]:
    """A Python name for each value that a stage gets or gives; no two have the same.  Inputs of
    the call have their own, by which they are given."""
    names = {
        port.value: port.path
        for stage in stages
        for port in (*stage.received, *stage.from_call)
        if port.path is not None
    }
    for stage in stages:
        for port in (*stage.received, *stage.from_call, *stage.interface.train.outputs):
            if port.value not in names:
                names[port.value] = unique(port.name, [*names.values(), *taken])
    return names
