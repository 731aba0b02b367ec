"""A plan that does not fit names a limit that is enough."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pdcompile.cluster import Cluster
from pdcompile.errors import InfeasibleError, NotFoundError
from pdcompile.ir.graph import OpCost, OpGraph
from pdcompile.passes.planning.memory_limits import within_ledgers
from pdcompile.plan import (
    NOT_CERTIFIED,
    Forecast,
    MemoryLedger,
    Plan,
    StagePlan,
    Training,
)
from pdcompile.problem import Item, Partition, PartitionProblem, StageLimits
from pdcompile.problem.constraints import Pin
from pdcompile.units import parse_bytes
from tests.helpers.graphs import chain
from tests.helpers.planned import planned


def named(refused: InfeasibleError) -> int:
    """The limit that the remedy names, in bytes."""
    found = re.match(r"(.*?B) of memory on every stage", refused.remedy or "")
    assert found, refused.remedy
    return parse_bytes(found[1])


def refusal(graph: OpGraph, limit: int, stages: int, schedule: str) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        planned(graph, Cluster.local(stages, memory=limit), schedule=schedule)
    return caught.value


def sized(sizes: list[int]) -> OpGraph:
    """A chain whose ops have that many bytes of parameters and of activations."""
    graph = chain(len(sizes))
    costs = [
        OpCost(
            1e-3,
            2e-3,
            parameter_bytes=n,
            saved_bytes=n,
            output_bytes=n,
            workspace_bytes=n,
            microbatch_size=4,
        )
        for n in sizes
    ]
    ops = tuple(replace(op, cost=cost) for op, cost in zip(graph.ops, costs, strict=False))
    return replace(graph, ops=(*ops, *graph.ops[len(ops) :]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw"])
def test_the_limit_that_is_named_is_enough(schedule: str) -> None:
    graph = sized([1_000, 90_000, 20_000, 40_000, 70_000])
    enough = named(refusal(graph, 100, 2, schedule))
    found = planned(graph, Cluster.local(2, memory=enough), schedule=schedule)
    assert found.forecast is not None
    assert max(ledger.total_bytes for ledger in found.forecast.ledgers) <= enough


def test_only_what_the_formula_rules_out_is_called_infeasible() -> None:
    """No plan found between what the formula needs and what a ledger holds proves nothing."""
    graph = chain(2, 256)
    free = planned(graph, Cluster.local(2), schedule="2bw").forecast
    assert free is not None
    held = max(ledger.total_bytes for ledger in free.ledgers)
    assert type(refusal(graph, held // 4, 2, "2bw")) is InfeasibleError
    unknown = refusal(graph, held - 1, 2, "2bw")
    assert isinstance(unknown, NotFoundError)
    assert "it is not proved that there is none" in unknown.message
    found = planned(graph, Cluster.local(2, memory=named(unknown)), schedule="2bw")
    assert "memory by the planner's formula and by the schedule's ledger" in found.certificate.scope


def test_constraints_that_contradict_each_other_ask_for_no_memory() -> None:
    wishes = (Pin("layers.1", 1), Pin("layers.2", 0))
    with pytest.raises(InfeasibleError) as caught:
        planned(chain(4), Cluster.local(2, memory=10**9), constraints=wishes)
    assert "memory" not in (caught.value.remedy or "")


def test_limits_fall_at_first_by_no_more_than_what_is_too_much() -> None:
    """A cut whose ledger is 30 bytes above its formula gives way to one that has less above it."""
    cuts = [(100, 130, 1.0), (88, 100, 1.1), (60, 80, 2.0)]  # formula, ledger, seconds
    problem = PartitionProblem((Item("op", ("op",)),), (), (StageLimits(memory_bytes=110),))

    def solve(limited: PartitionProblem) -> tuple[Plan, Partition]:
        limit = limited.stages[0].memory_bytes
        assert limit is not None
        held, ledger, seconds = next(one for one in cuts if one[0] <= limit)
        forecast = Forecast(seconds, 0.0, 0.0, (), (MemoryLedger(weights_bytes=ledger),))
        certificate = replace(NOT_CERTIFIED, objective_seconds=seconds)
        stage = StagePlan(0, ("op",), (), ranks=(0,))
        plan = Plan("", (stage,), (), (), Training(), "", certificate, forecast=forecast)
        return plan, Partition((0,), seconds, (seconds,), (held,))

    assert within_ledgers(problem, solve).certificate.objective_seconds == 1.1
