"""Time and bytes of schedules, against published behaviour and another calculation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Level
from pdcompile.errors import ClusterError, ScheduleError
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.schedules import make_stream
from pdcompile.passes.simulate import Links, simulate, simulate_programs
from pdcompile.plan import Edge, Plan, TiedParameter
from pdcompile.plan.times import PipelineTimes
from pdcompile.problem.space import Setting
from pdcompile.schedule import Action
from pdcompile.schedule.registry import KINDS
from tests.helpers.problems import chain_problem
from tests.helpers.schedules import chain, make_plan, microbatches
from tests.helpers.timing import of_hops


def links(seconds_per_byte: float, latency: float = 0.0, *, full_duplex: bool = True) -> Links:
    rate = 1 / seconds_per_byte if seconds_per_byte else math.inf
    level = Level("wire", 2, rate, latency, full_duplex)
    return lambda _a, _b: level


def per_microbatch(plan: Plan, transfer: float = 0.0) -> float:
    found = simulate(plan, links=links(transfer))
    return found.forecast.step_seconds / plan.training.num_microbatches


def test_transfers_are_hidden_by_a_deeper_warm_up() -> None:
    """F = 1, B = 2, four stages, 0.75 per boundary and direction."""
    assert per_microbatch(make_plan("2bw", 4, 8), 0.75) == pytest.approx(4.125)
    assert per_microbatch(make_plan("2bw", 4, 8, extra=1), 0.75) == pytest.approx(3.0)
    for uniform in (1, 2):
        plan = make_plan("2bw", 4, 8, depths=tuple(depth + uniform for depth in (3, 2, 1, 0)))
        assert per_microbatch(plan, 0.75) > 4.0


def test_clipping_is_free_with_a_late_update() -> None:
    assert per_microbatch(make_plan("2bw", 4, 4, clip=1.0)) == pytest.approx(3.0)
    assert per_microbatch(make_plan("1f1b", 4, 4, clip=1.0)) == pytest.approx(5.25)
    tied = (TiedParameter("w", (0, 3), 1),)
    assert per_microbatch(make_plan("2bw", 4, 8, clip=1.0, tied=tied)) == pytest.approx(3.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("replicas", [(1, 2, 1), (1, 4, 1), (3, 2, 1), (2, 3)])
def test_replicas_run_at_full_speed(replicas: tuple[int, ...]) -> None:
    """Stages balanced by their replicas: 3 seconds a microbatch."""
    seconds = [(1.0 * r, 2.0 * r) for r in replicas]
    plan = make_plan("2bw", len(replicas), 12, replicas=replicas, seconds=seconds)
    assert per_microbatch(plan) == pytest.approx(3.0)


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 10))
def test_bubble_of_1f1b_and_gpipe_in_closed_form(num_stages: int, count: int) -> None:
    """(p − 1) / (m + p − 1) of the time when nothing is sent."""
    for name in ("gpipe", "1f1b"):
        found = simulate(make_plan(name, num_stages, count)).forecast
        assert found.step_seconds == pytest.approx(3 * (count + num_stages - 1))
        assert found.bubble == pytest.approx((num_stages - 1) / (count + num_stages - 1))


@st.composite
def flush_plans(draw: st.DrawFn) -> tuple[Plan, PipelineTimes]:
    """A chain with skips, each (producer, consumer) pair at most one value."""
    n = draw(st.integers(1, 5))
    times = [draw(st.sampled_from([0.5, 1.0, 1.25, 2.0])) for _ in range(n)]
    bytes_of = st.sampled_from([0, 1, 4, 16])
    edges = [Edge(f"x{s}", s, (s + 1,), draw(bytes_of), True) for s in range(n - 1)]
    for index in range(draw(st.integers(0, 2)) if n > 2 else 0):
        source = draw(st.integers(0, n - 3))
        target = draw(st.integers(source + 2, n - 1))
        edges.append(Edge(f"skip{index}", source, (target,), draw(bytes_of), True))
    forward: dict[tuple[int, int], float] = {}
    for edge in edges:
        pair = (edge.source, edge.targets[0])
        forward[pair] = forward.get(pair, 0.0) + edge.bytes / 8
    plan = make_plan(
        draw(st.sampled_from(["gpipe", "1f1b"])),
        n,
        draw(st.integers(1, 9)),
        edges=tuple(edges),
        extra=draw(st.integers(0, 1)),
        seconds=[(time, 2 * time) for time in times],
    )
    backward = {(b, a): seconds for (a, b), seconds in forward.items()}
    timing = of_hops(times, [2 * time for time in times], forward, backward)
    return plan, timing


@settings(max_examples=200)
@given(flush_plans())
def test_the_planner_calculates_the_same_makespan(case: tuple[Plan, PipelineTimes]) -> None:
    plan, timing = case
    training = plan.training
    expected = timing.makespan(training.warmup, training.num_microbatches)
    found = simulate(plan, links=links(1 / 8)).forecast.step_seconds
    assert found == pytest.approx(expected)


def test_a_stage_sends_to_the_nearest_first() -> None:
    """The simulator does as the clock does: a rank that waits for one send makes no other."""
    edges = (*chain(5, 0), Edge("far", 0, (4,), 1, True), Edge("near", 2, (4,), 16, True))
    edges = tuple(replace(one, bytes=16) if one.source == 1 else one for one in edges)
    times = [0.5, 0.5, 1.0, 0.5, 0.5]
    plan = make_plan("gpipe", 5, 5, edges=edges, seconds=[(one, 2 * one) for one in times])
    ahead = {(one.source, one.targets[0]): one.bytes / 8 for one in edges}
    back = {(b, a): seconds for (a, b), seconds in ahead.items()}
    timing = of_hops(times, [2 * one for one in times], ahead, back)
    found = simulate(plan, links=links(1 / 8)).forecast.step_seconds
    assert found == timing.makespan(plan.training.warmup, 5) == 31.5


def test_timeline_is_what_the_ranks_did() -> None:
    plan = make_plan("1f1b", 2, 2)
    stages = tuple(replace(stage, update_seconds=0.25) for stage in plan.stages)
    found = simulate(replace(plan, stages=stages), links=links(0.5))
    seen = [
        (e.rank, str(e.action), e.minibatch, e.microbatch, e.start_seconds, e.end_seconds)
        for e in found.timeline
        if e.rank == 1
    ]
    assert sorted(seen, key=lambda one: (one[4], one[1])) == [
        (1, "F", 0, 0, 1.5, 2.5),
        (1, "B", 0, 0, 2.5, 4.5),
        (1, "F", 0, 1, 4.5, 5.5),
        (1, "SEND_GRADIENT", 0, 0, 4.5, 5.0),
        (1, "B", 0, 1, 5.5, 7.5),
        (1, "SEND_GRADIENT", 0, 1, 7.5, 8.0),
        (1, "STEP", 0, -1, 7.5, 7.75),
    ]
    assert found.forecast.step_seconds == 10.25
    assert found.forecast.samples_per_second == pytest.approx(2 / 10.25)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_the_forecast_does_not_need_the_timeline(schedule: str) -> None:
    plan = make_plan(schedule, 4, 8, clip=1.0)
    alone = simulate(plan, links=links(0.5), timeline=False)
    whole = simulate(plan, links=links(0.5))
    assert (alone.forecast, alone.ends_seconds) == (whole.forecast, whole.ends_seconds)
    assert (alone.timeline, alone.passed_seconds) == ((), ())


def test_half_duplex_links_carry_one_transfer() -> None:
    plan = make_plan("1f1b", 2, 4, extra=1)
    full = simulate(plan, links=links(4.0)).forecast.step_seconds
    half = simulate(plan, links=links(4.0, full_duplex=False)).forecast.step_seconds
    assert half >= 8 * 4.0 > full  # eight transfers on the wire, one after the other


def test_latency_counts_per_transfer() -> None:
    plan = make_plan("1f1b", 2, 1)
    assert simulate(plan, links=links(1.0, 0.125)).forecast.step_seconds == 6 + 2 * 1.125


def test_links_are_those_of_the_cluster() -> None:
    cluster = Cluster(
        Cluster.parse("2x2").devices,
        (Level("host", 2, 10.0), Level("network", 2, 2.0, 0.5)),
    )
    plan = replace(make_plan("1f1b", 4, 1, edges=chain(4, 10)), cluster=cluster.to_toml())
    wires = 2 * (1 + (0.5 + 5) + 1)
    assert simulate(plan).forecast.step_seconds == pytest.approx(12 + wires)
    small = replace(plan, cluster=Cluster.parse("2").to_toml())
    with pytest.raises(ClusterError, match="no device 2"):
        simulate(small)


def test_reduction_over_replicas_takes_ring_time() -> None:
    plan = make_plan("1f1b", 1, 2, replicas=(2,), trainable_bytes=8)
    found = simulate(plan, links=links(0.25, 0.5)).forecast.step_seconds
    assert found == pytest.approx(3 + 2 * (8 / 2 * 0.25 + 0.5))


def test_the_sums_of_replicas_are_sent() -> None:
    """Each sends its part of a ring, and under stash once in as many minibatches as there are."""
    plan = make_plan("1f1b", 1, 2, replicas=(3,), trainable_bytes=6)
    assert simulate(plan).forecast.sent_bytes == (8, 8, 8)
    plan = make_plan("stash", 1, 1, replicas=(2,), trainable_bytes=6)
    assert simulate(plan).forecast.sent_bytes == (3, 3)


def test_ledger() -> None:
    plan = make_plan(
        "2bw",
        3,
        8,
        edges=chain(3, 10),
        parameter_bytes=120,
        trainable_bytes=100,
        saved_bytes=7,
        workspace_bytes=5,
    )
    first, second, third = simulate(plan).forecast.ledgers
    assert (first.weights_bytes, first.gradients_bytes, first.optimizer_bytes) == (220, 100, 200)
    assert [one.activations_bytes for one in (first, second, third)] == [21, 14, 7]
    assert [one.receive_bytes for one in (first, second, third)] == [20, 30 + 20, 20]
    assert first.workspace_bytes == 5
    clipped = replace(plan, training=replace(plan.training, max_grad_norm=1.0))
    assert simulate(clipped).forecast.ledgers[0].gradients_bytes == 200
    assert simulate(plan).forecast.sent_bytes == (80, 160, 80)


def test_only_the_owner_has_optimizer_state_of_a_tied_parameter() -> None:
    tied = (TiedParameter("w", (0, 2), 60),)
    plan = make_plan("1f1b", 3, 2, tied=tied, parameter_bytes=100, trainable_bytes=100)
    assert [one.optimizer_bytes for one in simulate(plan).forecast.ledgers] == [200, 200, 80]
    assert simulate(plan).forecast.sent_bytes == (2 + 60, 2 * 2, 2 + 60)


@pytest.mark.sample(8)
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(
    ("name", "clip"), [(name, c) for name in KINDS for c in (None, 1.0)[: 1 + KINDS[name].one_age]]
)
def test_the_memory_rule_is_what_the_walk_finds(name: str, clip: float | None, extra: int) -> None:
    count, one = microbatches(name, 6), {"trainable_bytes": 1, "parameter_bytes": 1}
    edges = chain(4, 0)  # what is sent may decide when a rank holds the most
    plan = make_plan(name, 4, count, edges=edges, extra=extra, clip=clip, saved_bytes=1, **one)
    setting, cluster = Setting(name, count, clipping=clip is not None), Cluster.local(4)
    rule = scheduled(chain_problem([1.0] * 4, 4), cluster, setting, plan.training.warmup).holdings
    for s, ledger in enumerate(simulate(plan).forecast.ledgers):
        assert ledger.weights_bytes == rule[s].versions
        assert ledger.activations_bytes == rule[s].saved
        assert ledger.gradients_bytes <= rule[s].gradient_buffers
    assert ledger.gradients_bytes == rule[s].gradient_buffers


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_updates_after_every_microbatch_leave_no_bubble(num_stages: int) -> None:
    """Balanced stages, also where the update waits for a norm of all or for a tied parameter."""
    tied = (TiedParameter("w", (0, num_stages - 1), 1),) if num_stages > 1 else ()
    for plan in (
        make_plan("stash", num_stages, 1),
        make_plan("vsync", num_stages, 1),
        make_plan("vsync", num_stages, 1, clip=1.0, tied=tied),
    ):
        found = simulate(plan).forecast
        assert (found.step_seconds, found.bubble) == (3.0, 0.0)


def test_given_programs() -> None:
    plan = make_plan("2bw", 2, 2)
    program, stream = make_stream(plan).step(2)
    flush, _ = stream.flush()
    found = simulate_programs(plan, [program, flush])
    assert found.forecast.step_seconds == 3 * 3
    assert found.forecast.bubble == pytest.approx(1 - 12 / 18)
    assert sum(e.action is Action.BACKWARD for e in found.timeline) == 4
    with pytest.raises(ScheduleError, match="waits for ever"):
        simulate_programs(plan, [replace(program, columns=((), program.columns[1]))])
