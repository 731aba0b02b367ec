"""The independent clock of replicated plans agrees with the simulator that walks programs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Edge, Plan, TiedParameter
from pdcompile.plan.times import times_of
from pdcompile.schedule.registry import KINDS
from tests.helpers.schedules import chain, make_plan, plans, same_clock
from tests.test_registry import PAIRS
from tests.test_stages_per_rank import on_ranks


def on_cluster(plan: Plan, *levels: Level) -> tuple[Plan, Cluster]:
    size = 1
    for level in levels:
        size *= level.size
    cluster = Cluster((Device(),) * size, levels)
    return replace(plan, cluster=cluster.to_toml()), cluster


@st.composite
def timed(draw: st.DrawFn, stream: bool) -> Plan:
    """A plan with its own seconds, bytes and recomputed stages."""
    plan = draw(plans(max_stages=6, max_microbatches=7, stream=stream, several=not stream))
    number = st.integers(1, 8)
    stages = tuple(
        replace(
            stage,
            forward_seconds=draw(number) / 4,
            backward_seconds=draw(number) / 4,
            parameter_bytes=8,
            trainable_bytes=8,
            recompute=draw(st.booleans()),
        )
        for stage in plan.stages
    )
    edges = tuple(replace(edge, bytes=draw(number)) for edge in plan.edges)
    return replace(plan, stages=stages, edges=edges)


@settings(max_examples=150)
@given(timed(stream=False), st.sampled_from([1e9, 8.0, 2.0]), st.sampled_from([1e9, 4.0]))
def test_makespan_is_that_of_the_simulator(plan: Plan, near: float, far: float) -> None:
    plan, cluster = on_cluster(plan, Level("host", 4, near, 1 / 8), Level("net", 5, far, 1 / 4))
    gradients = [edge.value for edge in plan.edges if edge.gradient]
    in_flight = [
        min(depth + 1, -(-plan.training.num_microbatches // stage.replicas))
        for depth, stage in zip(plan.training.warmup, plan.stages, strict=True)
    ]
    found = times_of(plan, cluster, gradients).makespan(
        [n - 1 for n in in_flight], plan.training.num_microbatches
    )
    assert same_clock(found, plan, simulate(plan).forecast.step_seconds)


def test_weights_from_homes_come_after_the_norms() -> None:
    """0.75 s of the slower stage, 1/8 s for norms, 1/8 s for the weights of the other."""
    plan = make_plan("gpipe", 2, 1, replicas=(2, 1), clip=1.0, homes=True, edges=())
    times = ((0.25, 0.25), (0.25, 0.5))
    plan = replace(plan, stages=tuple(
        replace(one, forward_seconds=f, backward_seconds=b, parameter_bytes=8, trainable_bytes=8)
        for one, (f, b) in zip(plan.stages, times, strict=True)
    ))  # fmt: skip
    plan, cluster = on_cluster(plan, Level("host", 3, 1e9, 1 / 8))
    found = times_of(plan, cluster, ()).makespan((0, 0), 1)
    assert found == pytest.approx(1.0, abs=1e-6)
    assert found == pytest.approx(simulate(plan).forecast.step_seconds)


@pytest.mark.parametrize(("clip", "sizes"), [(None, (6, 8)), (1.0, (8, 2))])
def test_weights_come_from_homes_after_all_steps_of_a_rank(
    clip: float | None, sizes: tuple[int, int]
) -> None:
    """Its stages step one after the other, each once its sums are there; then all weights come."""
    plan = make_plan("interleaved", 2, 2, per_rank=2, replicas=(2, 2), clip=clip, homes=True)
    stages = (
        replace(one, parameter_bytes=size, trainable_bytes=size)
        for one, size in zip(plan.stages, sizes, strict=True)
    )
    plan, cluster = on_cluster(replace(plan, stages=tuple(stages)), Level("host", 2, 1.0, 1 / 8))
    assert clocked(plan, cluster) == pytest.approx(simulate(plan).forecast.step_seconds)


def clocked(plan: Plan, cluster: Cluster) -> float:
    gradients = [edge.value for edge in plan.edges if edge.gradient]
    return times_of(plan, cluster, gradients).makespan(
        plan.training.warmup, plan.training.num_microbatches
    )


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=6), st.integers(1, 6), st.data())
def test_several_stages_on_a_rank_take_what_they_take_in_the_simulator(
    ranks: list[int], count: int, data: st.DataObject
) -> None:
    n, number = len(ranks), st.integers(1, 8)
    edges = (*chain(n, 3), Edge("skip", 0, (n - 1,), data.draw(number), data.draw(st.booleans())))
    holders = tuple(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=2))))
    # Which of two messages that are ready at one time goes first is open: no stages are alike.
    unlike = [1 + math.sqrt(2 + s) / 1000 for s in range(n)]
    seconds = [(data.draw(number) / 4 * own, data.draw(number) / 4 * own) for own in unlike]
    tied = (TiedParameter("w", holders, 2),) if data.draw(st.booleans()) else ()
    plan = make_plan("gpipe", n, count, edges=edges, tied=tied, seconds=seconds)
    plan = on_ranks(plan, tuple(ranks))
    plan, cluster = on_cluster(
        plan, Level("host", 3, data.draw(st.sampled_from([1e9, 4.0])), 1 / 8)
    )
    assert same_clock(clocked(plan, cluster), plan, simulate(plan).forecast.step_seconds)


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [1, 3, 4, 8])
def test_the_clock_follows_the_order_of_the_registry(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A schedule that neither fills up first nor alternates."""
    monkeypatch.setitem(KINDS, PAIRS.name, PAIRS)
    plan = make_plan(PAIRS.name, 3, count, edges=chain(3, 2))
    plan, cluster = on_cluster(plan, Level("host", 3, 4.0, 1 / 8))
    found = clocked(plan, cluster)
    assert found == pytest.approx(simulate(plan).forecast.step_seconds, rel=1e-9)
    all_first = replace(plan, training=replace(plan.training, schedule="gpipe"))
    assert found > clocked(all_first, cluster) or count < 3


