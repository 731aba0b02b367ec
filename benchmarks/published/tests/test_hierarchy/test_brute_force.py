"""Small profiles: the search, the recursion written out, and all plans agree."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.pipedream import solve
from benchmarks.published.pipedream.profile_cuts import dag_of
from benchmarks.published.pipedream_model import HierarchyProblem, PipedreamCost, evaluate
from benchmarks.published.tests.helpers.hierarchies import (
    boundary,
    down_sets,
    plans,
    random_graph,
    recursion,
)
from pdcompile.errors import PlanError

CLUSTERS = [
    ((1, 3.0),),
    ((3, 2.0),),
    ((5, 8.0),),
    ((2, 9.0), (2, 2.0)),
    ((3, 20.0), (2, 1.0)),
    ((2, 9.0), (1, 1.0), (2, 3.0)),
]
RATIOS = [1.0, 1.0, 2.5, None]


def best(problem: HierarchyProblem) -> PipedreamCost | None:
    """The best of all plans that fit, and of these one with the fewest workers."""
    found = None
    for plan in plans(problem):
        try:
            here = evaluate(problem, plan)
        except PlanError:
            continue
        if found is None or (here.objective, here.workers) < (found.objective, found.workers):
            found = here
    return found


def draw(seed: int, size: int) -> HierarchyProblem:
    return HierarchyProblem(
        random_graph(seed, size),
        CLUSTERS[seed % len(CLUSTERS)],
        straight=seed % 5 == 0,
        activation_compression=RATIOS[seed // 7 % len(RATIOS)],
    )


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_the_best_of_all_plans(seed: int, size: int) -> None:
    problem = draw(seed, size)
    expected = best(problem)
    assert expected is not None
    answer = solve(problem)
    assert answer.status == "optimal"
    assert answer.objective == pytest.approx(expected.objective, rel=1e-9)
    assert answer.bound <= expected.objective * (1 + 1e-9)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0.2, 6))
def test_the_best_of_all_plans_that_fit(seed: int, size: int, share: float) -> None:
    plain = draw(seed, size)
    held = sum(n.activation_bytes + n.parameter_bytes for n in plain.graph.nodes)
    problem = HierarchyProblem(
        plain.graph,
        plain.levels,
        straight=plain.straight,
        activation_compression=plain.activation_compression,
        memory_bytes=max(share * held / 3, 1e-3),
    )
    expected = best(problem)
    answer = solve(problem)
    if expected is None:
        assert answer.status in ("infeasible", "unknown")
        assert answer.reason
        return
    assert answer.status != "infeasible"
    assert answer.bound <= expected.objective * (1 + 1e-9)
    if len(problem.levels) == 1:
        assert answer.status == "optimal"
    if answer.objective is not None:
        assert answer.objective >= expected.objective * (1 - 1e-9)
        assert all(s.details["memory_bytes"] <= problem.memory_bytes for s in answer.stages)
    if answer.status == "optimal":
        assert answer.objective == pytest.approx(expected.objective, rel=1e-9)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_the_recursion_over_all_down_sets(seed: int, size: int) -> None:
    problem = draw(seed, size)
    expected = recursion(problem, down_sets(problem.graph))
    answer = solve(problem)
    assert answer.objective == pytest.approx(expected, rel=1e-9)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 8))
def test_boundaries(seed: int, size: int) -> None:
    graph = random_graph(seed, size)
    dag = dag_of(graph)
    assert sorted(dag.order) == list(range(size))
    place = {v: k for k, v in enumerate(dag.order)}
    for down_set in down_sets(graph):
        mask = sum(1 << place[v] for v in down_set)
        assert dag.boundary(mask) == pytest.approx(boundary(graph, down_set), abs=1e-9)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_fewest_workers_among_equal_objectives(seed: int, size: int, two: bool) -> None:
    levels = ((2, 9.0), (2, 2.0)) if two else ((4, 3.0),)
    problem = HierarchyProblem(random_graph(seed, size), levels, fewer=True)
    expected = best(problem)
    assert expected is not None
    answer = solve(problem)
    assert answer.objective == pytest.approx(expected.objective, rel=1e-9)
    lazy = min(
        evaluate(problem, plan).workers
        for plan in plans(problem)
        if evaluate(problem, plan).objective <= expected.objective * (1 + 1e-12)
    )
    assert sum(stage.replicas for stage in answer.stages) == lazy


def test_no_layer_costs_anything() -> None:
    graph = random_graph(3, 4, zeros=1.0)
    answer = solve(HierarchyProblem(graph, ((4, 1.0), (2, 1.0))))
    assert (answer.status, answer.objective) == ("optimal", 0.0)
    assert not math.isinf(answer.bound)
