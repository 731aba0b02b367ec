"""Why a plan is as it is: what binds each stage, what other cuts and looser limits would give.

Loads, memory and objectives are the evaluator's; a neighbouring cut is measured as it stands,
without moving anything else in answer to it.  A looser limit is the same problem with one limit
gone or eased, which `partition` solves within a time limit.  The current assignment stays allowed
in every one of them and is measured there too, so a search that ends early never makes a looser
limit look worse than the plan.

`partition` knows one rank a stage: limits of stages with a `Deployment` of their own (replicas,
recomputation, several on a rank) are not eased, and a search of the whole space has to tell.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.model import Model, build, single_moves
from pdcompile.passes.partition.search import partition
from pdcompile.passes.planning.graph_free import plan_of
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Certificate, Training
from pdcompile.plan.evaluate import Deployment, Evaluation
from pdcompile.plan.makespan import Path, StagePair, critical_path
from pdcompile.plan.times import round_trips
from pdcompile.problem import (
    OUTPUT_WISH,
    MemoryRule,
    Partition,
    PartitionProblem,
    StageLimits,
    Wish,
)
from pdcompile.schedule.registry import kind_of
from pdcompile.units import format_bytes

Breaks = Callable[[Evaluation], list[str]]
"""What an assignment breaks, in words."""


class Solve(Protocol):
    """`partition`, or something that keeps more than the limits of its formula."""

    def __call__(
        self, problem: PartitionProblem, *, time_limit: float, seed: int
    ) -> tuple[Partition, Certificate]: ...


#: steps of work for all neighbouring cuts together, about three seconds
WORK = 1_500_000
JUDGING = 5


@dataclass(frozen=True, slots=True)
class StageUse:
    """What one microbatch takes of a stage, in seconds, and which of it binds.

    `binds` is the largest of compute, sending, receiving (on a half-duplex link both together:
    ``link``) and, without a flush, the round trip to stage `turn` and back, which is made once in
    `in_flight` microbatches.
    `forwards` and `backwards` count the stage's work on the critical path of a flush.
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
    forwards: int = 0
    backwards: float = 0  # a part of a split one is half of it
    critical_seconds: float = 0.0  # of forwards and backwards


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
    """What each stage spends a microbatch on.

    The objective without a flush is the largest `binding_seconds` (with replicas the simulator may
    say more); with one it is the length of the critical path, whose parts are `critical_seconds`
    and transfers, where every stage has a rank of its own.
    """
    spent, on, m = plan.times, plan.deployment, plan.m
    forward, backward = spent.forward, spent.backward
    sent, received = spent.traffic(m)
    path = critical(plan)[0] if chained(plan) else None
    total = seconds_of(plan) / (m if on.flush else 1)
    computing = [(f + w) / len(r) for f, w, r in zip(forward, backward, on.ranks, strict=True)]
    found, trips = [], round_trips(spent.timing)
    for s, ranks in enumerate(on.ranks):
        turn, trip, in_flight = _longest_trip(trips, s, on)
        links = [(sent.get(rank, 0.0), received.get(rank, 0.0)) for rank in ranks]
        most_sent, most_received = (max(column) for column in zip(*links, strict=True))
        busy = sum(one for t, one in enumerate(computing) if on.ranks[t] == ranks)
        uses = {"compute": busy}
        reduced = spent.reduction(s) / (m * kind_of(on.schedule).group(len(ranks)))
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
                forwards=ahead,
                backwards=back,
                critical_seconds=ahead * forward[s] + back * backward[s],
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


def chained(plan: Evaluation) -> bool:
    """Whether one chain of forwards, backwards and transfers tells how long a step takes."""
    return plan.deployment.flush and plan.times.straight


def critical(plan: Evaluation) -> tuple[Path, float]:
    """The critical path under a flush, and its seconds on links."""
    timing = plan.times.timing
    path = critical_path(timing, plan.warmup, plan.m, plan.deployment.schedule)
    return path, math.fsum(timing.of_kind(kind)[hop] * times for hop, kind, times in path.hops)