@settings(max_examples=60)
@given(timed(stream=True), st.sampled_from([1e9, 8.0]))
def test_a_stream_takes_at_least_its_period(plan: Plan, rate: float) -> None:
    plan, cluster = on_cluster(plan, Level("host", sum(s.replicas for s in plan.stages), rate))
    gradients = [edge.value for edge in plan.edges if edge.gradient]
    times = times_of(plan, cluster, gradients)
    compute = max((s.forward_seconds + s.backward_pass_seconds) / s.replicas for s in plan.stages)
    assert (
        times.period([depth + 1 for depth in plan.training.warmup], plan.training.num_microbatches)
        >= compute
    )


def test_stages_that_hold_as_many_as_an_earlier_one_have_a_period() -> None:
    """Two replicas with three forwards ahead each hold the six of the first stage."""
    edges = (
        Edge("a", 0, (1, 2), 1, True),
        Edge("b", 1, (2,), 1, True),
        Edge("c", 2, (3,), 1, True),
    )
    plan = make_plan("async", 4, 1, replicas=(1, 1, 2, 2), edges=edges)
    plan, cluster = on_cluster(plan, Level("host", 6, 1e9))
    times = times_of(plan, cluster, [edge.value for edge in plan.edges])
    assert times.period([depth + 1 for depth in plan.training.warmup], 1) == pytest.approx(3.0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("replicas", [(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 2), (4,)])
@pytest.mark.parametrize("rate", [1e9, 2.0])
def test_the_period_of_balanced_streams(replicas: tuple[int, ...], rate: float) -> None:
    """Balanced stages with deep warm-up run at the closed form's speed, in the simulator too."""
    n = len(replicas)
    seconds = [(float(r), 2.0 * r) for r in replicas]
    plan = make_plan("2bw", n, 16, replicas=replicas, extra=1, seconds=seconds)
    plan, cluster = on_cluster(plan, Level("host", sum(replicas), rate))
    times = times_of(plan, cluster, [edge.value for edge in plan.edges])
    period = times.period(
        [depth + 1 for depth in plan.training.warmup], plan.training.num_microbatches
    )
    assert period == pytest.approx(3.0)
    assert simulate(plan).forecast.step_seconds / 16 == pytest.approx(period, rel=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("extra", "busy", "expected"),
    [(0, 0, 4.125), (1, 0, 3.0), (0, 1, 5.25), (1, 1, 4.5)],
)
def test_round_trips_that_turn_anywhere(extra: int, busy: int, expected: float) -> None:
    """Four stages, a transfer of 0.75 between them; `busy`: the first two take half as long again,
    so that the way to the second and back decides, which is made once in two microbatches."""
    seconds = [(1.5, 3.0)] * 2 + [(1.0, 2.0)] * 2 if busy else None
    plan = make_plan("2bw", 4, 16, extra=extra, seconds=seconds, edges=chain(4, 3))
    plan, cluster = on_cluster(plan, Level("host", 4, 4.0))
    times = times_of(plan, cluster, [edge.value for edge in plan.edges])
    period = times.period([depth + 1 for depth in plan.training.warmup], 16)
    assert period == pytest.approx(expected)
    assert simulate(plan, steps=12).forecast.step_seconds / 16 == pytest.approx(period, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 6), st.integers(0, 1))
def test_the_period_is_what_a_stream_takes(data: st.DataObject, n: int, extra: int) -> None:
    """No rank's transfers to both neighbours together bind here: the simulator has a link for
    each."""
    number = st.integers(1, 8)
    seconds = [(data.draw(number) / 4, data.draw(number) / 4) for _ in range(n)]
    edges = tuple(replace(edge, bytes=data.draw(number)) for edge in chain(n, 1))
    plan = make_plan("2bw", n, 16, extra=extra, seconds=seconds, edges=edges)
    latency = data.draw(st.sampled_from([0.0, 1 / 8]))
    rate = data.draw(st.sampled_from([8.0, 4.0, 2.0]))
    plan, cluster = on_cluster(plan, Level("host", n, rate, latency))
    times = times_of(plan, cluster, [edge.value for edge in edges])
    period = times.period([depth + 1 for depth in plan.training.warmup], 16)
    sent, received = times.traffic(16)
    assume(max(*sent.values(), *received.values()) < period)
    found = simulate(plan, steps=12).forecast.step_seconds / 16
    assert 0.99 * period <= found <= 1.05 * period  # the first microbatch of each goes alone


def test_recomputing_adds_a_forward_and_keeps_one_set() -> None:
    plan = make_plan("1f1b", 2, 4, saved_bytes=10, parameter_bytes=1, trainable_bytes=1)
    again = replace(plan, stages=tuple(replace(s, recompute=True) for s in plan.stages))
    before, after = simulate(plan).forecast, simulate(again).forecast
    assert after.step_seconds == before.step_seconds + (4 + 1) * 1.0
    assert [one.activations_bytes for one in before.ledgers] == [20, 10]
    assert [one.activations_bytes for one in after.ledgers] == [10, 10]
    assert [one.receive_bytes for one in after.ledgers] == [
        one.receive_bytes for one in before.ledgers
    ]
    assert after.bubble == pytest.approx(1 - 2 * 4 * 4 / (2 * after.step_seconds))
