"""Why a plan is as it is: what binds each stage, what other cuts and looser limits would give.

Loads, memory and objectives are the evaluator's; a neighbouring cut is measured as it stands,
without moving anything else in answer to it.  A looser limit is the same problem with one limit
gone or eased, which `partition` solves within a time limit.  The current assignment stays allowed
in every one of them and is measured there too, so a search that ends early never makes a looser
limit look worse than the plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.model import Model, build, single_moves
from pdcompile.passes.partition.search import partition
from pdcompile.plan.evaluate import (
    Evaluation,
    measure,
    memory,
    path_of,
    violations,
)
from pdcompile.plan.makespan import Path, StagePair
from pdcompile.plan.times import round_trips
from pdcompile.problem import OUTPUT_WISH, MemoryRule, PartitionProblem, StageLimits, Wish
from pdcompile.units import format_bytes

#: steps of work for all neighbouring cuts together, about three seconds
WORK = 1_500_000


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


def stage_uses(problem: PartitionProblem, stage_of: Sequence[int]) -> tuple[StageUse, ...]:
    """What each stage spends a microbatch on.

    The objective without a flush is the largest `binding_seconds`; with one it is the length of
    the critical path, whose parts are `critical_seconds` and transfers.
    """
    spent = Evaluation(problem, stage_of).times
    forward, backward = spent.forward, spent.backward
    sent, received = spent.traffic(problem.num_microbatches)
    held = memory(problem, stage_of)
    flush = problem.objective == "flush"
    path = path_of(problem, stage_of) if flush else None
    objective = measure(problem, stage_of).objective
    total = objective / problem.num_microbatches if flush else objective
    found, trips = [], round_trips(spent.timing)
    for s, limits in enumerate(problem.stages):
        compute = forward[s] + backward[s]
        turn, trip, in_flight = _longest_trip(trips, s, () if flush else problem.memory.in_flight)
        uses = {"compute": compute}
        if limits.full_duplex:
            uses |= {"sending": sent[s], "receiving": received[s]}
        else:
            uses["link"] = sent[s] + received[s]
        if in_flight:
            uses["round trip"] = trip / in_flight
        binds = max(uses, key=lambda name: uses[name])
        ahead, back = (path.forward[s], path.backward[s]) if path else (0, 0.0)
        found.append(
            StageUse(
                stage=s,
                compute_seconds=compute,
                sent_seconds=sent[s],
                received_seconds=received[s],
                round_trip_seconds=trip,
                turn=turn,
                in_flight=in_flight,
                memory_bytes=held[s],
                limit_bytes=limits.memory_bytes,
                binds=binds,
                binding_seconds=uses[binds],
                idle=max(0.0, 1 - compute / total) if total > 0 else 0.0,
                forwards=ahead,
                backwards=back,
                critical_seconds=ahead * forward[s] + back * backward[s],
            )
        )
    return tuple(found)


def _longest_trip(
    trips: Mapping[StagePair, float], stage: int, in_flight: Sequence[int]
) -> tuple[int, float, int]:
    """(where it turns, seconds, microbatches that it is made once for: 0 where nobody says)."""
    own = {t: seconds for (s, t), seconds in trips.items() if s == stage}
    if not in_flight:
        turn = max(own, key=lambda t: own[t])
        return turn, own[turn], 0
    apart = {t: in_flight[stage] - in_flight[t] + 1 for t in own}
    turn = max(own, key=lambda t: own[t] / apart[t])
    return turn, own[turn], apart[turn]


def bottleneck(problem: PartitionProblem, uses: Sequence[StageUse]) -> int:
    """The stage that decides: most of the critical path, or the largest load without a flush."""
    if problem.objective == "flush":
        return max(uses, key=lambda use: use.critical_seconds).stage
    return max(uses, key=lambda use: use.binding_seconds).stage


def critical(problem: PartitionProblem, stage_of: Sequence[int]) -> tuple[Path, float]:
    """The critical path under a flush, and its seconds on links."""
    path = path_of(problem, stage_of)
    timing = Evaluation(problem, stage_of).times.timing
    return path, math.fsum(timing.of_kind(kind)[hop] * times for hop, kind, times in path.hops)


def boundaries(problem: PartitionProblem, stage_of: Sequence[int]) -> tuple[Boundary, ...]:
    """For each boundary its neighbouring cuts: single items, and shifts along the items' order.

    As many are measured as `WORK` allows, those first that leave the two stages' loads lowest,
    so large problems get fewer looks and the answer does not depend on the clock.
    """
    model = build(problem)
    stages = tuple(stage_of[group[0]] for group in model.members)
    now = measure(problem, stage_of).objective
    moves = [list(_moves(model, stages, s)) for s in range(len(problem.stages) - 1)]
    size = len(problem.items) + len(problem.traffic)
    if problem.objective == "flush":
        size += 4 * problem.num_microbatches * len(problem.stages)
    most = max(2, WORK // size // max(1, len(moves)))
    return tuple(
        _boundary(model, stages, now, s, possible, most) for s, possible in enumerate(moves)
    )


def broken(problem: PartitionProblem, stage_of: Sequence[int]) -> list[str]:
    """`violations`, with memory in units for a reader and how much it is over."""
    found = violations(problem.without_memory_limits(), stage_of)
    for s, needed in enumerate(memory(problem, stage_of)):
        limit = problem.stages[s].memory_bytes
        if limit is not None and needed > limit:
            found.append(
                f"stage {s} would need {format_bytes(needed)} of memory, "
                f"{format_bytes(needed - limit)} too much"
            )
    return found


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
    model: Model,
    stages: tuple[int, ...],
    now: float,
    boundary: int,
    possible: list[tuple[tuple[int, ...], int]],
    most: int,
) -> Boundary:
    problem = model.problem
    seconds = [f + w for f, w in zip(model.forward, model.backward, strict=True)]
    loads = [0.0] * len(problem.stages)
    for v, s in enumerate(stages):
        loads[s] += seconds[v]

    def heavier(move: tuple[tuple[int, ...], int]) -> tuple[float, int]:
        """The larger load of the two stages after the move; of equal ones the smaller move."""
        moved = sum(seconds[v] for v in move[0])
        other = boundary if move[1] != boundary else boundary + 1
        pair = (
            (loads[move[1]] + moved) / problem.stages[move[1]].speed,
            (loads[other] - moved) / problem.stages[other].speed,
        )
        return max(pair), len(move[0])

    best: Move | None = None
    better: Move | None = None
    looked = 0
    for groups, to in sorted(possible, key=heavier)[:most]:
        looked += 1
        moved = set(groups)
        after = model.items_of([to if v in moved else s for v, s in enumerate(stages)])
        items = tuple(sorted(i for v in groups for i in model.members[v]))
        objective = measure(problem, after).objective
        move = Move(boundary, items, to, objective, tuple(broken(problem, after)))
        if not move.broken:
            if best is None or objective < best.objective_seconds * (1 - 1e-12):
                best = move
        elif objective < now * (1 - 1e-9) and (
            better is None or objective < better.objective_seconds * (1 - 1e-12)
        ):
            better = move
    values, size = _crossing(problem, model.items_of(stages), boundary)
    return Boundary(boundary, values, size, best, better, looked, len(possible))


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
    """A problem with one limit less; `problem` is None where the limit cannot be taken back."""

    kind: Literal["memory", "bandwidth", "warm-up", "constraint"]
    text: str
    problem: PartitionProblem | None
    reason: str = ""  # why there is no problem


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


def relaxations(
    problem: PartitionProblem, deeper: MemoryRule | None = None
) -> Iterator[Relaxation]:
    """Memory, links, warm-up (`deeper`: the rule of a deeper one), and each of the user's wishes.

    A limit that is not there is not eased.
    """
    if any(stage.memory_bytes is not None for stage in problem.stages):
        yield Relaxation("memory", "no memory limit", problem.without_memory_limits())
        text = f"{100 * (MORE_MEMORY - 1):.0f} % more memory on every device"
        yield Relaxation("memory", text, _stages(problem, _roomier))
    if any(_costs(stage) for stage in problem.stages) and len(problem.stages) > 1:
        yield Relaxation("bandwidth", "links without cost", _stages(problem, _free))
        text = f"links {FASTER:g} times as fast"
        yield Relaxation("bandwidth", text, _stages(problem, _faster))
    if deeper is not None and deeper != problem.memory:
        text = f"a deeper warm-up, {list(deeper.in_flight)} microbatches in flight"
        yield Relaxation("warm-up", text, replace(problem, memory=deeper))
    for wish in problem.wishes:
        if wish.text == OUTPUT_WISH:
            continue
        loose = without(problem, wish)
        reason = "" if loose else "what it asks for holds without it"
        yield Relaxation("constraint", f"without {wish.text}", loose, reason)


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
    problem: PartitionProblem,
    stage_of: Sequence[int],
    wanted: Sequence[Relaxation],
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
        if one.problem is None or left <= 0:
            reason = one.reason or "no time was left"
            found.append(Relaxed(one.kind, one.text, "not tried", reason=reason))
        else:
            found.append(_solved(one, one.problem, stage_of, left / (len(wanted) - i), seed))
    return tuple(found)


def _solved(
    one: Relaxation, problem: PartitionProblem, stage_of: Sequence[int], seconds: float, seed: int
) -> Relaxed:
    here = None if violations(problem, stage_of) else measure(problem, stage_of)
    try:
        best, certificate = partition(problem, time_limit=seconds, seed=seed)
    except InfeasibleError:
        # A deeper warm-up may not fit, or nothing was found in time.
        if here is None:
            return Relaxed(one.kind, one.text, "not tried", reason="no plan of it was found")
        return Relaxed(one.kind, one.text, "feasible", here.objective, 0.0, here.stage_of)
    bound = certificate.bound_seconds
    if here is not None and here.objective <= best.objective:
        best = here
    optimal = math.isclose(best.objective, bound, rel_tol=1e-5) or best.objective <= bound
    status: Literal["optimal", "feasible"] = "optimal" if optimal else "feasible"
    return Relaxed(one.kind, one.text, status, best.objective, bound, best.stage_of)


def _stages(
    problem: PartitionProblem, change: Callable[[StageLimits], StageLimits]
) -> PartitionProblem:
    return replace(problem, stages=tuple(map(change, problem.stages)))


def _costs(stage: StageLimits) -> bool:
    return math.isfinite(stage.bytes_per_second) or stage.latency_seconds > 0


def _roomier(stage: StageLimits) -> StageLimits:
    limit = stage.memory_bytes
    return replace(stage, memory_bytes=None if limit is None else int(limit * MORE_MEMORY))


def _free(stage: StageLimits) -> StageLimits:
    return replace(stage, bytes_per_second=math.inf, latency_seconds=0.0)


def _faster(stage: StageLimits) -> StageLimits:
    return replace(
        stage,
        bytes_per_second=stage.bytes_per_second * FASTER,
        latency_seconds=stage.latency_seconds / FASTER,
    )
