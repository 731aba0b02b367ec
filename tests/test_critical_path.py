"""The critical path of a simulation, against the longest of all paths, and memory over time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Level
from pdcompile.passes.simulate import Links, Simulation, simulate, simulate_drained
from pdcompile.passes.simulate.critical_chain import CriticalPath, Share, critical_path
from pdcompile.passes.simulate.ledger import held_over_time, ledgers
from pdcompile.plan import Plan
from pdcompile.schedule import Instruction, Phase
from pdcompile.schedule.registry import kind_of
from tests.helpers.schedules import make_plan, plans

RECEIVES = (Phase.POST_RECV, Phase.WAIT_RECV)


def decisive_of(path: CriticalPath) -> Share:
    """The largest share that one can do something about."""
    return next(one for one in path.shares if one.what not in ("fill", "drain"))


def links(seconds_per_byte: float, *, full_duplex: bool = True) -> Links:
    level = Level("wire", 2, 1 / seconds_per_byte, 0.0, full_duplex)
    return lambda _a, _b: level


def path_of(plan: Plan, found: Simulation) -> CriticalPath:
    flush = not kind_of(plan.training.schedule).stream
    return critical_path(found.timeline, found.window, flush=flush)


class WaitsFor:
    """Events of a timeline that each event has to wait for, read off the programs alone.

    Of plans with one value between two stages, so that sender, receiver, kind and microbatch name
    a transfer.
    """

    def __init__(self, found: Simulation, *, full_duplex: bool) -> None:
        self.events = found.timeline
        self.before: dict[int, set[int]] = defaultdict(set)
        self.number = {self._key(one): n for n, one in enumerate(self.events)}
        for rank in range(len(found.programs[0].columns)):
            self._column(rank, found)
        wires: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for n, one in enumerate(self.events):
            if one.action.phase is Phase.SEND:
                ends = (one.rank, one.peer)
                wires[ends if full_duplex else tuple(sorted(ends))].append(n)
        for order in wires.values():
            for a, b in itertools.pairwise(order):
                self.before[b].add(a)

    @staticmethod
    def _key(one: object) -> tuple[object, ...]:
        return tuple(getattr(one, name) for name in
                     ("action", "rank", "peer", "minibatch", "microbatch", "stage"))  # fmt: skip

    def _column(self, rank: int, found: Simulation) -> None:
        passed: set[int] = set()  # events that this rank has waited for
        for base, program in enumerate(found.programs):
            for one in program.columns[rank]:
                phase, minibatch = one.action.phase, base + one.minibatch
                if phase is Phase.COMPUTE:
                    key = (one.action, rank, -1, minibatch, one.microbatch, one.stage)
                    n = self.number[key]
                    self.before[n] |= passed
                    passed = passed | {n}
                elif phase in (*RECEIVES, Phase.SEND, Phase.WAIT_SEND) and one.peer != rank:
                    n = self._transfer(rank, one, minibatch)
                    if phase in (Phase.POST_RECV, Phase.SEND):
                        self.before[n] |= passed
                    else:
                        passed = passed | {n}

    def _transfer(self, rank: int, one: Instruction, minibatch: int) -> int:
        ends = (one.peer, rank) if one.action.phase in RECEIVES else (rank, one.peer)
        kind = one.action.kind
        (found,) = [
            n for n, e in enumerate(self.events)
            if e.action.phase is Phase.SEND and e.action.kind is kind
            and (e.rank, e.peer) == ends
            and (e.minibatch, e.microbatch) == (minibatch, one.microbatch)
        ]  # fmt: skip
        return found

    def paths(self, n: int) -> Iterator[float]:
        """The length of every path that ends with an event."""
        own = self.events[n].end_seconds - self.events[n].start_seconds
        yield own
        for earlier in self.before[n]:
            for length in self.paths(earlier):
                yield own + length


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    times=st.lists(st.sampled_from([0.5, 1.0, 1.25, 3.0]), min_size=1, max_size=3),
    num=st.integers(1, 3),
    wire=st.sampled_from([0.125, 0.5, 4.0]),
    full_duplex=st.booleans(),
    extra=st.integers(0, 1),
    update=st.sampled_from([0.0, 0.25]),
)
def test_it_is_the_longest_of_all_paths(
    schedule: str, times: list[float], num: int, wire: float, full_duplex: bool, extra: int,
    update: float,
) -> None:  # fmt: skip
    plan = make_plan(schedule, len(times), num, extra=extra, seconds=[(t, 2 * t) for t in times])
    stages = tuple(replace(stage, update_seconds=update) for stage in plan.stages)
    plan = replace(plan, stages=stages)
    found = simulate(plan, links=links(wire, full_duplex=full_duplex))
    path, waits = path_of(plan, found), WaitsFor(found, full_duplex=full_duplex)
    longest = max(max(waits.paths(n)) for n in range(len(waits.events)))
    assert path.seconds == pytest.approx(longest)
    assert path.seconds == pytest.approx(found.forecast.step_seconds)
    numbers = [waits.number[waits._key(one)] for one in path.events]
    for a, b in itertools.pairwise(numbers):
        assert a in waits.before[b]


@settings(max_examples=40, deadline=None)
@given(plans(several=True), st.sampled_from([0.0, 0.3]))
def test_it_has_no_gaps_and_its_shares_add_up(plan: Plan, latency: float) -> None:
    level = Level("wire", 2, 8.0, latency, True)
    found = simulate(plan, links=lambda _a, _b: level)
    path, (begin, end) = path_of(plan, found), found.window
    assert path.events[-1].end_seconds == end
    assert path.events[0].start_seconds <= begin
    for a, b in zip(path.events, path.events[1:], strict=False):
        assert a.end_seconds == b.start_seconds
    assert path.seconds == pytest.approx(end - begin)
    assert sum(one.seconds for one in path.shares) == pytest.approx(end - begin)
    assert list(path.shares) == sorted(path.shares, key=lambda one: -one.seconds)


def shares(path: CriticalPath) -> dict[tuple[str, int, tuple[int, ...]], float]:
    return {(one.what, one.stage, one.ranks): one.seconds for one in path.shares}


def test_the_slow_stage_is_named() -> None:
    """1, 4 and 1 seconds forward, twice that backward, three microbatches: the second is busy
    for 36 seconds, after one forward and before one backward of the first."""
    plan = make_plan("1f1b", 3, 3, seconds=[(1, 2), (4, 8), (1, 2)])
    found = shares(path_of(plan, simulate(plan)))
    assert found == {("compute", 1, ()): 36, ("fill", -1, ()): 1, ("drain", -1, ()): 2}
    assert decisive_of(path_of(plan, simulate(plan))).stage == 1


def test_updates_are_no_bubble() -> None:
    plan = make_plan("1f1b", 1, 2)
    plan = replace(plan, stages=(replace(plan.stages[0], update_seconds=0.5),))
    assert shares(path_of(plan, simulate(plan))) == {
        ("compute", 0, ()): 6,
        ("update", 0, ()): 0.5,
    }


def test_the_slow_link_is_named() -> None:
    plan = make_plan("2bw", 2, 4, seconds=[(1, 2), (1, 2)])
    decisive = decisive_of(path_of(plan, simulate(plan, links=links(6.0))))
    assert decisive.what == "link"
    assert set(decisive.ranks) == {0, 1}


def test_sums_over_replicas_are_on_it() -> None:
    plan = make_plan("1f1b", 2, 4, replicas=(2, 2), trainable_bytes=64, parameter_bytes=64)
    found = simulate(plan, links=links(1.0))
    summed = {one.what: one.seconds for one in path_of(plan, found).shares}["sum"]
    assert summed == 64  # 2 · (2 − 1) · 64 / 2 s
    sums = [one for one in found.timeline if str(one.action) == "POST_REDUCE"]
    assert sorted(one.rank for one in sums) == [0, 1, 2, 3]
    assert {one.end_seconds - one.start_seconds for one in sums} == {64.0}


@settings(max_examples=30, deadline=None)
@given(plans(several=True))
def test_memory_over_time_peaks_where_the_ledger_says(plan: Plan) -> None:
    stages = tuple(
        replace(
            stage, parameter_bytes=100, trainable_bytes=80, saved_bytes=30 + s, workspace_bytes=7,
            step_bytes=9, input_bytes=4, output_bytes=3,
        )
        for s, stage in enumerate(plan.stages)
    )  # fmt: skip
    plan = replace(plan, stages=stages)
    found = simulate_drained(plan, 2)
    curves = held_over_time(plan, found.programs, found.passed_seconds)
    for curve, ledger in zip(curves, ledgers(plan, found.programs), strict=True):
        peak = max((one.ledger.total_bytes for one in curve), default=0)
        assert peak == ledger.total_bytes
        assert [one.seconds for one in curve] == sorted(one.seconds for one in curve)
