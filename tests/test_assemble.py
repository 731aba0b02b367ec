"""Assembling: stages, edges, tied parameters and fingerprints of a plan."""

from __future__ import annotations

import dataclasses

import pytest

from pdcompile.cluster import Cluster
from pdcompile.errors import PlanError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.stages.assemble import fingerprint
from pdcompile.plan import Certificate, Plan, Training
from pdcompile.problem import ANY_CUT, Partition, PartitionProblem, StageLimits
from tests.helpers.graphs import chain, residual
from tests.helpers.planned import assembled

CERTIFICATE = Certificate(1.0, 1.0, "optimal", "brute force", 0.0, ANY_CUT)


def problem_of(graph: OpGraph, *speeds: float) -> PartitionProblem:
    return coarsen(graph, tuple(StageLimits(speed=s) for s in speeds), num_microbatches=4)


def plan_of(graph: OpGraph, first: int, *speeds: float) -> Plan:
    """The first `first` items on stage 0, the others on stage 1."""
    problem = problem_of(graph, *speeds)
    stage_of = tuple(int(i >= first) for i in range(len(problem.items)))
    partition = Partition(stage_of, 1.0, (1.0, 1.0), (0, 0))
    local = Cluster.local(2)
    devices = tuple(
        dataclasses.replace(one, speed=v) for one, v in zip(local.devices, speeds, strict=True)
    )
    cluster = dataclasses.replace(local, devices=devices)
    return assembled(graph, problem, partition, CERTIFICATE, Training(), cluster)


def test_stages_hold_ops_in_order_with_their_sums() -> None:
    graph = chain(4)
    plan = plan_of(graph, 3, 1.0, 2.0)
    assert [stage.ops for stage in plan.stages] == [
        ("linear_0", "linear_1", "linear_2"),
        ("linear_3", "loss"),
    ]
    first, second = plan.stages
    assert (first.forward_seconds, first.backward_seconds) == (3.0, 6.0)
    assert (second.forward_seconds, second.backward_seconds) == (1.1 / 2, 2.1 / 2)
    assert first.parameters == ("layers.0.weight", "layers.1.weight", "layers.2.weight")
    assert first.parameter_bytes == first.trainable_bytes == 3 * 8 * 8 * 4
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,)]
    (edge,) = plan.edges
    assert (edge.value, edge.source, edge.targets, edge.bytes) == ("linear_2", 0, (1,), 4 * 8 * 4)


def test_tied_parameters_are_held_by_both_stages() -> None:
    plan = plan_of(residual(2), 5, 1.0, 1.0)
    (tied,) = plan.tied
    assert (tied.fqn, tied.stages) == ("wte.weight", (0, 1))
    assert all("wte.weight" in stage.parameters for stage in plan.stages)
    assert plan.stages[1].ops[-1] == "cross_entropy"


def test_a_plan_survives_its_text() -> None:
    plan = plan_of(residual(2), 4, 1.0, 1.0)
    assert Plan.from_json(plan.to_json()) == plan


def test_fingerprint_follows_graph_costs_and_cluster() -> None:
    graph = chain(3)
    op = graph.ops[0]
    assert op.cost is not None
    slower = dataclasses.replace(op, cost=dataclasses.replace(op.cost, forward_seconds=7.0))
    changed = dataclasses.replace(graph, ops=(slower, *graph.ops[1:]))
    prints = {
        fingerprint(graph, Cluster.local(2)),
        fingerprint(changed, Cluster.local(2)),
        fingerprint(graph, Cluster.local(3)),
        fingerprint(chain(4), Cluster.local(2)),
    }
    assert len(prints) == 4
    assert fingerprint(chain(3), Cluster.local(2)) in prints


def test_a_cut_that_runs_backwards_is_refused() -> None:
    graph = chain(3)
    partition = Partition((1, 0, 1, 1), 1.0, (1.0, 1.0), (0, 0))
    with pytest.raises(PlanError, match=r"reads 'linear_0' of\s+stage 1"):
        assembled(
            graph, problem_of(graph, 1.0, 1.0), partition, CERTIFICATE, Training(), Cluster.local(2)
        )
