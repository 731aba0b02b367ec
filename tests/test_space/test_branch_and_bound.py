"""The search over the whole space: certificates, unlike devices, idle ranks, what does not fit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.errors import ConfigError, InfeasibleError, PlanError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.check import check as check_schedule
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition.chains import Chains
from pdcompile.passes.partition.space.candidates import evaluation
from pdcompile.passes.partition.space.seats import MAX_ARRANGEMENTS, arrangements
from pdcompile.passes.planning.branch_and_bound import best_plan
from pdcompile.passes.planning.memory_limits import advised_of_devices
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.passes.planning.search.trials import Sketched
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan, Training
from pdcompile.plan.times import times_of
from pdcompile.problem import PartitionProblem, StageLimits
from pdcompile.problem.constraints import Pin
from pdcompile.problem.space import SearchSpace, Setting
from pdcompile.units import parse_bytes
from tests.helpers.graphs import chain, residual
from tests.helpers.planned import planned
from tests.helpers.spaces import every_candidate, seconds_of
from tests.helpers.whole_space import BATCH, at


def explored(graph: OpGraph, cluster: Cluster, space: SearchSpace, **more: Any) -> Plan:
    training = Training(batch_size=BATCH, **more.pop("training", {}))
    free = (StageLimits(),) * (space.stages or len(cluster.devices))
    wishes = more.pop("constraints", ())

    def problem_at(m: int) -> PartitionProblem:
        return coarsen(at(graph)(m), free, num_microbatches=m, constraints=wishes)

    return best_plan(at(graph), problem_at, cluster, space, training, **more)


def cluster_of(*devices: Device, rate: float = 1e3, latency: float = 0.0) -> Cluster:
    return Cluster(devices, (Level("link", len(devices), rate, latency),))


def step_seconds(plan: Plan) -> float:
    every = plan.training.num_microbatches if plan.training.schedule == "2bw" else 1
    return plan.certificate.objective_seconds * every


ANY = SearchSpace("any", (False, True), ("1f1b", "gpipe", "2bw"), (2, 4, 8), (0, 1))
SPACES = [
    ANY,
    SearchSpace("equal", (False,), ("1f1b", "2bw"), (4, 8)),
    SearchSpace("1", (True,), ("1f1b", "gpipe"), (4,), (0, 1)),
    replace(ANY, stages=2),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("make", [chain, residual])
def test_plans_are_checked_and_run_without_deadlock(make: Any, space: SearchSpace) -> None:
    graph, cluster = make(), cluster_of(*(Device(),) * 4)
    plan = explored(graph, cluster, space)
    m = plan.training.num_microbatches
    assert Plan.from_json(plan.to_json()) == plan
    check_plan(plan, at(graph)(m), cluster)
    check_schedule(plan)
    assert m in space.microbatches
    assert plan.training.schedule in space.schedules
    assert space.stages in (None, len(plan.stages))
    assert all(stage.recompute in space.recompute for stage in plan.stages)
    if space.replicas != "any":
        assert len({stage.replicas for stage in plan.stages}) == 1
    told = simulate(plan).forecast.step_seconds
    assert step_seconds(plan) == pytest.approx(told, rel=0.05)


def test_nothing_of_the_space_is_better() -> None:
    graph, cluster = chain(3), cluster_of(*(Device(),) * 3, rate=1e2)
    space = SearchSpace("any", (False,), ("1f1b", "2bw"), (2, 4), (0, 1))
    plan = explored(graph, cluster, space, time_limit=200)
    best = float("inf")
    for m, schedule, extra in itertools.product((2, 4), space.schedules, (0, 1)):
        problem = coarsen(at(graph)(m), (StageLimits(),) * 3, num_microbatches=m)
        setting = Setting(schedule, m, extra)
        for used in (1, 2, 3):
            ranks = tuple(range(used))
            for one in every_candidate(problem, space, setting, ranks, (1, 2, 3)):
                every = m if schedule == "2bw" else 1
                if evaluation(problem, cluster, one).seconds * every < best:
                    best = min(best, seconds_of(problem, cluster, one) * every)
    assert plan.certificate.bound_seconds <= plan.certificate.objective_seconds
    assert step_seconds(plan) == pytest.approx(best)


@pytest.mark.parametrize("schedules", [("1f1b",), ("2bw", "1f1b")])
def test_only_what_is_faster_than_another_plan_is_sought(schedules: tuple[str, ...]) -> None:
    graph, cluster = chain(3), cluster_of(*(Device(),) * 3, rate=1e2)
    space = SearchSpace("any", (False,), schedules, (2, 4), (0, 1))
    best = explored(graph, cluster, space)
    seconds = step_seconds(best)
    again = explored(graph, cluster, space, elsewhere=1.01 * seconds)
    assert (again.stages, again.certificate.status) == (best.stages, "optimal")
    with pytest.raises(Sketched) as sketch:
        explored(graph, cluster, space, elsewhere=0.99 * seconds)
    assert sketch.value.least_seconds == pytest.approx(0.99 * seconds)  # it was exhausted
    assert sketch.value.seconds >= seconds * (1 - 1e-9)
    with pytest.raises(Sketched) as sketch:
        explored(graph, cluster, space, elsewhere=0.99 * seconds, time_limit=0.0)
    assert sketch.value.least_seconds <= 0.99 * seconds
    with pytest.raises(Sketched) as sketch:
        explored(graph, cluster, space, sketch=True)
    assert sketch.value.least_seconds == pytest.approx(seconds)
    assert sketch.value.seconds >= seconds * (1 - 1e-9)  # with its updates
    at_once = explored(graph, cluster, space, time_limit=0.0, start=sketch.value.best)
    assert step_seconds(at_once) == pytest.approx(seconds)
    assert step_seconds(explored(graph, cluster, space, time_limit=0.0)) > 1.05 * seconds
    with pytest.raises(Sketched) as sketch:  # one is tried where there is no plan elsewhere
        explored(graph, cluster, space, sketch=True, time_limit=0.0)
    assert 1.05 * seconds < sketch.value.seconds < math.inf


def test_a_sketch_ends_in_the_middle_of_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, begun = Chains._extend, list[tuple[int, int]]()

    def extend(self: Chains, key: tuple[int, int], most: float) -> None:
        if self.budget is not None:
            self.budget.stop()
            begun.append(key)
        plain(self, key, most)

    monkeypatch.setattr(Chains, "_extend", extend)
    space, cluster = SearchSpace("any", (False,), ("1f1b",), (4,)), cluster_of(*(Device(),) * 4)
    with pytest.raises(Sketched) as sketch:
        explored(chain(4), cluster, space, sketch=True)
    assert (len(begun), sketch.value.best is not None) == (1, True)
    begun.clear()
    explored(chain(4), cluster, space)
    assert not begun  # the bound of a plan may take longer


@pytest.mark.parametrize(("rate", "replicas"), [(1e2, [2, 2]), (1e9, [4])])
def test_the_first_plan_suits_the_links(rate: float, replicas: list[int]) -> None:
    space = SearchSpace("any", (False,), ("1f1b",), (8,))
    cluster = cluster_of(*(Device(),) * 4, rate=rate)
    plan = explored(chain(8), cluster, space, time_limit=0.0)
    assert [stage.replicas for stage in plan.stages] == replicas
    assert step_seconds(plan) == pytest.approx(step_seconds(explored(chain(8), cluster, space)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_the_cut_alone_is_the_same_search(schedule: str) -> None:
    """A search for the cut alone has stage s on rank s, and the answer of the whole search."""
    graph, cluster = residual(3), cluster_of(*(Device(),) * 3, rate=1e2)
    cut = SearchSpace(schedules=(schedule,), microbatches=(4,), stages=3, in_order=True)
    alone = explored(graph, cluster, cut, time_limit=200)
    every = explored(graph, cluster, replace(cut, in_order=False), time_limit=200)
    assert [stage.ranks for stage in alone.stages] == [(0,), (1,), (2,)]
    assert alone.problem is not None
    assert alone.certificate.status == every.certificate.status == "optimal"
    seconds = alone.certificate.objective_seconds
    assert every.certificate.objective_seconds == pytest.approx(seconds)


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("again", [(True, True, True), (True, False, True), (False, False, True)])
def test_a_cut_for_stages_of_which_some_recompute(again: tuple[bool, ...], schedule: str) -> None:
    """Nothing is better where just these stages run their forward twice."""
    graph, cluster = chain(7), cluster_of(*(Device(),) * 3, rate=1e2)
    choices = tuple(sorted(set(again)))
    cut = SearchSpace(
        "1", choices, (schedule,), (4,), stages=3, in_order=True,
        recomputed=again if len(choices) > 1 else (),
    )  # fmt: skip
    plan = explored(graph, cluster, cut)
    assert tuple(stage.recompute for stage in plan.stages) == again
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (2,)]
    check_plan(plan, at(graph)(4), cluster)
    problem = coarsen(at(graph)(4), (StageLimits(),) * 3, num_microbatches=4)
    every = every_candidate(problem, cut, Setting(schedule, 4), (0, 1, 2), (1,))
    best = min(
        seconds_of(problem, cluster, one)
        for one in every
        if tuple(option.recompute for option in one.options) == again
    )
    assert plan.certificate.status == "optimal"
    assert plan.certificate.objective_seconds == pytest.approx(best)
    plain = explored(graph, cluster, replace(cut, recompute=(False,), recomputed=()))
    assert plain.certificate.objective_seconds <= plan.certificate.objective_seconds
    work = max(s.forward_seconds + s.backward_pass_seconds for s in plan.stages)
    assert plan.certificate.objective_seconds >= work * (4 if schedule == "1f1b" else 1)


def test_unlike_devices_take_the_positions_that_suit_them() -> None:
    """The fast device gets the heavy end of the chain, wherever its rank is."""
    graph = chain(6)
    slow, fast = Device(speed=1.0), Device(speed=4.0)
    space = SearchSpace("1", (False,), ("2bw",), (8,), stages=3)
    times = set()
    for devices in ((fast, slow, slow), (slow, fast, slow), (slow, slow, fast)):
        cluster = cluster_of(*devices, rate=float("inf"))
        plan = explored(graph, cluster, space)
        check_plan(plan, at(graph)(8), cluster)
        assert plan.certificate.status == "optimal"
        assert "all orders of unlike devices (3)" in plan.certificate.scope
        times.add(round(step_seconds(plan), 9))
    assert len(times) == 1


def test_arrangements() -> None:
    a, b = Device(speed=1.0), Device(speed=2.0)
    assert arrangements(cluster_of(a, a, a)) == (((0, 1, 2),), True)
    found, every = arrangements(cluster_of(a, b, a))
    assert every
    assert sorted(found) == [(0, 1, 2), (0, 2, 1), (1, 0, 2)]
    many, every = arrangements(cluster_of(*(a, b) * 6))
    assert not every
    assert 1 < len(many) < MAX_ARRANGEMENTS
    assert all(sorted(order) == list(range(12)) for order in many)


def test_ranks_that_only_slow_down_stay_idle() -> None:
    graph = chain(2)
    cluster = cluster_of(*(Device(),) * 4, rate=1.0)
    plan = explored(graph, cluster, SearchSpace("1", (False,), ("1f1b",), (4,)))
    assert plan.num_ranks < 4
    assert any("stay idle" in note for note in plan.notes)
    check_plan(plan, at(graph)(4), cluster)


def test_the_first_ranks_may_stay_idle() -> None:
    """A forecast has an entry for every rank up to the last one that is used."""
    graph, cluster = chain(2), cluster_of(Device(), Device(), Device(speed=8.0), rate=1.0)
    plan = explored(graph, cluster, SearchSpace("1", (False,), ("1f1b",), (4,)))
    assert [stage.ranks for stage in plan.stages] == [(2,)]
    assert plan.forecast is not None
    assert len(plan.forecast.ledgers) == 3
    assert Plan.from_json(plan.to_json()) == plan
    check_plan(plan, at(graph)(4), cluster)


def fitting(graph: OpGraph, limit: int, space: SearchSpace) -> Plan | None:
    cluster = cluster_of(*(Device("cpu", limit),) * 2)
    try:
        plan = explored(graph, cluster, space)
    except InfeasibleError:
        return None
    check_plan(plan, at(graph)(8), cluster)
    return plan


def test_memory_chooses_recomputation_and_names_what_lacks() -> None:
    graph = chain(6)
    space = SearchSpace("1", (False, True), ("gpipe",), (8,), stages=2)
    loose = explored(graph, cluster_of(*(Device(),) * 2), space)
    assert not any(stage.recompute for stage in loose.stages)
    assert loose.forecast is not None
    most = max(ledger.total_bytes for ledger in loose.forecast.ledgers)
    found = set()
    for percent in range(96, 40, -4):
        limit = most * percent // 100
        plan = fitting(graph, limit, space)
        if plan is not None:
            assert plan.forecast is not None
            assert all(ledger.total_bytes <= limit for ledger in plan.forecast.ledgers)
            found.add(sum(stage.recompute for stage in plan.stages))
    assert max(found) > 0
    tiny = cluster_of(*(Device("cpu", most // 10),) * 2)
    with pytest.raises(InfeasibleError, match="are the least by the planner's formula") as caught:
        explored(graph, tiny, space)
    assert "memory of more than" in (caught.value.remedy or "")


def test_the_memory_that_is_enough_is_named_and_a_little_less_is_not() -> None:
    """Searches with other limits find it: the number leads to a plan, and 5 % less to none."""
    graph = chain(6)
    space = SearchSpace("any", (False, True), ("1f1b", "gpipe"), (8,))

    def search(cluster: Cluster) -> Plan:
        return explored(graph, cluster, space)

    tiny = cluster_of(*(Device("cpu", 100),) * 2)
    with pytest.raises(InfeasibleError) as caught:
        search(tiny)
    advice = str(advised_of_devices(caught.value, tiny, search).remedy)
    assert "of memory on every device, which is enough" in advice
    assert "or add devices" in advice
    enough = parse_bytes(advice.partition(" of memory")[0])
    assert search(cluster_of(*(Device("cpu", enough),) * 2)).stages
    with pytest.raises(InfeasibleError):
        search(cluster_of(*(Device("cpu", enough * 95 // 100),) * 2))


def test_constraints() -> None:
    graph, cluster = chain(6), cluster_of(*(Device(),) * 4)
    space = SearchSpace("any", (False,), ("2bw",), (8,))
    last = graph.ops[-2].name
    with pytest.raises(ConfigError, match="stages by number"):
        explored(graph, cluster, space, constraints=(Pin(graph.ops[0].name, 1),))
    three = replace(space, stages=3)
    plan = explored(graph, cluster, three, constraints=(Pin(last, 1),))
    assert last in plan.stages[1].ops
    assert len(plan.stages) == 3


def test_spaces_that_are_none() -> None:
    for wrong in ({"replicas": "2"}, {"recompute": ()}, {"schedules": ("zb",)}, {"stages": 0}):
        with pytest.raises(ConfigError, match="not a choice"):
            SearchSpace(**wrong)  # type: ignore[arg-type]


def test_a_certificate_that_promises_more_is_refused() -> None:
    graph, cluster = chain(), cluster_of(*(Device(),) * 4)
    plan = explored(graph, cluster, SearchSpace("any", (False,), ("1f1b",), (4,)))
    assert any(stage.replicas > 1 for stage in plan.stages)
    less = plan.certificate.objective_seconds * 0.99
    lying = replace(plan.certificate, objective_seconds=less, bound_seconds=less)
    with pytest.raises(PlanError, match="the stages take"):
        check_plan(replace(plan, certificate=lying), at(graph)(4), cluster)


def test_what_only_the_simulator_can_time_is_checked_by_bounds() -> None:
    """Updates can make the calls that a forecast counts shorter: it is no limit of the claim."""
    graph, cluster = chain(), cluster_of(*(Device(),) * 4, latency=1.0)
    plan = explored(graph, cluster, SearchSpace((3, 1), (False,), ("stash",), (1,), stages=2))
    assert plan.forecast is not None
    short = replace(plan.forecast, step_seconds=0.9 * plan.forecast.step_seconds)
    check_plan(replace(plan, forecast=short), at(graph)(1), cluster)
    serial = times_of(plan, cluster, [edge.value for edge in plan.edges]).serial(1)
    claimed = plan.certificate.objective_seconds
    assert claimed < serial
    more = replace(plan.certificate, objective_seconds=1.01 * serial, status="feasible")
    with pytest.raises(PlanError, match="the stages take"):
        check_plan(replace(plan, certificate=more), at(graph)(1), cluster)


def test_a_remedy_is_offered_only_where_less_memory_is_needed() -> None:
    """Replicas hold all of a stage's weights: where these are what lacks, they do not help."""
    graph = chain(4, 256)
    free = planned(graph, Cluster.local(2)).forecast
    assert free is not None
    least = min(one.weights_bytes + one.gradients_bytes for one in free.ledgers)
    for given in ({}, {"stages": 2, "in_order": True}, {"stages": 2, "recomputed": (True, True)}):
        space = SearchSpace("1", (True,), **given)
        with pytest.raises(InfeasibleError) as caught:
            explored(graph, Cluster.local(2, memory=least), space)
        assert "memory of more than" in str(caught.value.remedy)
        assert "replicas" not in str(caught.value.remedy)
