"""A certificate is refused when the plan under it was changed, whatever was changed."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import PlanError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.plan import Plan
from pdcompile.plan.embedded import assignment, problem_of
from pdcompile.problem import PartitionProblem
from pdcompile.problem.constraints import Apart, Constraint, Pin
from pdcompile.problem.deployment import stage_limits
from pdcompile.problem.space import Setting
from tests.helpers.derived_plan import check_derived
from tests.helpers.graphs import chain, residual
from tests.helpers.planned import planned
from tests.helpers.problems import measure, violations


def machines(count: int, memory: int | None = None) -> Cluster:
    """The first device is twice as fast; a slow link between all."""
    devices = tuple(Device("cpu", memory, 2.0 if s == 0 else 1.0) for s in range(count))
    return Cluster(devices, (Level("link", count, 1e6, 1e-6, True),))


SETTINGS: tuple[tuple[OpGraph, Cluster, str, tuple[Constraint, ...]], ...] = (
    (residual(2), machines(3), "1f1b", ()),
    (residual(2), machines(2, 26_000), "gpipe", ()),
    (residual(2), machines(2), "2bw", ()),
    (chain(5), machines(3), "2bw", ()),
    (residual(3), machines(3), "1f1b", (Pin("h.1.up", 1), Apart("h.0.up", "h.0.down"))),
)


@cache
def plan_of(number: int) -> Plan:
    graph, cluster, schedule, constraints = SETTINGS[number]
    return planned(graph, cluster, schedule=schedule, constraints=constraints)


def truth(plan: Plan, number: int) -> PartitionProblem:
    """The problem that the graph, the cluster and the plan's training make."""
    graph, cluster, _, constraints = SETTINGS[number]
    training, last = plan.training, len(plan.stages) - 1
    depths = training.warmup or tuple(last - s for s in range(last + 1))
    factor = training.optimizer_factor
    problem = coarsen(
        graph,
        stage_limits(cluster, range(len(plan.stages))),
        num_microbatches=training.num_microbatches,
        constraints=constraints,
    )
    setting = Setting(training.schedule, training.num_microbatches, optimizer_factor=factor)
    return scheduled(problem, cluster, setting, depths)


@cache
def optimum(problem: PartitionProblem) -> float:
    """Every monotone assignment of items, one after the other."""
    n, stages = len(problem.items), range(len(problem.stages))
    pairs = {(t.producer, c) for t in problem.traffic for c in t.consumers}
    before = [[a for a, b in pairs if b == i] for i in range(n)]
    partial: list[tuple[int, ...]] = [()]
    for i in range(n):
        partial = [
            (*chosen, s)
            for chosen in partial
            for s in stages
            if all(chosen[a] <= s for a in before[i])
        ]
    allowed = (one for one in partial if not violations(problem, one))
    return min(measure(problem, one).objective for one in allowed)


