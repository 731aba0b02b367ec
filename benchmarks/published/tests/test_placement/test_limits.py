"""Odd devices, tight memory, and reasons that name what does not fit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.placement import place
from benchmarks.published.placement_model import PlacementProblem, parse
from benchmarks.published.tests.helpers.placements import brute_force, inception, random_problem


def chain(
    sizes: list[float], devices: int, limit: float, *, cpus: int = 0, **other: Any
) -> PlacementProblem:
    nodes = [
        {"id": f"op{i}", "fpgaLatency": 1, "cpuLatency": 10, "size": size} | other
        for i, size in enumerate(sizes)
    ]
    edges = [
        {"sourceId": f"op{i}", "destId": f"op{i + 1}", "cost": 0.5} for i in range(len(sizes) - 1)
    ]
    data = {"maxFPGAs": devices, "maxCPUs": cpus, "maxSizePerFPGA": limit}
    return parse(data | {"nodes": nodes, "edges": edges}, where="graph.json")


def test_one_node_too_large_is_named() -> None:
    answer = place(chain([1, 9, 1], 2, 8))
    assert answer.status == "infeasible"
    assert "'op1'" in answer.reason
    assert "size 9" in answer.reason
    assert answer.reason.endswith("enough is 10")


def test_a_sum_too_large_is_named() -> None:
    answer = place(chain([3, 3, 3], 2, 4))
    assert "together have size 9, more than 2 × 4" in answer.reason
    assert answer.reason.endswith("enough is 6")


def test_an_order_that_does_not_divide_is_named() -> None:
    answer = place(chain([3, 4, 3], 2, 6))
    assert answer.status == "infeasible"
    assert "does not divide into parts of 6" in answer.reason
    assert answer.reason.endswith("enough is 7")
    assert place(chain([3, 4, 3], 2, 7)).status == "optimal"


def test_a_cpu_takes_what_no_accelerator_holds() -> None:
    answer = place(chain([1, 9, 1], 2, 8, cpus=1))
    assert answer.status == "optimal"
    devices = [stage.details["device"] for stage in answer.stages]
    assert devices == ["accelerator", "cpu", "accelerator"]
    assert answer.objective == 10


def test_a_node_that_runs_nowhere_is_named() -> None:
    answer = place(chain([1, 1], 3, 10, supportedOnFpga=False))
    assert answer.status == "infeasible"
    assert "'op0' cannot run on one accelerator, and there is no cpu" in answer.reason
    assert place(chain([1, 1], 3, 10, cpus=1, supportedOnFpga=False)).objective == 20


@pytest.mark.parametrize("seed", range(5))
def test_no_device_at_all(seed: int) -> None:
    problem = random_problem(seed, 3)
    none = replace(problem, classes=tuple(replace(kind, count=0) for kind in problem.classes))
    answer = place(none)
    assert (answer.status, answer.objective, answer.stages) == ("infeasible", None, ())
    assert "no accelerator and no cpu" in answer.reason


def test_more_devices_than_nodes_leaves_devices_out() -> None:
    answer = place(chain([1, 1, 1], 60_000, 10, cpus=60_000))
    assert answer.status == "optimal"
    assert answer.objective == 2.0  # the middle one pays at both ends
    assert sum(len(stage.members) for stage in answer.stages) == 3


def test_costs_of_zero_everywhere() -> None:
    problem = chain([0, 0, 0], 2, 0, fpgaLatency=0, cpuLatency=0)
    answer = place(replace(problem, edges=tuple(replace(e, cost=0.0) for e in problem.edges)))
    assert (answer.status, answer.objective, answer.gap) == ("optimal", 0.0, 0.0)


def test_parts_without_edges_are_placed_together() -> None:
    problem = chain([1] * 6, 3, 2)
    answer = place(replace(problem, edges=()))
    assert (answer.status, answer.objective) == ("optimal", 2.0)


def test_numbers_of_any_magnitude() -> None:
    problem = chain([1] * 5, 2, 3)
    for scale in (1e-90, 1e90):
        nodes = tuple(
            replace(node, seconds=(node.seconds[0] * scale, math.inf)) for node in problem.nodes
        )
        edges = tuple(replace(edge, cost=edge.cost * scale) for edge in problem.edges)
        answer = place(replace(problem, nodes=nodes, edges=edges))
        assert answer.status == "optimal"
        assert answer.objective == pytest.approx(3.5 * scale)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "part",
    [
        0.99,
        pytest.param(1.0, marks=pytest.mark.slow),
        pytest.param(1.001, marks=pytest.mark.slow),
        1.05,
        1.3,
    ],
)
def test_tight_memory_is_proved_either_way(part: float) -> None:
    problem = parse(inception(2, 120), where="graph.json")
    total = math.fsum(node.size for node in problem.nodes)
    accelerator = replace(problem.classes[0], memory=math.ceil(part * total / 6))
    problem = replace(problem, classes=(accelerator, replace(problem.classes[1], count=0)))
    answer = place(problem)
    assert answer.status in ("optimal", "infeasible")
    if answer.status == "infeasible":
        least = float(answer.reason.rpartition(" ")[2])
        enough = replace(problem, classes=(replace(accelerator, memory=least), problem.classes[1]))
        assert place(enough).status == "optimal"
        less = replace(accelerator, memory=least - 1)
        assert place(replace(enough, classes=(less, problem.classes[1]))).status == "infeasible"


@pytest.mark.parametrize("seed", range(40))
def test_the_least_memory_named_is_the_least(seed: int) -> None:
    problem = random_problem(5000 + seed, 5)
    nodes = tuple(replace(node, size=float(math.ceil(node.size))) for node in problem.nodes)
    accelerator = replace(problem.classes[0], count=2, memory=4.0)
    problem = replace(
        problem, nodes=nodes, classes=(accelerator, replace(problem.classes[1], count=0))
    )
    answer = place(problem)
    best, _ = brute_force(problem)
    assert (answer.status == "infeasible") == math.isinf(best)
    if "is enough is" not in answer.reason:
        return
    least = float(answer.reason.rpartition(" ")[2])
    for memory in itertools.chain((least,), (least - 1,) if least > 1 else ()):
        classes = (replace(accelerator, memory=memory), problem.classes[1])
        value, _ = brute_force(replace(problem, classes=classes))
        assert math.isinf(value) == (memory < least)


def test_the_order_of_a_sum_decides_nothing() -> None:
    sizes = [0.3, 3, 3.784553180973742, 0.1, 0, 0.3]  # in this order 1 ulp less than in another
    limit = sum(sizes)
    for cost in (0.0, 0.5):
        problem = chain(sizes, 1, limit, fpgaLatency=cost)
        assert place(problem).objective == 6 * cost
    assert place(chain([0.1, 0.2], 1, 0.3)).status == "optimal"  # 0.1 + 0.2 > 0.3 in floats
    assert place(chain([1, 2], 1, 3 - 1e-15)).status == "infeasible"  # whole numbers have none
    assert place(chain([0.1, 0.2], 1, 0.3 * (1 - 1e-9))).status == "infeasible"
