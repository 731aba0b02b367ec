"""Several stages a rank, in turn or in a V: proved and mutated; interleaved timed by formula."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import DeadlockError, ScheduleError
from pdcompile.passes.check import check, check_programs
from pdcompile.passes.schedules import make_stream, warmup
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Edge, Plan, TiedParameter
from pdcompile.plan.times import times_of
from pdcompile.problem import StageLimits
from pdcompile.schedule import Action, Kind
from pdcompile.schedule.instruction import TO_WEIGHTS
from pdcompile.schedule.registry import kind_of
from tests.helpers.schedules import chain, make_plan, mutated, same_clock


def in_flight(plan: Plan, count: int) -> list[int]:
    """The most of each stage in one call, counted from its program: until all gradients are."""
    now, most = [0] * len(plan.stages), [0] * len(plan.stages)
    for column in make_stream(plan).step(count)[0].columns:
        for one in column:
            now[one.stage] += (one.action is Action.FORWARD) - (one.action in TO_WEIGHTS)
            most[one.stage] = max(most[one.stage], now[one.stage])
    return most


def sizes(ranks: int, per_rank: int, most: int) -> Iterator[Plan]:
    for m in range(1, most + 1):
        yield make_plan("interleaved", ranks * per_rank, m, per_rank=per_rank)


@pytest.mark.sample(2)
@pytest.mark.parametrize("per_rank", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow),
                                   pytest.param(5, marks=pytest.mark.slow),
                                   pytest.param(6, marks=pytest.mark.slow)])  # fmt: skip
def test_every_number_of_microbatches_is_proved(ranks: int, per_rank: int) -> None:
    """The bubble is the formula's, and what is in flight is what was planned, never less of a
    longer minibatch."""
    before = [0] * (ranks * per_rank)
    for plan in sizes(ranks, per_rank, 16):
        m = plan.training.num_microbatches
        check(plan)
        if per_rank > 1:
            found = in_flight(plan, m)
            assert found == [depth + 1 for depth in plan.training.warmup]
            assert all(old <= new for old, new in zip(before, found, strict=True))
            before = found
        if m % ranks == 0:
            bubble = simulate(plan, timeline=False).forecast.bubble
            assert bubble == pytest.approx((ranks - 1) / (per_rank * m + ranks - 1), abs=1e-9)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("ranks", "per_rank"), [(1, 2), (2, 1), (2, 2), (3, 3), (4, 2)])
def test_an_extra_warm_up_is_so_many_forwards_more(ranks: int, per_rank: int) -> None:
    """Counted, proved and timed as any program; enough of it sends all forwards first."""
    stages = ranks * per_rank
    for m in (1, ranks, 2 * ranks + 1, 4 * ranks):
        plain = make_plan("interleaved", stages, m, per_rank=per_rank)
        for extra in (1, 2, 3, per_rank * m):
            plan = make_plan(f"interleaved+{extra}", stages, m, per_rank=per_rank)
            check(plan)
            assert in_flight(plan, m) == [depth + 1 for depth in plan.training.warmup]
            for rank, column in enumerate(make_stream(plan).step(m)[0].columns):
                first = [one.action for one in column].index(Action.BACKWARD)
                before = sum(one.action is Action.FORWARD for one in column[:first])
                own = 2 * (ranks - 1 - rank) + (per_rank - 1) * ranks
                if per_rank == 1:
                    own = ranks - 1 - rank
                if m % ranks == 0:
                    assert before == min(own + extra + 1, per_rank * m)
            pairs = zip(plan.training.warmup, plain.training.warmup, strict=True)
            assert all(deep >= depth for deep, depth in pairs)


def test_an_extra_warm_up_is_room_for_stages_that_are_not_alike() -> None:
    """Transfers between alike ones are hidden without it: then it costs memory alone."""

    def seconds(name: str, units: tuple[int, ...]) -> float:
        times = [(1.0 * n, 2.0 * n) for n in units]
        plan = make_plan(name, 6, 4, per_rank=3, seconds=times)
        found = simulate(plan, links=lambda *_: StageLimits(bytes_per_second=2.0))
        return found.forecast.step_seconds

    unlike, alike = (1, 1, 2, 1, 1, 2), (1,) * 6
    assert seconds("interleaved", unlike) == pytest.approx(65)
    assert seconds("interleaved+2", unlike) == pytest.approx(61)
    assert seconds("interleaved+2", alike) == pytest.approx(seconds("interleaved", alike))


@pytest.mark.parametrize(
    "name", ["1f1b+1", "interleaved+0", "interleaved+01", "interleaved+x", "interleaved+-1"]
)
def test_an_extra_warm_up_that_is_none(name: str) -> None:
    with pytest.raises(ScheduleError, match="is not one of"):
        kind_of(name)


@pytest.mark.parametrize("seconds", [(1.0, 1.0), (2.0, 1.0), (0.5, 2.0)])
def test_the_bubble_is_the_formula_whatever_a_backward_takes(seconds: tuple[float, float]) -> None:
    plan = make_plan("interleaved", 8, 8, per_rank=2, seconds=[seconds] * 8)
    assert simulate(plan).forecast.bubble == pytest.approx(3 / (2 * 8 + 3))


def test_a_microbatch_less_takes_no_longer() -> None:
    """Also where the last round is not full."""
    for ranks, per_rank in ((2, 2), (3, 2), (4, 2), (3, 3)):
        times = [simulate(one).forecast.step_seconds for one in sizes(ranks, per_rank, 13)]
        assert times == sorted(times)


@st.composite
def several(draw: st.DrawFn) -> Plan:
    """Values that skip stages, with gradients or without; tied parameters; replicas; any ranks'
    order."""
    name, per_rank = draw(
        st.sampled_from([("interleaved", 2), ("interleaved", 3), ("interleaved+2", 2), ("zb-v", 2)])
    )
    ranks, replicas = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    n = ranks * per_rank
    edges = [replace(one, gradient=draw(st.booleans())) for one in chain(n) if draw(st.booleans())]
    for index in range(draw(st.integers(0, 3))):
        source = draw(st.integers(0, n - 2))
        targets = draw(st.sets(st.integers(source + 1, n - 1), min_size=1, max_size=3))
        edges.append(Edge(f"v{index}", source, tuple(sorted(targets)), 1, draw(st.booleans())))
    holders = tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=3))))
    plan = make_plan(
        name, n, draw(st.integers(1, 9)), per_rank=per_rank, edges=tuple(edges),
        replicas=(replicas,) * n,
        tied=(TiedParameter("w", holders, 1),), clip=draw(st.sampled_from([None, 1.0])),
    )  # fmt: skip
    order = draw(st.permutations(range(ranks * replicas)))
    stages = [replace(one, ranks=tuple(order[rank] for rank in one.ranks)) for one in plan.stages]
    return replace(plan, stages=tuple(stages))


@settings(max_examples=40)
@given(several())
def test_whatever_crosses_stages_is_proved(plan: Plan) -> None:
    check(plan, range(1, plan.training.num_microbatches))


@settings(max_examples=40)
@given(several())
def test_the_fast_clock_is_the_simulators(plan: Plan) -> None:
    """Both have transfers, reductions over replicas, norms, and new weights of tied parameters."""
    cluster = Cluster((Device(),) * plan.num_ranks, (Level("slow", plan.num_ranks, 4.0, 0.1),))
    stages = tuple(replace(one, trainable_bytes=5 + one.index) for one in plan.stages)
    plan = replace(plan, stages=stages, cluster=cluster.to_toml())
    returning = [edge.value for edge in plan.edges if edge.gradient]
    training = plan.training
    found = times_of(plan, cluster, returning).makespan(training.warmup, training.num_microbatches)
    assert same_clock(found, plan, simulate(plan, timeline=False).forecast.step_seconds)


def test_messages_that_are_ready_at_one_time_go_in_the_order_of_their_sends() -> None:
    """Two of them go to two stages of one rank, over one link."""
    edges = (Edge("skip", 0, (2,), 2, True), Edge("x0", 0, (1,), 8, True), *chain(4)[1:])
    plan = make_plan("zb-v", 4, 2, per_rank=2, edges=edges)
    cluster = Cluster((Device(),) * 2, (Level("slow", 2, 4.0, 0.0),))
    found = times_of(plan, cluster, [edge.value for edge in edges]).makespan((1, 1, 1, 0), 2)
    expected = simulate(replace(plan, cluster=cluster.to_toml())).forecast.step_seconds
    assert found == pytest.approx(expected)


@settings(max_examples=80)
@given(several(), st.randoms(use_true_random=False))
def test_mutations_are_caught(plan: Plan, pick: random.Random) -> None:
    """Something left out, done twice, or of another stage, microbatch or rank."""
    program, _ = make_stream(plan).step(plan.training.num_microbatches)
    rank = pick.randrange(plan.num_ranks)
    column = list(program.columns[rank])
    index = pick.randrange(len(column))
    one = column[index]
    if one.action.kind in (Kind.NORMS, Kind.LOSS):
        return  # of the whole rank, whichever stage they name
    stages = [other for other in range(len(plan.stages)) if other != one.stage]
    changed = [[], [one, one], [one._replace(stage=pick.choice(stages))]]
    if one.microbatch >= 0:
        changed.append([one._replace(microbatch=one.microbatch + pick.choice([-1, 1]))])
    if one.peer >= 0 and plan.num_ranks > 1:
        others = [other for other in range(plan.num_ranks) if other != one.peer]
        changed.append([one._replace(peer=pick.choice(others))])
    if one.target >= 0:
        changed.append([one._replace(target=-1)])
    column[index : index + 1] = pick.choice(changed)
    with pytest.raises((ScheduleError, DeadlockError)):
        check_programs(plan, [mutated(program, rank, column)])


@pytest.mark.parametrize(
    ("ranks", "message", "remedy"),
    [
        ((0, 1, 1, 0), r"rank 0 holds stages \[0, 3\] of 4 on 2 ranks", "[0, 2] and [1, 3]"),
        ((0, 0, 1, 1), r"rank 0 holds stages \[0, 1\]", "in turn share a rank: [0, 2] and"),
        ((0, 1, 0), r"rank 0 holds stages \[0, 2\] of 3 on 2 ranks", "every rank as many stages"),
    ],
)
def test_other_stages_on_a_rank_are_refused(
    ranks: tuple[int, ...], message: str, remedy: str
) -> None:
    plan = make_plan("interleaved", len(ranks), 4)
    held = zip(plan.stages, ranks, strict=True)
    plan = replace(plan, stages=tuple(replace(stage, ranks=(rank,)) for stage, rank in held))
    with pytest.raises(ScheduleError, match=message) as caught:
        check(plan)
    assert remedy in str(caught.value.remedy)
    assert str(caught.value.remedy).endswith("use schedule gpipe")


def test_with_one_stage_a_rank_it_is_1f1b() -> None:
    for extra in (0, 1):
        assert warmup("interleaved", 4, 8, extra=extra) == warmup("1f1b", 4, 8, extra=extra)
    ours, theirs = (
        make_stream(make_plan(name, 3, 5)).step(5)[0] for name in ("interleaved", "1f1b")
    )
    assert ours.columns == theirs.columns
