"""The problem inside a plan file: it comes back exactly, and nonsense is named with its place."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.cluster import Cluster
from pdcompile.errors import PlanError
from pdcompile.passes.planning.solved_problem import choices_of
from pdcompile.plan import Certificate, Plan, StagePlan, Training
from pdcompile.plan.embedded import assignment, problem_of
from pdcompile.problem import Item, PartitionProblem, StageLimits, Traffic
from tests.helpers.graphs import residual
from tests.helpers.planned import moved, planned
from tests.helpers.problems import random_problem

PROBLEM = PartitionProblem(
    items=(
        Item("h.0", ("a", "b"), 1.0, 2.0, 8, 8, 3, 1),
        Item("h.1", ("c",), 1.0, 2.0),
        Item("output", ()),
    ),
    traffic=(Traffic("b", 0, (1,), 4, 4), Traffic("c", 1, (2,), 4)),
    stages=(StageLimits(memory_bytes=99), StageLimits(bytes_per_second=math.inf)),
    pins=((2, 1),),
)


def plan_with(problem: PartitionProblem | None, *stages: tuple[str, ...]) -> Plan:
    held = stages or (("a", "b"), ("c",))
    return Plan(
        "",
        tuple(StagePlan(s, ops, (), 1, (s,)) for s, ops in enumerate(held)),
        (),
        (),
        Training(warmup=(0,) * len(held)),
        Cluster.local(len(held)).to_toml(),
        Certificate(1.0, 1.0, "optimal", "brute force", 0.0, ""),
        problem=problem,
    )


def test_it_comes_back_and_an_infinite_rate_is_left_out() -> None:
    plan = plan_with(PROBLEM)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    assert "nfinity" not in text
    assert json.loads(text)["problem"]["stages"] == [{"memory_bytes": 99}, {}]


def test_a_plan_without_it_is_written_as_before() -> None:
    plan = plan_with(None)
    assert '"problem"' not in plan.to_json()
    assert Plan.from_json(plan.to_json()).hash() == plan.hash()
    assert plan.hash() != plan_with(PROBLEM).hash() == plan_with(PROBLEM).hash()
    with pytest.raises(PlanError, match="does not hold the problem") as caught:
        problem_of(plan, "my.json")
    assert caught.value.where == "my.json: problem"
    assert "pdcompile plan TARGET" in str(caught.value.remedy)


@given(st.integers(0, 10**6))
def test_any_problem_comes_back(seed: int) -> None:
    problem = random_problem(seed)
    ops = tuple(op for item in problem.items for op in item.ops)
    plan = plan_with(problem, ops, *[()] * (len(problem.stages) - 1))
    assert Plan.from_json(plan.to_json()).problem == problem


def test_a_row_is_a_line() -> None:
    lines = planned(residual(3), Cluster.parse("2")).to_json().splitlines()
    assert sum(line.startswith('   {"name": ') for line in lines) >= 10


def edited(path: str, value: Any) -> str:
    data = json.loads(plan_with(PROBLEM).to_json())
    part = data
    *way, last = path.split(".")
    for step in way:
        part = part[int(step) if isinstance(part, list) else step]
    part[int(last) if isinstance(part, list) else last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "where", "message"),
    [
        ("surprise", 1, "problem", "unknown key"),
        ("items.0.forward_seconds", -1, "problem.items[0].forward_seconds", "negative"),
        ("items.0.forward_seconds", "x", "problem.items[0].forward_seconds", "not a number"),
        ("items.0.trainable_bytes", 9, "problem.items[0]", "9 trainable of 8"),
        ("traffic.0.forward_bytes", 0.5, "problem.traffic[0].forward_bytes", "whole number"),
        ("stages.0.speed", 0, "problem.stages[0].speed", "speed is 0"),
        ("pins.0", [2], "problem.pins[0]", "not a list of 2"),
        ("holdings", [{"versions": "2"}], "problem.holdings[0].versions", "not a whole number"),
        ("objective", "speed", "problem.objective", "not one of"),
    ],
)
def test_nonsense_is_named(path: str, value: Any, where: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(edited(f"problem.{path}", value))
    assert message in caught.value.message
    assert where in str(caught.value.where)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("problem.items", []),
        ("problem.items.1.ops", ["c", "a"]),
        ("problem.items.0.forward_seconds", 1.5),
        ("problem.traffic.0.producer", 3),
        ("problem.stages.0.memory_bytes", 100),
        ("problem.pins.0", [7, 0]),
        ("problem.wishes", [{"text": "Pin", "pins": [[9, 0]]}]),
        ("certificate.bound_seconds", 0.9),
        ("certificate.prover", "nobody"),
        ("certificate.scope", "all plans"),
        ("training.warmup", [1, 0]),
        ("seal", ""),
    ],
)
def test_what_is_sealed_cannot_be_edited(path: str, value: Any) -> None:
    certificate = {} if path != "certificate.bound_seconds" else {"status": "feasible"}
    data = json.loads(edited(path, value))
    data["certificate"] |= certificate
    with pytest.raises(PlanError, match="was edited") as caught:
        Plan.from_json(json.dumps(data))
    assert "make the plan again" in str(caught.value.remedy)


def test_what_the_remedies_say_is_read() -> None:
    data = json.loads(plan_with(PROBLEM).to_json())
    nothing = {"bound_seconds": 0.0, "status": "feasible", "scope": "mine"}
    without = Plan.from_json(json.dumps(data | {"problem": None}))
    assert without.certificate == plan_with(None).certificate
    modest = data | {"certificate": data["certificate"] | nothing}
    assert Plan.from_json(json.dumps(modest)).problem == PROBLEM
    del modest["problem"], modest["seal"]
    assert Plan.from_json(json.dumps(modest)).certificate.scope == "mine"


def test_what_is_not_sealed_can_be_edited() -> None:
    for path, value in (
        ("stages.0.ops", ["a"]), ("training.seed", 7), ("notes", ["mine"]),
    ):  # fmt: skip
        assert Plan.from_json(edited(path, value)).problem == PROBLEM


def test_nonsense_is_not_written() -> None:
    slow = replace(PROBLEM, stages=(StageLimits(speed=math.inf), StageLimits()))
    with pytest.raises(PlanError, match="not finite"):
        plan_with(slow).to_json()


def test_the_stage_of_an_item_follows_its_ops() -> None:
    assert assignment(plan_with(PROBLEM)) == (0, 1, 1)
    assert assignment(plan_with(PROBLEM, (), ("a", "b", "c"))) == (1, 1, 1)


def test_a_torn_item_is_a_plan_but_no_assignment() -> None:
    plan = Plan.from_json(plan_with(PROBLEM, ("a",), ("b", "c")).to_json())
    with pytest.raises(PlanError, match=r"keeps them together as 'h\.0'") as caught:
        assignment(plan, "p.json")
    assert caught.value.where == "p.json: stages[1].ops"
    assert "move all 2 ops" in str(caught.value.remedy)


def test_an_op_on_no_stage_is_no_assignment() -> None:
    with pytest.raises(PlanError, match=r"op 'b' of 'h\.0' is on no stage"):
        assignment(plan_with(PROBLEM, ("a",), ("c",)))


def test_another_number_of_stages_is_no_assignment() -> None:
    with pytest.raises(PlanError, match="problem has 2 stages, and the plan 3"):
        assignment(plan_with(PROBLEM, ("a", "b"), ("c",), ()))


def test_the_driver_s_way_agrees_with_itself() -> None:
    plan = planned(residual(3), Cluster.parse("3"))
    stage_of = assignment(plan)
    assert stage_of == tuple(sorted(stage_of))
    last = plan.stages[1].ops[-1]
    item = next(i for i, one in enumerate(problem_of(plan).items) if last in one.ops)
    edited = moved(plan, problem_of(plan).items[item].ops, 2)
    assert assignment(edited)[item] == 2


def test_a_search_of_the_cut_alone_may_leave_devices_idle() -> None:
    plan = plan_with(None, ("a", "b"), ("c", "d", "e"))
    whole = replace(plan, cluster=Cluster.local(2).to_toml())
    idle = replace(plan, cluster=Cluster.local(3).to_toml())
    assert choices_of(whole)["replicas"] == 1
    assert choices_of(idle)["replicas"] == "any"  # fixed replicas need every device
    assert choices_of(idle)["stages"] == 2
