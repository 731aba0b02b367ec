"""Time and memory of a schedule, before anything runs: the third reader of its instructions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from pdcompile.cluster import Level, Link
from pdcompile.passes.schedules.stream import make_stream
from pdcompile.passes.simulate.clock import Clock, Links, TimelineEvent
from pdcompile.passes.simulate.ledger import ledgers
from pdcompile.plan import Forecast, Plan
from pdcompile.schedule import Phase, Schedule

__all__ = ["Link", "Links", "Simulation", "TimelineEvent", "simulate", "simulate_programs"]

STREAM_STEPS = 5  # calls of a stream for each that its programs reach back; half of them fill it


@dataclass(frozen=True, slots=True)
class Simulation:
    """A forecast, the timeline that it was read from, and when each call ended.

    `window`: the seconds of the timeline from which `forecast.step_seconds` was read, which are
    those of one step or of several.  `passed_seconds`: per rank, when it was done with each
    instruction of its programs, one after the other; like the timeline, empty where nobody wants
    it.
    """

    forecast: Forecast
    timeline: tuple[TimelineEvent, ...]
    ends_seconds: tuple[float, ...]  # per program, when its last rank was done
    window: tuple[float, float]
    programs: tuple[Schedule, ...] = ()
    passed_seconds: tuple[tuple[float, ...], ...] = ()


def simulate(
    plan: Plan,
    *,
    steps: int | None = None,
    links: Links | None = None,
    timeline: bool = True,
) -> Simulation:
    """Walk the plan's own programs.  `clock` has the timing model, `ledger` the memory's.

    `forecast.step_seconds` is one minibatch in steady state: with a flush the makespan of a
    call, for a stream the mean of the second half of its calls.  The bubble is
    1 − busy / (ranks · time), where busy counts forward, backward and update.

    Args:
        steps: calls to simulate (1 with a flush, 10 or more for a stream); at least 1, and as
            many more as it takes until it is every replica's turn as often.
        links: what joins two ranks; None reads plan.cluster (empty: infinitely fast).
        timeline: False for those who want the forecast alone: no event is kept.

    Raises:
        ClusterError, ScheduleError: the plan's cluster or schedule is unusable.
    """
    spec = plan.spec
    stream = spec.kind.stream
    count = max(1, steps or (STREAM_STEPS * spec.reach if stream else 1))
    if spec.period > 1:
        count += -count % (2 * spec.period)
    *programs, flush = _calls(plan, count)
    clock = Clock(plan, programs, links or links_of(plan), timeline=timeline)
    ends = clock.run()
    half = len(ends) // 2
    # A call of a stream ends with forwards that later calls follow: only differences count.
    several = stream and half > 0
    window = (ends[half - 1], ends[-1]) if several else (0.0, ends[0])
    seconds = (window[1] - window[0]) / (len(ends) - half if several else 1)
    counted = programs[-spec.period :]
    forecast = _forecast(plan, counted, seconds, clock, (*programs, flush), calls=len(counted))
    return Simulation(forecast, clock.timeline, ends, window, tuple(programs), clock.passed_seconds)


def simulate_programs(plan: Plan, programs: Sequence[Schedule]) -> Simulation:
    """The same for given programs; the forecast's step is all of them."""
    clock = Clock(plan, programs, links_of(plan))
    ends = clock.run()
    window = 0.0, max(ends)
    forecast = _forecast(plan, programs, max(ends), clock, programs)
    return Simulation(forecast, clock.timeline, ends, window, tuple(programs), clock.passed_seconds)


def links_of(plan: Plan) -> Links:
    """Links of the plan's cluster; ranks are its devices in order."""
    if not plan.cluster.strip():
        level = Level("none", 1, math.inf)
        return lambda _a, _b: level
    return cache(plan.machines.level_between)


def _forecast(
    plan: Plan,
    counted: Sequence[Schedule],
    seconds: float,
    clock: Clock,
    walked: Sequence[Schedule],
    *,
    calls: int = 1,
) -> Forecast:
    """Busy time and traffic are of the programs that are `counted`, ledgers of all `walked`.

    `seconds` is the time of one of so many `calls` that are counted.
    """
    busy, sent = 0.0, [0] * clock.spec.num_ranks
    for program in counted:
        for rank, column in enumerate(program.columns):
            for one in column:
                if one.action.phase is Phase.COMPUTE:
                    busy += clock.seconds[one.action, one.stage]
                elif one.peer != rank:
                    sent[rank] += clock.bytes_of(one)
    num_ranks = clock.spec.num_ranks
    return Forecast(
        step_seconds=seconds,
        samples_per_second=plan.training.batch_size / seconds if seconds > 0 else math.inf,
        bubble=max(0.0, 1 - busy / (calls * num_ranks * seconds)) if seconds > 0 else 0.0,
        sent_bytes=tuple(-(-count // calls) for count in sent),
        ledgers=ledgers(plan, walked),
    )


def simulate_drained(plan: Plan, steps: int) -> Simulation:
    """Simulate `steps` minibatches and the flush, so that schedules compare work for work.

    A stream such as 2bw would otherwise end with forwards whose backwards are not drawn.
    """
    return simulate_programs(plan, _calls(plan, steps))


def _calls(plan: Plan, steps: int) -> list[Schedule]:
    """The programs of so many full minibatches, and the flush after them."""
    stream, programs = make_stream(plan), []
    for _ in range(steps):
        program, stream = stream.step(plan.training.num_microbatches)
        programs.append(program)
    return [*programs, stream.flush()[0]]
