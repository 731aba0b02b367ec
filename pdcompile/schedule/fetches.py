"""Fetches: seconds in which ranks get the weights of a stage from their host, to run it.

Before a forward all of them come, and again before a backward, after which gradients go back; a
rank does nothing else then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pdcompile.schedule.instruction import Action

if TYPE_CHECKING:
    from pdcompile.plan.schema import Plan

Fetches: TypeAlias = Mapping[tuple[Action, int, int], float]  # by action, stage and rank


def fetches_of(
    rates: Mapping[int, float], ranks: Sequence[tuple[int, ...]], *held: Sequence[int]
) -> Fetches:
    """Fetches over links of such `rates`, bytes a second of each rank; empty: weights stay.

    `held`: bytes of each stage's weights, and of those that are trained.
    """
    found = {}
    for s, (own, weights, trained) in enumerate(zip(ranks, *held, strict=True)):
        for rank in own if rates else ():
            found[Action.FORWARD, s, rank] = weights / rates[rank]
            found[Action.BACKWARD, s, rank] = (weights + trained) / rates[rank]
    return found


def fetches(plan: Plan) -> Fetches:
    """Fetches of a plan."""
    devices = enumerate(plan.machines.devices if plan.fetched else ())
    held = [(stage.parameter_bytes, stage.trainable_bytes) for stage in plan.stages]
    rates = {rank: device.host_rate for rank, device in devices}
    return fetches_of(rates, plan.ranks, *zip(*held, strict=True))


def fetched_by(found: Fetches, stage: int, ranks: Sequence[int]) -> list[float]:
    """Seconds of one microbatch on each of these ranks."""
    both = (Action.FORWARD, Action.BACKWARD)
    return [sum(found.get((one, stage, rank), 0.0) for one in both) for rank in ranks]
