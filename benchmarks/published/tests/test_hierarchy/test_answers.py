"""Answers: memory that holds, reasons, refusals by the evaluator, limits of time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published import pipedream_model
from benchmarks.published.pipedream import solve
from benchmarks.published.pipedream_model import (
    HierarchyProblem,
    ProfileGraph,
    ProfileNode,
    evaluate,
)
from benchmarks.published.solution import LevelSolution
from benchmarks.published.tests.helpers import profiles
from pdcompile.errors import PlanError


def chain(*layers: tuple[float, float, float]) -> ProfileGraph:
    """Layers of (seconds, activation bytes, parameter bytes), one after the other."""
    nodes = tuple(
        ProfileNode(f"n{v}", "Layer(1)", seconds, 0.0, activation, parameters)
        for v, (seconds, activation, parameters) in enumerate(layers)
    )
    return ProfileGraph(nodes, tuple((v, v + 1) for v in range(len(layers) - 1)))


def test_terms_by_hand() -> None:
    """Two levels: the inside of the first stage, its shared exchange, and the boundaries."""
    graph = chain((4, 6, 8), (2, 10, 4))
    problem = HierarchyProblem(graph, ((2, 4.0), (3, 1.0)))
    plan = (
        LevelSolution(("n0",), 2, (LevelSolution(("n0",), 2),)),
        LevelSolution(("n1",), 1, (LevelSolution(("n1",), 1),)),
    )
    found = evaluate(problem, plan)
    inner = (4 + 4 * 8 / (4 * 2)) / 2
    first = (inner + 4 * 8 / (1 * 2) / 2) / 2
    last = max(2.0, 2 * 6 / 1.0)
    assert found.objective == max(first, last)
    assert [leaf.replicas for leaf in found.leaves] == [4, 1]
    assert [leaf.in_flight for leaf in found.leaves] == [2, 1]
    assert found.leaves[0].memory_bytes == 2 * (6 + 8)
    compressed = replace(problem, activation_compression=4.0)
    assert evaluate(compressed, plan).objective == max(first, 3.0)
    ignored = replace(problem, activation_compression=None)
    assert evaluate(ignored, plan).objective == max(first, 2.0)


def test_tampered_plans_are_refused() -> None:
    problem = HierarchyProblem(chain((1, 1, 1), (1, 1, 1)), ((2, 1.0),), memory_bytes=4.0)
    whole = LevelSolution(("n0", "n1"), 1)
    assert evaluate(problem, (whole,)).objective == 2.0
    for plan, message in [
        ((), "no stage"),
        ((LevelSolution(("n0",), 1),), "every node once"),
        ((whole, LevelSolution(("n1",), 1)), "every node once"),
        ((LevelSolution(("n1",), 1), LevelSolution(("n0",), 1)), "before its inputs"),
        ((replace(whole, replicas=3),), "more than 2"),
        ((replace(whole, replicas=0),), "no replica"),
        ((replace(whole, inner=(whole,)),), "more levels"),
        ((LevelSolution(("n0", "n1", "x"), 1),), "every node once"),
    ]:
        with pytest.raises(PlanError, match=message):
            evaluate(problem, plan)
    with pytest.raises(PlanError, match="needs 4 bytes"):
        evaluate(replace(problem, memory_bytes=3.0), (whole,))
    with pytest.raises(PlanError, match="straight"):
        evaluate(replace(problem, straight=True), (replace(whole, replicas=2),))


def test_memory_decides_the_plan() -> None:
    graph = chain((1, 10, 0), (1, 10, 0), (1, 10, 0), (1, 10, 0))
    free = HierarchyProblem(graph, ((4, 1e3),), straight=True)
    assert solve(free).objective == 1.0
    # Four stages hold 40, 30, 20 and 10 bytes; three need 3·10 at least; two 2·10 and 1·30.
    assert solve(replace(free, memory_bytes=40.0)).objective == 1.0
    assert solve(replace(free, memory_bytes=30.0)).objective == 2.0
    answer = solve(replace(free, memory_bytes=29.0))
    assert answer.status == "infeasible"
    assert "30 B" in answer.reason or "30.0 B" in answer.reason
    assert answer.objective is None


def test_a_layer_that_fits_nowhere_is_named() -> None:
    problem = HierarchyProblem(chain((1, 1, 1), (1, 50, 50)), ((2, 1.0), (2, 1.0)), memory_bytes=60)
    answer = solve(problem)
    assert answer.status == "infeasible"
    assert answer.reason.startswith("n1 (Layer) keeps 100 B")


def test_levels_and_scope() -> None:
    graph = pipedream_model.parse(profiles.translation(3, 2), where="gnmt")
    answer = solve(HierarchyProblem(graph, ((2, 1e10), (2, 1e9))))
    assert answer.levels
    problem = HierarchyProblem(graph, ((2, 1e10), (2, 1e9)))
    again = evaluate(problem, answer.levels)
    assert again.objective == answer.objective
    assert [leaf.members for leaf in again.leaves] == [s.members for s in answer.stages]
    assert all(name in answer.scope for name in graph.dropped)
    flat = solve(HierarchyProblem(graph, ((4, 1e9),)))
    assert flat.levels == ()
    assert flat.to_json()["stages"][0]["replicas_per_level"] == [flat.stages[0].replicas]


@pytest.mark.slow
def test_equal_answers_for_equal_seeds() -> None:
    graph = pipedream_model.parse(profiles.cells(1), where="nas")
    problem = HierarchyProblem(graph, ((2, 1e10), (2, 1e9)))
    one, two = solve(problem, seed=3), solve(problem, seed=3)
    assert replace(one, seconds=0.0) == replace(two, seconds=0.0)


def test_no_time_still_gives_a_plan_and_a_bound() -> None:
    graph = pipedream_model.parse(profiles.inception(4), where="inception")
    seen: list[tuple[float | None, float]] = []
    answer = solve(
        HierarchyProblem(graph, ((4, 1e9), (2, 1e9))),
        time_limit=0.0,
        progress=lambda objective, bound: seen.append((objective, bound)),
    )
    assert answer.status == "feasible"
    assert answer.objective is not None
    assert answer.bound <= answer.objective
    assert seen[-1] == (answer.objective, answer.bound)
