"""Turns by speed: faster replicas of a stage take more microbatches of a minibatch.

The search has replicas take each in turn, all as slow as the slowest.  Where those of the plan that
it finds are of unlike speed, each microbatch goes instead to the replica that would be through with
its own first (weighted round robin by D'Hondt's rule): after any number of microbatches the longest
of them has taken the least.  The clock says whether that is faster, and with which warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdcompile.passes.partition.alternatives import seconds_of
from pdcompile.passes.partition.answer import claimed
from pdcompile.passes.partition.space.pipelines import filled
from pdcompile.passes.planning.solved_problem import MOST_EXTRA, placed
from pdcompile.passes.schedules import warmup
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan
from pdcompile.schedule.turns import (
    Pattern,
    horizon,
    in_turn,
    largest_share,
    longest_gap,
    share_of,
)

CYCLE = 24  # turns, at most, where they go on from one minibatch to the next


def by_speed(speeds: Sequence[float], count: int) -> Pattern:
    """Turns of replicas of these speeds over so many microbatches, as short as they repeat."""
    taken, turns = [0] * len(speeds), list[int]()
    for _ in range(count):
        ends = [((n + 1) / v, -v, q) for q, (n, v) in enumerate(zip(taken, speeds, strict=True))]
        *_, first = min(ends)
        taken[first] += 1
        turns.append(first)
    periods = (p for p in range(1, count + 1) if turns[p:] == turns[: count - p])
    return tuple(turns[: next(periods)])


def with_turns(plan: Plan, least_seconds: float) -> Plan:
    """The plan with turns by speed, where its objective is less with them.

    Args:
        least_seconds: what no plan's objective is less than, whoever takes which microbatch: the
            certificate's bound, which is of replicas in turn, is this at most.
    """
    kind, devices, m = plan.training.kind, plan.machines.devices, plan.training.num_microbatches
    speeds = [[devices[rank].speed for rank in own] for own in plan.ranks]
    by_microbatch = kind.trains and not (kind.updates_each or kind.dispatched)
    if all(len({*own}) == 1 for own in speeds) or not (kind.alone or by_microbatch):
        return plan
    turns = [by_speed(own, CYCLE if kind.alone else m) if len({*own}) > 1 else () for own in speeds]
    stages = tuple(
        replace(stage, turns=own, paces=tuple(min(ours) / one for one in ours if own))
        for stage, own, ours in zip(plan.stages, turns, speeds, strict=True)
    )
    best = in_turns = plan.certificate.objective_seconds
    found = plan
    for depths in dict.fromkeys(_depths(plan, turns)):
        training = replace(plan.training, warmup=depths)
        other = replace(plan, stages=stages, training=training, forecast=None)
        seconds = seconds_of(placed(other))
        if seconds < best:
            forecast = simulate(other, timeline=False).forecast
            if filled(forecast.ledgers, plan.machines) <= 1:
                best, found = seconds, replace(other, forecast=forecast)
    if found is plan:
        return plan
    certificate = claimed(
        plan.certificate, best, min(plan.certificate.bound_seconds, least_seconds)
    )
    was = f"{100 * (1 - best / in_turns):.0f} % less than with each in turn"
    notes = (*plan.notes, *_notes(found, was))
    # Alternatives were priced with each replica in turn.
    return replace(found, certificate=certificate, notes=notes, alternatives=())


def _depths(plan: Plan, turns: Sequence[Pattern]) -> Iterator[tuple[int, ...]]:
    """Warm-ups: as `warmup` has them of stages with their turns, and up to as much deeper."""
    kind, m, ranks = plan.training.kind, plan.training.num_microbatches, plan.ranks
    patterns = [own or in_turn(len(held)) for own, held in zip(turns, ranks, strict=True)]
    if len({*ranks}) < len(ranks) or kind.warmup == "all":
        counts = tuple(map(len, ranks))
        most = max(
            largest_share(own, m) * len(held) for own, held in zip(patterns, ranks, strict=True)
        )
        several = len({*ranks}) < len(ranks)
        places = tuple(sorted({own[0] for own in ranks}).index(own[0]) for own in ranks)
        yield warmup(plan.training.schedule, len(ranks), most, counts, 0, places if several else ())
        return
    for extra in range(MOST_EXTRA + 1):
        depths, run = list[int](), 0
        for own in reversed(patterns):
            if kind.alone:  # all others have their turns while one computes
                run += longest_gap(own) + (extra if run else 0)
                depths.insert(0, run - 1)
                continue
            depth = 0
            while run and horizon(own, depth + 1) < run + len({*own}) + extra:
                depth += 1
            depths.insert(0, min(depth, m - 1))
            run = horizon(own, depth + 1)
        yield tuple(depths)


def _notes(plan: Plan, was: str) -> Iterator[str]:
    m, alone = plan.training.num_microbatches, plan.training.kind.alone
    for stage, own in zip(plan.stages, plan.ranks, strict=True):
        if stage.turns:
            count = len(stage.turns) if alone else m
            shares = [len(share_of(stage.turns, q, count)) for q in range(stage.replicas)]
            speeds = [plan.machines.devices[rank].speed for rank in own]
            yield (
                f"stage {stage.index}: its replicas on ranks {', '.join(map(str, own))} take "
                f"{', '.join(map(str, shares))} of {count} {'mini' if alone else 'micro'}batches, "
                f"by their speeds ({', '.join(f'{one:g}' for one in speeds)}): {was}"
            )
