"""Reasons why a plan is as it is: what binds each stage, and what crosses each boundary.

Loads, memory and objectives are the evaluator's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pdcompile.passes.planning.graph_free import plan_of
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Training
from pdcompile.plan.evaluate import Deployment, Evaluation
from pdcompile.plan.makespan import Path
from pdcompile.plan.times import round_trips
from pdcompile.plan.wires import StagePair
from pdcompile.schedule.registry import kind_of
from pdcompile.units import format_bytes


@dataclass(frozen=True, slots=True)
class StageUse:
    """Seconds that one microbatch takes of a stage, and which of them bind.

    `binds` is the largest of compute, sending, receiving (on a half-duplex link both together:
    ``link``) and, without a flush, the round trip to stage `turn` and back, which is made once in
    `in_flight` microbatches.
    """

    stage: int
    compute_seconds: float
    sent_seconds: float
    received_seconds: float
    round_trip_seconds: float
    turn: int
    in_flight: int
    memory_bytes: int
    limit_bytes: int | None
    binds: str
    binding_seconds: float
    idle: float  # fraction of the time that the device does not compute
    critical_seconds: float = 0.0  # of its work on the critical path of a flush


@dataclass(frozen=True, slots=True)
class Boundary:
    """One boundary, between stage `boundary` and the next: values that cross it, and their bytes
    per microbatch, with those of gradients."""

    boundary: int
    values: int
    bytes: int


def stage_uses(plan: Evaluation) -> tuple[StageUse, ...]:
    """Uses of each stage by a microbatch.

    The objective without a flush is the largest `binding_seconds` (with replicas the simulator may
    say more); with one it is the length of the critical path, whose parts are `critical_seconds`
    and transfers, where every stage has a rank of its own.
    """
    spent, on, m = plan.times, plan.deployment, plan.m
    sent, received = spent.traffic(m)
    path = critical(plan)[0] if plan.chained else None
    total = seconds_of(plan) / (m if on.flush else 1)
    computing = [spent.computing(s, m) for s in range(len(on.ranks))]
    found, trips = [], round_trips(spent)
    for s, ranks in enumerate(on.ranks):
        turn, trip, in_flight = _longest_trip(trips, s, on)
        links = [(sent.get(rank, 0.0), received.get(rank, 0.0)) for rank in ranks]
        most_sent, most_received = (max(column) for column in zip(*links, strict=True))
        beside = [t for t, own in enumerate(on.ranks) if {*own} == {*ranks}]
        busy = sum(computing[t] for t in beside)
        uses = {"compute": busy}
        reduced = sum(map(spent.reduction, beside)) / (m * kind_of(on.schedule).group(len(ranks)))
        if reduced:
            link = sum if on.half_duplex[s] else max
            uses["reduction"] = max(map(link, links)) + reduced
        elif on.half_duplex[s]:
            uses["link"] = max(map(sum, links))
        else:
            uses |= {"sending": most_sent, "receiving": most_received}
        if in_flight:
            uses["round trip"] = trip / in_flight
        binds = max(uses, key=lambda name: uses[name])
        ahead, back = (path.forward[s], path.backward[s]) if path else (0, 0.0)
        found.append(
            StageUse(
                stage=s,
                compute_seconds=computing[s],
                sent_seconds=most_sent,
                received_seconds=most_received,
                round_trip_seconds=trip,
                turn=turn,
                in_flight=in_flight,
                memory_bytes=plan.needed(s),
                limit_bytes=on.limits[s],
                binds=binds,
                binding_seconds=uses[binds],
                idle=max(0.0, 1 - busy / total) if total > 0 else 0.0,
                critical_seconds=ahead * spent.forward[s] + back * spent.backward[s],
            )
        )
    return tuple(found)


def seconds_of(plan: Evaluation) -> float:
    """The objective; of a stream with replicas, of which the closed form is a bound, simulated."""
    on = plan.deployment
    if on.flush or plan.times.straight:
        return plan.seconds
    depths = tuple(count - 1 for count in on.in_flight)
    norm = 1.0 if on.clips else None
    training = Training(
        on.schedule, plan.m, plan.m, depths, max_grad_norm=norm,
        updates="home" if on.homes else "every",
    )  # fmt: skip
    simulated = simulate(plan_of(plan, training), links=cache(on.link), timeline=False)
    return max(plan.seconds, simulated.forecast.step_seconds / plan.m)


def _longest_trip(
    trips: Mapping[StagePair, float], stage: int, on: Deployment
) -> tuple[int, float, int]:
    """(where it turns, seconds, microbatches that it is made once for: 0 where nobody says)."""
    own = {t: seconds for (s, t), seconds in trips.items() if s == stage}
    if on.flush or not on.in_flight:
        turn = max(own, key=lambda t: own[t])
        return turn, own[turn], 0
    held = [len(ranks) * count for ranks, count in zip(on.ranks, on.in_flight, strict=True)]
    apart = {t: held[stage] - held[t] + len(on.ranks[t]) for t in own}
    turn = max(own, key=lambda t: own[t] / apart[t])
    return turn, own[turn], apart[turn]


def bottleneck(uses: Sequence[StageUse]) -> int:
    """The stage that decides: most of the critical path, or the largest load without one."""
    if any(use.critical_seconds for use in uses):
        return max(uses, key=lambda use: use.critical_seconds).stage
    return max(uses, key=lambda use: use.binding_seconds).stage


def critical(plan: Evaluation) -> tuple[Path, float]:
    """The critical path under a flush, and its seconds on links."""
    path, hops = plan.times.critical_path(plan.warmup, plan.m), plan.times.hops
    return path, math.fsum(hops[kind][hop] * count for hop, kind, count in path.hops)


def boundaries(plan: Evaluation) -> tuple[Boundary, ...]:
    """Traffic from stages up to each boundary to later ones."""
    found = []
    for boundary in range(len(plan.stages) - 1):
        values = size = 0
        for value in plan.problem.traffic:
            source = plan.stage_of[value.producer]
            targets = {plan.stage_of[c] for c in value.consumers} - {source}
            if later := [t for t in targets if source <= boundary < t]:
                values += 1
                # Each stage beyond gets the value itself; the gradient comes back as one sum.
                size += value.forward_bytes * len(later) + value.backward_bytes
        found.append(Boundary(boundary, values, size))
    return tuple(found)


def broken(plan: Evaluation) -> list[str]:
    """`violations`, with memory in units for a reader and how much it is over."""
    free = replace(plan.deployment, limits=(None,) * len(plan.deployment.limits))
    found = list(Evaluation(plan.problem, plan.stage_of, free).violations())
    for s, limit in enumerate(plan.deployment.limits):
        if limit is not None and (needed := plan.needed(s)) > limit:
            found.append(
                f"stage {s} would need {format_bytes(needed)} of memory, "
                f"{format_bytes(needed - limit)} too much"
            )
    return found
