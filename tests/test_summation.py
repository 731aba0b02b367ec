"""Gradients with three summands or more are summed in eager's order, on any stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pdcompile.cluster import Cluster
from pdcompile.eager.summation import disordered, summation_order
from pdcompile.errors import PlanError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.planning.plan_check import check_plan
from pdcompile.passes.schedules import warmup
from pdcompile.plan import Training
from pdcompile.problem.deployment import stage_limits
from pdcompile.problem.space import Setting
from tests.helpers.captures import captured, make, rows
from tests.helpers.costed import profile
from tests.helpers.planned import assembled


def three_readers(model: nn.Module, x: Tensor) -> Tensor:
    h = model.lin(x)
    first = torch.sigmoid(h)
    second = torch.tanh(h)
    third = torch.cos(h)
    return first + second * third


def graph_of(forward: object) -> OpGraph:
    found = captured(make(forward), rows()).train  # type: ignore[arg-type]
    return profile(found, None, microbatch_size=found.batch_size, costs="estimated")


def test_three_readers_have_an_order() -> None:
    pairs = summation_order(graph_of(three_readers))
    assert pairs == (("sigmoid", "tanh", "lin"), ("tanh", "cos", "lin"))


def test_two_readers_commute() -> None:
    graph = graph_of(lambda self, x: torch.sigmoid(h := self.lin(x)) + torch.tanh(h))
    assert summation_order(graph) == ()


def test_reading_twice_counts_twice() -> None:
    graph = graph_of(lambda self, x: torch.sigmoid(h := self.lin(x)) + h * h)
    assert summation_order(graph) == (("sigmoid", "mul", "lin"),)


def test_readers_without_a_gradient_do_not_count() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        h = model.lin(x)
        with torch.no_grad():
            scale = h.abs()
        return torch.sigmoid(h) * scale * h.detach() + torch.tanh(h)

    assert summation_order(graph_of(forward)) == ()


def test_a_parameter_that_is_used_three_times_has_none() -> None:
    """Each stage accumulates the gradients of its own uses."""
    assert summation_order(graph_of(lambda self, x: self.lin(self.lin(self.lin(x))))) == ()


def test_the_planner_keeps_the_order_and_check_refuses_another() -> None:
    graph, cluster = graph_of(three_readers), Cluster.parse("2")
    depth = warmup("1f1b", 2, 2)
    problem = coarsen(
        graph,
        stage_limits(cluster, range(2)),
        num_microbatches=2,
    )
    problem = scheduled(problem, cluster, Setting("1f1b", 2), depth)
    named = {name: i for i, item in enumerate(problem.items) for name in item.ops}
    assert problem.order == ((named["sigmoid"], named["tanh"]), (named["tanh"], named["cos"]))
    found, certificate = partition(problem)
    training = Training("1f1b", 2, 2 * graph.batch_size, depth)
    plan = assembled(graph, problem, found, certificate, training, cluster)
    check_plan(plan, graph, cluster)
    early = ("lin", "cos")
    late = tuple(op.name for op in graph.ops if op.name not in early)
    turned = replace(
        plan,
        stages=(replace(plan.stages[0], ops=early), replace(plan.stages[1], ops=late)),
        edges=(),
    )
    with pytest.raises(PlanError, match="the gradient of 'lin' would be summed in another order"):
        check_plan(turned, graph, cluster)
    stage_of = {name: int(name not in early) for name in (*early, *late)}
    assert list(disordered(graph, stage_of)) == [("tanh", "cos", "lin")]
