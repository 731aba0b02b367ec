"""Why a plan is as it is: what binds each stage, and what other cuts would give.

Loads, memory and objectives are the evaluator's; a neighbouring cut is measured as it stands,
without moving anything else in answer to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pdcompile.passes.partition.model import Model, build, moves
from pdcompile.passes.planning.graph_free import plan_of
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Training
from pdcompile.plan.evaluate import Deployment, Evaluation
from pdcompile.plan.makespan import Path
from pdcompile.plan.times import round_trips
from pdcompile.plan.wires import StagePair
from pdcompile.problem import PartitionProblem
from pdcompile.schedule.registry import kind_of
from pdcompile.units import format_bytes

Breaks = Callable[[Evaluation], list[str]]
"""Rules that an assignment breaks, in words."""


#: steps of work for all neighbouring cuts together, about three seconds
WORK = 1_500_000
JUDGING = 5


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
class Move:
    """Items across one boundary (between stage `boundary` and the next), all else as it is."""

    boundary: int
    items: tuple[int, ...]
    to: int
    objective_seconds: float
    broken: tuple[str, ...] = ()  # what it would break, in words


@dataclass(frozen=True, slots=True)
class Boundary:
    """One boundary: what crosses it, and the moves that come next.

    `next_best`: the cheapest allowed one.  `better`: the best of those that would be faster and
    break a limit, None where there is none.  `looked_at` of `moves`: how many were measured.
    """

    boundary: int
    values: int
    bytes: int  # per microbatch, values and gradients over this boundary
    next_best: Move | None
    better: Move | None
    looked_at: int
    moves: int


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
    training = Training(on.schedule, plan.m, plan.m, depths, max_grad_norm=norm)
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


def boundaries(
    plan: Evaluation, breaks: Breaks | None = None, uses: Sequence[StageUse] = ()
) -> tuple[Boundary, ...]:
    """Neighbouring cuts of each boundary, after the moves of `passes.partition.model`.

    As many are measured as `WORK` allows, those first that leave the two stages' loads lowest,
    so large problems get fewer looks and the answer does not depend on the clock.  Where that is
    less than two for each boundary, those next to the slowest stage get two, the others none.
    `breaks` of somebody else is taken to cost `JUDGING` times what it costs to measure a cut;
    `uses`: the plan's `stage_uses`, where they are known.
    """
    problem, on, breaks = plan.problem, plan.deployment, breaks or broken
    model = build(problem)
    stages = tuple(plan.stage_of[group[0]] for group in model.members)
    now = seconds_of(plan)
    near: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in problem.stages[1:]]
    for groups, to in moves(model.arcs, stages, len(problem.stages)):
        if all(model.lowest[v] <= to <= model.highest[v] for v in groups):
            near[min(to, stages[groups[0]])].append((groups, to))
    size = len(problem.items) + len(problem.traffic)
    if on.flush:
        size += 4 * plan.m * len(problem.stages)
    elif not plan.times.straight:  # simulated
        size += 40 * plan.m * sum(map(len, on.ranks))
    every = WORK // (size if breaks is broken else (1 + JUDGING) * size)
    most = max(2, every // max(1, len(near)))
    slowest = bottleneck(uses or stage_uses(plan))
    nearest = sorted(range(len(near)), key=lambda s: abs(2 * (s - slowest) + 1))
    looked_at = set(nearest[: max(2, every // most)])
    return tuple(
        _boundary(plan, breaks, model, stages, now, s, possible, most if s in looked_at else 0)
        for s, possible in enumerate(near)
    )


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


def _boundary(
    plan: Evaluation,
    breaks: Breaks,
    model: Model,
    stages: tuple[int, ...],
    now: float,
    boundary: int,
    possible: list[tuple[tuple[int, ...], int]],
    most: int,
) -> Boundary:
    problem, on = model.problem, plan.deployment
    widths = [speed * len(ranks) for speed, ranks in zip(on.speeds, on.ranks, strict=True)]
    seconds = [f + w for f, w in zip(model.forward, model.backward, strict=True)]
    loads = [0.0] * len(problem.stages)
    for v, s in enumerate(stages):
        loads[s] += seconds[v]

    def heavier(move: tuple[tuple[int, ...], int]) -> tuple[float, int]:
        """The larger load of the two stages after the move; of equal ones the smaller move."""
        moved = sum(seconds[v] for v in move[0])
        other = boundary if move[1] != boundary else boundary + 1
        pair = (
            (loads[move[1]] + moved) / widths[move[1]],
            (loads[other] - moved) / widths[other],
        )
        return max(pair), len(move[0])

    found: list[tuple[Move, Evaluation]] = []
    for groups, to in sorted(possible, key=heavier)[:most]:
        moved = set(groups)
        after = plan.of(model.items_of([to if v in moved else s for v, s in enumerate(stages)]))
        items = tuple(sorted(i for v in groups for i in model.members[v]))
        found.append((Move(boundary, items, to, seconds_of(after)), after))
    best: Move | None = None
    better: Move | None = None
    for move, after in sorted(found, key=lambda one: one[0].objective_seconds):
        if not (wrong := breaks(after)):
            best = move
            break
        if better is None and move.objective_seconds < now * (1 - 1e-9):
            better = replace(move, broken=tuple(wrong))
    values, size = _crossing(problem, model.items_of(stages), boundary)
    return Boundary(boundary, values, size, best, better, len(found), len(possible))


def _crossing(problem: PartitionProblem, stage_of: Sequence[int], boundary: int) -> tuple[int, int]:
    """Values that pass from stages up to `boundary` to later ones, and their bytes both ways."""
    values = size = 0
    for value in problem.traffic:
        source = stage_of[value.producer]
        targets = {stage_of[c] for c in value.consumers} - {source}
        later = [t for t in targets if source <= boundary < t]
        if later:
            values += 1
            # Each stage beyond gets the value itself; the gradient comes back as one sum.
            size += value.forward_bytes * len(later) + value.backward_bytes
    return values, size