def holds(plan: Plan, number: int) -> None:
    """Conditions of a plan that was accepted: its claims are true of graph and cluster."""
    problem = truth(plan, number)
    assert plan.problem is not None
    stage_of = assignment(plan)
    assert not violations(problem, stage_of)
    found = measure(problem, stage_of).objective
    assert math.isclose(found, plan.certificate.objective_seconds, rel_tol=2e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_what_the_planner_makes_is_accepted(number: int) -> None:
    graph, cluster, _, _ = SETTINGS[number]
    plan = plan_of(number)
    check_plan(plan, graph, cluster)
    check_derived(plan, graph, cluster)
    check_plan(Plan.from_json(plan.to_json()), graph, cluster)
    holds(plan, number)
    assert plan.certificate.bound_seconds <= optimum(truth(plan, number)) * (1 + 1e-9)


def leaves(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a JSON value, containers too."""
    if path:
        yield path
    if isinstance(part, dict | list):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            yield from leaves(value, (*path, key))


def at(part: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        part = part[key]
    return part


def mutations(value: Any, r: Any) -> Any:
    """One other value in its place."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        others = (value + 1, value - 1, value * 2, value / 2, value * 1.001, 0, -value, None)
        return r.choice([other for other in others if other != value])
    if isinstance(value, str):
        return r.choice(("", value + "x", value[1:], value.upper() + "_", None, 3))
    if isinstance(value, list):
        again = copy.deepcopy(value)
        kind = r.choice(("drop", "twice", "swap", "empty"))
        if again and kind == "drop":
            again.pop(r.randrange(len(again)))
        elif again and kind == "twice":
            again.append(r.choice(again))
        elif len(again) > 1 and kind == "swap":
            i, j = r.sample(range(len(again)), 2)
            again[i], again[j] = again[j], again[i]
        else:
            again = [] if again else [0]
        return again
    if isinstance(value, dict):
        again = dict(value)
        again.pop(r.choice(sorted(again)))
        return again
    return 1


def accepted(data: Any, graph: OpGraph, cluster: Cluster) -> Plan | None:
    """The plan, or None when it is refused, as it has to be: with PlanError."""
    try:
        plan = Plan.from_json(json.dumps(data))
        check_plan(plan, graph, cluster)
    except PlanError:
        return None
    check_derived(plan, graph, cluster)  # which shares no code with the passes
    return plan


@settings(max_examples=150)
@given(st.integers(0, len(SETTINGS) - 1), st.randoms(use_true_random=False), st.integers(1, 2))
def test_every_change_is_refused_or_leaves_the_claims_true(number: int, r: Any, times: int) -> None:
    """One or two changes anywhere in the file, most of them outside the sealed problem."""
    graph, cluster, _, _ = SETTINGS[number]
    original = plan_of(number)
    data = json.loads(original.to_json())
    for _ in range(times):
        paths = [p for p in leaves(data) if (p[0] == "problem") == (r.random() < 0.1)]
        path = r.choice(paths or list(leaves(data)))
        at(data, path[:-1])[path[-1]] = mutations(at(data, path), r)
    changed = accepted(data, graph, cluster)
    if changed is None:
        return
    if changed.problem is None:
        changed = replace(changed, problem=original.problem)  # then nothing is said of items
    holds(changed, number)
    assert changed.certificate.bound_seconds <= optimum(truth(changed, number)) * (1 + 1e-6)


def swapped(number: int, first: int, second: int) -> Plan:
    """The plan with the ops of two stages exchanged."""
    plan = plan_of(number)
    stages = list(plan.stages)
    stages[first] = replace(stages[first], ops=plan.stages[second].ops)
    stages[second] = replace(stages[second], ops=plan.stages[first].ops)
    return replace(plan, stages=tuple(stages))


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_ops_moved_by_hand(number: int) -> None:
    """Every single op on every other stage, nothing else adapted."""
    graph, cluster, _, _ = SETTINGS[number]
    plan = plan_of(number)
    for s, to in itertools.permutations(range(len(plan.stages)), 2):
        for op in plan.stages[s].ops:
            stages = list(plan.stages)
            stages[s] = replace(stages[s], ops=tuple(x for x in stages[s].ops if x != op))
            stages[to] = replace(stages[to], ops=(*stages[to].ops, op))
            with pytest.raises(PlanError):
                check_plan(replace(plan, stages=tuple(stages)), graph, cluster)
    with pytest.raises(PlanError):
        check_plan(swapped(number, 0, 1), graph, cluster)


def certified(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, certificate=replace(plan.certificate, **changes))


def test_certificates_that_contradict_themselves() -> None:
    graph, cluster, _, _ = SETTINGS[0]
    plan = plan_of(0)
    seconds = plan.certificate.objective_seconds
    for changes, message in (
        ({"bound_seconds": seconds * 1.01}, "is above objective"),
        ({"bound_seconds": seconds * 0.9, "status": "optimal"}, "with a gap"),
        ({"objective_seconds": seconds * 1.01, "status": "feasible"}, "the stages take"),
        ({"objective_seconds": seconds * 0.9, "bound_seconds": seconds * 0.9}, "the stages take"),
    ):
        with pytest.raises(PlanError, match=message):
            check_plan(certified(plan, **changes), graph, cluster)


def test_other_clusters_and_costs() -> None:
    graph, cluster, _, _ = SETTINGS[0]
    plan = plan_of(0)
    alike = Cluster(cluster.devices, (replace(cluster.levels[0], bytes_per_second=1.001e6),))
    with pytest.raises(PlanError):
        check_plan(plan, graph, alike)
    with pytest.raises(PlanError, match="another cluster"):
        check_plan(plan, graph, Cluster((*cluster.devices, Device()), (replace(
            cluster.levels[0], size=4),)))  # fmt: skip
    ops = list(graph.ops)
    cost = ops[0].cost
    assert cost is not None
    ops[0] = replace(ops[0], cost=replace(cost, flops=cost.flops + 1))
    with pytest.raises(PlanError, match="other costs"):
        check_plan(plan, replace(graph, ops=tuple(ops)), cluster)
    with pytest.raises(PlanError, match="not a fingerprint"):
        check_plan(replace(plan, fingerprint="x"), graph, cluster)


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_solving_the_embedded_problem_again_proves_the_same_bound(number: int) -> None:
    certificate = plan_of(number).certificate
    found, again = partition(problem_of(plan_of(number), "plan"))
    assert math.isclose(again.bound_seconds, certificate.bound_seconds, rel_tol=1e-6)
    assert math.isclose(found.objective, certificate.objective_seconds, rel_tol=2e-6)
    assert again.status == certificate.status
