"""ZB-V: proved, as fast as its formula and all orders of small cases say, in 1F1B's memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.errors import ScheduleError
from pdcompile.passes.check import check
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan
from pdcompile.schedule import Action
from tests.helpers.schedules import chain, make_plan
from tests.test_interleaved import in_flight
from tests.test_schedules import words

NAME = "zb-v"


def v(ranks: int, count: int) -> Plan:
    """Stages whose forward and both parts of whose backward take a second each."""
    stages = 2 * ranks
    return make_plan(NAME, stages, count, per_rank=2, edges=chain(stages, 0), saved_bytes=1)


def seconds(ranks: int, count: int) -> int:
    """Seconds of all parts where each takes one."""
    few = 4 * (ranks + count) - (3 if count <= ranks else 2)
    return max(few, 6 * count + ranks - 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", range(1, 7))
def test_every_number_of_microbatches_is_proved(ranks: int) -> None:
    """The order is as long as the formula says; what is in flight is what was planned; a rank holds
    no more than the first one of 1F1B, whose stages are twice as long, and takes less time."""
    for count in range(1, 2 * ranks + 4):
        plan = v(ranks, count)
        check(plan)
        assert [stage.ranks for stage in plan.stages] == [
            (min(s, 2 * ranks - 1 - s),) for s in range(2 * ranks)
        ]
        found = simulate(plan).forecast
        assert found.step_seconds == pytest.approx(seconds(ranks, count))
        assert in_flight(plan, count) == [depth + 1 for depth in plan.training.warmup]
        twice = {"seconds": [(2.0, 4.0)] * ranks, "edges": chain(ranks, 0), "saved_bytes": 2}
        plain, split = (
            simulate(make_plan(name, ranks, count, **twice)).forecast for name in ("1f1b", "zb-h1")
        )
        held = [one.activations_bytes for one in found.ledgers]
        assert max(held) <= plain.ledgers[0].activations_bytes
        assert found.step_seconds <= split.step_seconds <= plain.step_seconds


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_rank_never_idles_once_it_has_begun(ranks: int) -> None:
    for count in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
        timeline = [one for one in simulate(v(ranks, count)).timeline if one.end_seconds]
        for rank in range(ranks):
            own = [one for one in timeline if one.rank == rank and one.action is not Action.STEP]
            own = [one for one in own if "SEND" not in one.action]
            begin = min(one.start_seconds for one in own)
            end = max(one.end_seconds for one in own)
            assert (begin, end - begin) == (rank, 6 * count)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(1, 16), st.integers(1, 64), st.sampled_from([None, 1.0]))
def test_deep_ones(ranks: int, count: int, clip: float | None) -> None:
    plan = make_plan(NAME, 2 * ranks, count, per_rank=2, clip=clip, edges=chain(2 * ranks, 0))
    check(plan)
    assert simulate(plan, timeline=False).forecast.step_seconds == seconds(ranks, count)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 1)])
def test_no_order_is_shorter(ranks: int, count: int) -> None:
    """None is shorter of all that hold no more than 1F1B does."""
    assert seconds(ranks, count) == shortest(ranks, count)


def shortest(ranks: int, count: int) -> int:
    """Walks all that ranks can do second by second: of each stage how many F, I and W are done."""
    last = 2 * ranks - 1
    states = {((0, 0, 0),) * (last + 1)}
    seen, goal, now = set(states), ((count,) * 3,) * (last + 1), 0
    while goal not in states:
        following = set()
        for state in states:
            for turn in itertools.product(*(_turns(state, r, count) for r in range(ranks))):
                after = list(state)
                for s, part in filter(None, turn):
                    after[s] = tuple(n + (k == part) for k, n in enumerate(after[s]))
                following.add(tuple(after))
        states = following - seen
        seen |= states
        now += 1
    return now


def _turns(
    state: tuple[tuple[int, ...], ...], rank: int, count: int
) -> list[tuple[int, int] | None]:
    last, found = len(state) - 1, list[tuple[int, int] | None]([None])
    held = (rank, last - rank)
    full = sum(state[s][0] - state[s][2] for s in held) == last + 1
    for s in held:
        forwards, inputs, weights = state[s]
        if not full and forwards < (count if s == 0 else state[s - 1][0]):
            found.append((s, 0))
        if inputs < (forwards if s == last else state[s + 1][1]):
            found.append((s, 1))
        if weights < inputs:
            found.append((s, 2))
    return found


def test_with_one_stage_a_rank_nothing_is_put_off() -> None:
    assert words(NAME, 4, 1) == "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"
    check(make_plan(NAME, 3, 5))


def test_three_stages_a_rank_are_refused() -> None:
    with pytest.raises(
        ScheduleError, match=r"rank 0 holds stages \[0, 3, 4\]; .* runs 2"
    ) as caught:
        check(make_plan(NAME, 6, 4, per_rank=3, depths=(3,) * 6))
    assert str(caught.value.remedy).endswith("use schedule gpipe or interleaved")
