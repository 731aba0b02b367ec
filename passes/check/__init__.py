"""Prove a schedule before anything runs: pairing, deadlock, coverage, weights, slots, memory."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pdcompile.errors import ScheduleError
from pdcompile.passes.check.walk import EVALUATION, Walk
from pdcompile.passes.schedules.device_order import in_device_order
from pdcompile.passes.schedules.stream import Stream, evaluation
from pdcompile.plan import Edge, Plan
from pdcompile.schedule import Schedule
from pdcompile.schedule.spec import OPERATIONS, Broadcast, PipelineSpec, with_edges

__all__ = ["Proof", "check", "check_programs"]

MAX_LISTED = 16
MAX_CALLS = 64  # a stream of ours repeats after its deepest warm-up has been filled: beyond that


@dataclass(frozen=True, slots=True)
class Proof:
    """Statements that were proved, one by one, and how long it took."""

    schedule: str
    statements: tuple[str, ...]
    num_programs: int
    num_instructions: int
    seconds: float

    @property
    def headline(self) -> str:
        """States the schedule, and how many programs and instructions were proved."""
        return (
            f"schedule {self.schedule}: proved on {self.num_programs} programs, "
            f"{self.num_instructions:,} instructions"
        )

    @property
    def summary(self) -> str:
        """One sentence that names what the statements are about."""
        about = (re.split("[:,]", statement)[0] for statement in self.statements)
        return f"{self.headline}: {', '.join(about)}"

    def __str__(self) -> str:
        head = f"{self.headline}, {self.seconds:.2f} s"
        return "\n  ".join([head, *self.statements])


def check(plan: Plan, counts: Iterable[int] | None = None, *, ordered: bool = False) -> Proof:
    """Prove every sequence of calls: full minibatches without end, short ones, flushes.

    Full minibatches are walked until the stream and the token state both repeat; from there on
    every further one repeats by induction.  Then, from the repeating state: the flush, and a
    short minibatch followed by full ones until the same state is back.  Where replicas take whole
    minibatches in turn, what repeats is several calls: the flush is proved after each of them, and
    what begins after such a flush.

    Args:
        counts: microbatches of short minibatches; None: 1 and the deepest warm-up.
        ordered: for channels in device order, see `exchange`.

    Raises:
        DeadlockError, ScheduleError: with the place, an excerpt, and the shortest cycle.
    """
    spec, full = plan.spec, plan.training.num_microbatches
    chosen = (1, max(spec.warmup)) if counts is None else counts
    shorts = tuple(sorted({short for short in chosen if 1 <= short < full}))
    if not spec.kind.trains:
        return _forward_only(plan, (full, *shorts), ordered=ordered)
    return _check(spec, shorts, ordered=ordered)


def _forward_only(plan: Plan, counts: tuple[int, ...], *, ordered: bool) -> Proof:
    """Prove calls without backwards: each is complete in itself, and leaves nothing behind."""
    begin, spec, walks = time.perf_counter(), with_edges(plan.spec, plan.edges), list[Walk]()
    for count in counts:
        program = evaluation(plan, plan.edges, count)
        walks.append(Walk(spec, ordered=ordered, forward_only=True))
        walks[-1].run(in_device_order(spec, program, ())[0] if ordered else program)
    shown = " or ".join(map(str, counts))
    induction = f"any number of calls: each ends empty; proved with {shown} microbatches"
    return _proof(walks, induction, begin)


@lru_cache(maxsize=16)
def _check(spec: PipelineSpec, shorts: tuple[int, ...], *, ordered: bool) -> Proof:
    begin = time.perf_counter()
    full = spec.num_microbatches
    walk, stream = Walk(spec, ordered=ordered), Stream.begin(spec, ordered=ordered)
    stream, calls = _repeat(walk, stream, full)
    walks, steady = [walk], dict[int, tuple[object, ...]]()  # by phase
    for _ in range(spec.period):
        steady[stream.phase] = walk.state()
        walks.append(_flushed(walk, stream))
        if spec.period > 1:
            program, stream = stream.step(full)
            walk.run(program)
    for short in shorts:
        other = walk.copy()
        program, after = stream.step(short)
        other.run(program)
        walks.append(_flushed(other, after))
        goes_on = spec.kind.stream or after != stream
        walks.append(_settled(other, after, goes_on, steady, f"{short} microbatches"))
    for phase in range(1, spec.period):
        other = Walk(spec, ordered=ordered, minibatches=phase)
        after = Stream.begin(spec, phase, ordered=ordered)
        walks.append(_settled(other, after, True, steady, f"a flush of {phase} calls"))
    sequences = [f"{full}, {full}, …"] + [f"{full}, {short}, {full}, …" for short in shorts]
    every = f" every {spec.period} calls" if spec.period > 1 else ""
    induction = (
        f"any number of calls: programs and token state repeat{every} from call {calls}; proved "
        f"with {' and '.join(sequences)} microbatches and a flush after each"
    )
    return _proof(walks, induction, begin)


def check_programs(
    plan: Plan,
    programs: Iterable[Schedule],
    edges: tuple[Edge, ...] | None = None,
    broadcasts: Sequence[Broadcast] = (),
    *,
    ordered: bool = False,
) -> Proof:
    """Prove exactly these successive programs, while nothing is in flight before the first.

    Args:
        edges: what crosses stages in them, where that is not what the plan says.
        broadcasts: what each has to bring from whom to whom.

    Raises:
        DeadlockError, ScheduleError: with the place, an excerpt, and the shortest cycle.
    """
    begin, listed = time.perf_counter(), list(programs)
    spec = plan.spec if edges is None else with_edges(plan.spec, edges)
    forward_only = all(program.name.endswith(EVALUATION) for program in listed)
    walk = Walk(spec, ordered=ordered, forward_only=forward_only)
    for program in listed:
        walk.run(program, broadcasts)
    return _proof([walk], f"{walk.num_programs} programs in this order", begin)


def _repeat(walk: Walk, stream: Stream, count: int) -> tuple[Stream, int]:
    """Walk equal calls until stream and tokens repeat; the stream and the call from which."""
    spec, calls = stream.spec, 0
    most = MAX_CALLS + 2 * spec.period * spec.reach
    before: deque[tuple[Stream, object]] = deque(maxlen=spec.period)  # the last calls left this
    while calls < most:
        program, after = stream.step(count)
        walk.run(program)
        if after == stream and not spec.kind.stream:
            return stream, calls  # complete in itself: the state before was the fresh one
        state = (after, walk.state())
        if len(before) == spec.period and before[0] == state:
            return after, calls + 1 - spec.period
        before.append(state)
        stream, calls = after, calls + 1
    raise ScheduleError(f"the programs do not repeat within {most} calls of {count}")


def _settled(
    walk: Walk, stream: Stream, goes_on: bool, steady: Mapping[int, object], what: str
) -> Walk:
    """Prove that calls from here lead to the repeating state (`goes_on` False: it is here)."""
    if goes_on:
        stream, _ = _repeat(walk, stream, stream.spec.num_microbatches)
    if walk.state() != steady[stream.phase]:
        raise ScheduleError(f"after {what} the stream settles in another state")
    return walk


def _flushed(walk: Walk, stream: Stream) -> Walk:
    """Prove the flush from here, and that everything is then as at the beginning, but for what
    waits for the rest of its group."""
    other, spec = walk.copy(), stream.spec
    program, after = stream.flush()
    other.run(program)
    ordered = walk.exchange.ordered
    fresh = Walk(spec, ordered=ordered, minibatches=walk.base)
    begin = Stream.begin(spec, walk.base, ordered=ordered)
    if other.state() != fresh.state() or after != begin:
        raise ScheduleError("the flush program leaves something behind", where=program.name)
    return other


def _proof(walks: list[Walk], induction: str, begin: float) -> Proof:
    spec = walks[0].spec
    num_stages = len(spec.ranks)
    peaks = [
        max(walk.tokens[rank][stage].peak_in_flight for walk in walks for rank in ranks)
        for stage, ranks in enumerate(spec.ranks)
    ]
    planned = [spec.in_flight(stage) for stage in range(num_stages)]
    forward_only = walks[0].forward_only
    lags = [spec.lag(stage) for stage in range(num_stages)]
    versions = [spec.versions(stage) for stage in range(num_stages)]
    groups = [spec.group(stage) for stage in range(num_stages)]
    ordered = walks[0].exchange.ordered
    order = "the schedule's" if spec.kind.turns else "ascending"
    directions = "forward" if forward_only else "forward and backward"
    statements = [
        "pairing: each receive has its send, first in first out; channels "
        + ("device_order" if ordered else "per_direction"),
        "no deadlock, even where a send ends only when its receiver has come to the wait"
        + (f"; at most {OPERATIONS} unfinished on a rank" if ordered else ""),
        f"coverage: each microbatch once {directions} on each of {num_stages} stages, on one "
        f"replica, in {order} order",
    ]
    if not forward_only:
        statements += [
            f"weights: {directions} of minibatch t on {_weights(lags, groups)}, "
            f"{_listed(versions)} live "
            f"version{'s' if max(versions) > 1 else ''}, "
            "none overwritten while named; updates in order",
            f"in flight: at most {_by_stage(peaks)} microbatches per stage, "
            f"planned {_by_stage(planned)}",
        ]
    statements += ["slots: no receive into a live slot", induction]
    return Proof(
        spec.name,
        tuple(statements),
        sum(walk.num_programs for walk in walks),
        sum(walk.num_instructions for walk in walks),
        time.perf_counter() - begin,
    )


def _weights(lags: list[int], groups: list[int]) -> str:
    update = f"t//{_listed(groups)}" if max(groups) > 1 else "t"
    return f"W_max({update}-{_listed(lags)},0)" if any(lags) else f"W_{update}"


def _listed(counts: list[int]) -> str:
    """Counts by stage, or the number of all stages."""
    return _by_stage(counts) if len(set(counts)) > 1 else str(counts[0])


def _by_stage(counts: list[int]) -> str:
    if len(counts) <= MAX_LISTED:
        return str(counts)
    return f"[{counts[0]}, {counts[1]}, …, {counts[-1]}]"
