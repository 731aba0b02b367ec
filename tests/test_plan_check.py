"""check_plan(plan, graph, cluster) accepts what the planner makes and refuses what was changed."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import InfeasibleError, PlanError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.passes.schedules import warmup
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan, Training
from pdcompile.problem.deployment import stage_limits
from pdcompile.problem.space import Setting
from tests.helpers.derived_plan import check_derived
from tests.helpers.graphs import chain, random_graphs, residual
from tests.helpers.planned import assembled

M = 4


def planned(graph: OpGraph, cluster: Cluster, schedule: str = "1f1b") -> Plan:
    num_stages = len(cluster.devices)
    depth = warmup(schedule, num_stages, M)
    problem = coarsen(
        graph,
        stage_limits(cluster, range(num_stages)),
        num_microbatches=M,
    )
    problem = scheduled(problem, cluster, Setting(schedule, M), depth)
    found, certificate = partition(problem)
    training = Training(schedule, M, M * graph.batch_size, depth)
    return assembled(graph, problem, found, certificate, training, cluster)


@pytest.mark.sample(6)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("make", [chain, residual])
def test_planner_and_check_agree(schedule: str, num_stages: int, make: Any) -> None:
    graph, cluster = make(), Cluster.parse(str(num_stages))
    plan = planned(graph, cluster, schedule)
    check_plan(plan, graph, cluster)
    check_derived(plan, graph, cluster)


@settings(max_examples=60)
@given(
    random_graphs(),
    st.integers(1, 3),
    st.sampled_from(["gpipe", "1f1b", "2bw"]),
    st.sampled_from([10.0, 1e9]),
    st.booleans(),
)
def test_on_random_graphs(
    graph: OpGraph, num_stages: int, schedule: str, rate: float, duplex: bool
) -> None:
    level = Level("link", num_stages, rate, 0.0, duplex)
    cluster = Cluster((Device(),) * num_stages, (level,))
    try:
        plan = planned(graph, cluster, schedule)
    except InfeasibleError:
        return  # more stages than the graph has parts
    check_plan(plan, graph, cluster)
    check_derived(plan, graph, cluster)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_half_duplex_level_is_shared_by_its_own_pairs_alone(schedule: str) -> None:
    """Its neighbours inside a host carry both directions at once, as the simulator has it."""
    levels = Level("host", 2, 10.0), Level("network", 2, 100.0, full_duplex=False)
    cluster = Cluster((Device(),) * 4, levels)
    plan = planned(chain(8), cluster, schedule)
    objective = plan.certificate.objective_seconds
    assert objective == pytest.approx(simulate(plan).forecast.step_seconds, rel=1e-6)


@pytest.mark.parametrize("levels", [
    (Level("host", 2, 1e3, 0.5), Level("network", 2, 1e3)),
    (Level("host", 2, 10.0), Level("network", 2, 1e3)),
])  # fmt: skip
def test_a_level_inside_of_hosts_may_be_slower_than_the_network(levels: tuple[Level, ...]) -> None:
    """A search for a cut takes tied weights over it too, and its plan is accepted."""
    graph, cluster = residual(4), Cluster((Device(),) * 4, levels)
    plan = planned(graph, cluster)
    assert plan.tied[0].stages == (0, 3)
    check_plan(plan, graph, cluster)
    objective = plan.certificate.objective_seconds
    assert simulate(plan).forecast.step_seconds < objective
    more = {"objective_seconds": 1.1 * objective, "status": "feasible"}
    certificate = replace(plan.certificate, **more)
    with pytest.raises(PlanError, match="the stages take"):
        check_plan(replace(plan, certificate=certificate), graph, cluster)


def tampered(path: str, value: Any) -> Plan:
    """The plan of `residual()` on 3 stages with one field replaced."""
    plan: Any = planned(residual(), Cluster.parse("3"))
    *way, last = path.split(".")
    parts = [plan]
    for step in way:
        parts.append(parts[-1][int(step)] if step.isdigit() else getattr(parts[-1], step))
    new = value(getattr(parts[-1], last)) if callable(value) else value
    new = replace(parts.pop(), **{last: new})
    for step in reversed(way):
        whole = parts.pop()
        if step.isdigit():
            new = (*whole[: int(step)], new, *whole[int(step) + 1 :])
        else:
            new = replace(whole, **{step: new})
    assert isinstance(new, Plan)
    return new


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("stages.1.ops", lambda ops: ops[1:], "is on no stage"),
        ("stages.1.ops", lambda ops: (*ops, "stranger"), "no op 'stranger'"),
        ("stages.0.ops", lambda ops: (*ops, "cross_entropy"), "assigned twice|of the loss"),
        ("stages.0.forward_seconds", lambda x: x / 2, "forward_seconds is .*, and the graph"),
        ("stages.2.backward_seconds", 0.0, "backward_seconds is 0.0, and the graph makes it"),
        ("stages.1.parameters", (), "parameters are not"),
        ("stages.1.trainable_bytes", lambda x: x - 4, "trainable_bytes is .*, and the graph"),
        ("edges", lambda edges: edges[1:], "is missing"),
        ("edges.0.bytes", lambda x: x - 1, "bytes is .*, and the graph"),
        ("edges.0.gradient", False, "gradient is False, and the graph makes it True"),
        ("edges.0.targets", (2,), "targets is"),
        ("tied", (), "is missing"),
        ("tied.0.bytes", 1, "bytes is 1, and the graph makes it"),
        ("certificate.objective_seconds", lambda x: x * 1.000002, "the stages take"),
        ("training.num_microbatches", 5, "the stages take"),
    ],
)
def test_tampered_plans_are_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        check_plan(tampered(path, value), residual(), Cluster.parse("3"))
    assert caught.value.remedy


def test_certificates_that_promise_too_much() -> None:
    def lower(certificate: Any) -> Any:
        less = certificate.objective_seconds * 0.9
        return replace(certificate, objective_seconds=less, bound_seconds=less)

    with pytest.raises(PlanError, match="the stages take"):
        check_plan(tampered("certificate", lower), residual(), Cluster.parse("3"))


def test_memory_of_the_cluster_counts() -> None:
    graph = residual()
    plan = planned(graph, Cluster.parse("2"))
    small = Cluster((Device("cpu", 1000),) * 2, Cluster.parse("2").levels)
    with pytest.raises(PlanError, match="bytes of memory, its device has 1000"):
        check_derived(plan, graph, small)
    with pytest.raises(PlanError, match="another cluster"):
        check_plan(plan, graph, small)


def test_another_model() -> None:
    with pytest.raises(PlanError, match="the graph has no op"):
        check_plan(planned(chain(), Cluster.parse("2")), residual(), Cluster.parse("2"))