def boundaries(
    plan: Evaluation, breaks: Breaks | None = None, uses: Sequence[StageUse] = ()
) -> tuple[Boundary, ...]:
    """For each boundary its neighbouring cuts: single items, and shifts along the items' order.

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
    moves = [list(_moves(model, stages, s)) for s in range(len(problem.stages) - 1)]
    size = len(problem.items) + len(problem.traffic)
    if on.flush:
        size += 4 * plan.m * len(problem.stages)
    elif not plan.times.straight:  # simulated
        size += 40 * plan.m * sum(map(len, on.ranks))
    every = WORK // (size if breaks is broken else (1 + JUDGING) * size)
    most = max(2, every // max(1, len(moves)))
    slowest = bottleneck(uses or stage_uses(plan))
    nearest = sorted(range(len(moves)), key=lambda s: abs(2 * (s - slowest) + 1))
    looked_at = set(nearest[: max(2, every // most)])
    return tuple(
        _boundary(plan, breaks, model, stages, now, s, possible, most if s in looked_at else 0)
        for s, possible in enumerate(moves)
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


def eased(
    plan: Evaluation,
    memory: Callable[[int | None], int | None] = lambda limit: limit,
    link: Callable[[StageLimits], StageLimits] = lambda link: link,
) -> Evaluation:
    """The assignment with other limits of memory, and other links."""
    stages = (link(one) for one in plan.problem.stages)
    stages = (replace(one, memory_bytes=memory(one.memory_bytes)) for one in stages)
    return Evaluation(replace(plan.problem, stages=tuple(stages)), plan.stage_of)


def _moves(
    model: Model, stages: tuple[int, ...], boundary: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """(groups, stage they go to): each single group that may go, and runs in the order."""
    near, far = boundary, boundary + 1
    here = {side: [v for v, s in enumerate(stages) if s == side] for side in (near, far)}
    for v, s in single_moves(model.arcs, stages):
        if {stages[v], s} == {near, far} and model.lowest[v] <= s <= model.highest[v]:
            yield (v,), s
    for count in range(2, len(here[near])):
        if model.highest[here[near][-count]] < far:
            break
        yield tuple(here[near][-count:]), far
    for count in range(2, len(here[far])):
        if model.lowest[here[far][count - 1]] > near:
            break
        yield tuple(here[far][:count]), near


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


MORE_MEMORY = 1.1
FASTER = 2.0


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The assignment with one limit less; `plan` is None where it cannot be taken back."""

    kind: Literal["memory", "bandwidth", "warm-up", "constraint"]
    text: str
    plan: Evaluation | None
    reason: str = ""  # why there is none


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The result of a relaxation: `objective_seconds` was found, no plan is below the bound.

    `status` "not tried": time was up, or for the `reason` given.
    """

    kind: str
    text: str
    status: Literal["optimal", "feasible", "not tried"]
    objective_seconds: float | None = None
    bound_seconds: float | None = None
    stage_of: tuple[int, ...] = ()
    reason: str = ""


def relaxations(plan: Evaluation, deeper: MemoryRule | None = None) -> Iterator[Relaxation]:
    """Memory, links, warm-up (`deeper`: the rule of a deeper one), and each of the user's wishes.

    A limit that is not there is not eased.
    """
    problem = plan.problem
    if any(limit is not None for limit in plan.deployment.limits):
        yield Relaxation("memory", "no memory limit", eased(plan, memory=lambda _: None))
        text = f"{100 * (MORE_MEMORY - 1):.0f} % more memory on every device"
        yield Relaxation("memory", text, eased(plan, memory=_roomier))
    if any(_costs(stage) for stage in problem.stages) and len(problem.stages) > 1:
        yield Relaxation("bandwidth", "links without cost", eased(plan, link=_free))
        text = f"links {FASTER:g} times as fast"
        yield Relaxation("bandwidth", text, eased(plan, link=_faster))
    if deeper is not None and deeper != problem.memory:
        text = f"a deeper warm-up (--warmup 1), {list(deeper.in_flight)} microbatches in flight"
        yield Relaxation("warm-up", text, plan.of(plan.stage_of, replace(problem, memory=deeper)))
    for wish in problem.wishes:
        if wish.text == OUTPUT_WISH:
            continue
        loose = without(problem, wish)
        reason = "" if loose else "what it asks for holds without it"
        then = plan.of(plan.stage_of, loose) if loose else None
        yield Relaxation("constraint", f"without {wish.text}", then, reason)


def without(problem: PartitionProblem, wish: Wish) -> PartitionProblem | None:
    """The problem without one of its wishes; what other wishes ask for too stays.

    None where the problem has no entry of the wish.
    """
    others = [one for one in problem.wishes if one is not wish]

    def left(name: str) -> tuple[tuple[int, ...], ...]:
        kept = {entry for other in others for entry in getattr(other, name)}
        gone = set(getattr(wish, name)) - kept
        return tuple(entry for entry in getattr(problem, name) if entry not in gone)

    lists = {name: left(name) for name in ("pins", "together", "apart", "forbidden")}
    loose = replace(problem, **lists)  # type: ignore[arg-type]
    if wish.max_stages is not None:
        counts = [n for one in others if (n := one.max_stages) is not None]
        empty = any(n < len(problem.stages) for n in counts)
        loose = replace(loose, max_stages=min(counts, default=None), allow_empty=empty)
    return None if loose == problem else replace(loose, wishes=tuple(others))


def relax(
    wanted: Sequence[Relaxation],
    breaks: Breaks = broken,
    solve: Solve = partition,
    *,
    time_limit: float,
    seed: int = 0,
) -> tuple[Relaxed, ...]:
    """Solve each in turn; those for which no time is left are "not tried".

    Args:
        time_limit: wall seconds for all; a dynamic program that was begun is not interrupted.
    """
    end = time.monotonic() + time_limit
    found = []
    for i, one in enumerate(wanted):
        left = end - time.monotonic()
        if one.plan is None or left <= 0:
            reason = one.reason or "no time was left"
            found.append(Relaxed(one.kind, one.text, "not tried", reason=reason))
            continue
        here = None if breaks(one.plan) else one.plan.partition()
        try:
            answer = solve(one.plan.problem, time_limit=left / (len(wanted) - i), seed=seed)
        except InfeasibleError:  # a deeper warm-up may not fit, or nothing was found in time
            answer = None
        found.append(_best(one, here, answer))
    return tuple(found)


def _best(
    one: Relaxation, here: Partition | None, answer: tuple[Partition, Certificate] | None
) -> Relaxed:
    """The better one of the plan itself, where it is allowed, and of what was found."""
    if answer is None:
        if here is None:
            return Relaxed(one.kind, one.text, "not tried", reason="no plan of it was found")
        return Relaxed(one.kind, one.text, "feasible", here.objective, 0.0, here.stage_of)
    best, certificate = answer
    bound = certificate.bound_seconds
    if here is not None and here.objective <= best.objective:
        best = here
    optimal = math.isclose(best.objective, bound, rel_tol=1e-5) or best.objective <= bound
    status: Literal["optimal", "feasible"] = "optimal" if optimal else "feasible"
    return Relaxed(one.kind, one.text, status, best.objective, bound, best.stage_of)


def _costs(stage: StageLimits) -> bool:
    return math.isfinite(stage.bytes_per_second) or stage.latency_seconds > 0


def _roomier(limit: int | None) -> int | None:
    return None if limit is None else int(limit * MORE_MEMORY)


def _free(link: StageLimits) -> StageLimits:
    return replace(link, bytes_per_second=math.inf, latency_seconds=0.0)


def _faster(link: StageLimits) -> StageLimits:
    return replace(
        link,
        bytes_per_second=link.bytes_per_second * FASTER,
        latency_seconds=link.latency_seconds / FASTER,
    )
