"""Networks like those that lie in no folder here: proved where sets are few, bounded elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.published import pipedream_model
from benchmarks.published.pipedream import solve
from benchmarks.published.pipedream_model import HierarchyProblem, evaluate
from benchmarks.published.tests.helpers import profiles

CLUSTERS = {
    "16": ((16, 1.25e9),),
    "2x8": ((8, 3e10), (2, 3.125e9)),
    "4x4x4": ((4, 3e10), (4, 1e10), (4, 1.25e9)),
    "32x8": ((8, 3e10), (32, 3.125e9)),
}
FEW: dict[str, Callable[[], str]] = {
    "residual": lambda: profiles.residual(33),
    "dense": profiles.dense,
    "translation": lambda: profiles.translation(8, 7),
    "deep translation": lambda: profiles.translation(10, 12),
}
MANY: dict[str, Callable[[], str]] = {"inception": profiles.inception, "cells": profiles.cells}


@pytest.mark.sample(5)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("network", FEW)
def test_proved_where_the_sets_are_few(network: str, cluster: str) -> None:
    graph = pipedream_model.parse(FEW[network](), where=network)
    answer = solve(HierarchyProblem(graph, CLUSTERS[cluster]))
    assert answer.status == "optimal"
    assert answer.gap == 0


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "gap"), [("16", 0.2), ("2x8", 0.1), ("32x8", 0.05)])
@pytest.mark.parametrize("network", MANY)
def test_bounded_where_the_sets_are_many(network: str, cluster: str, gap: float) -> None:
    graph = pipedream_model.parse(MANY[network](), where=network)
    problem = HierarchyProblem(graph, CLUSTERS[cluster])
    answer = solve(problem)
    assert answer.objective is not None
    assert answer.gap is not None
    assert 0 < answer.gap < gap
    if answer.levels:
        assert evaluate(problem, answer.levels).objective == answer.objective


@pytest.mark.slow
def test_many_sets_under_a_memory_limit() -> None:
    graph = pipedream_model.parse(profiles.inception(), where="inception")
    problem = HierarchyProblem(graph, CLUSTERS["2x8"], memory_bytes=6e9)
    answer = solve(problem)
    assert answer.objective is not None
    assert all(stage.details["memory_bytes"] <= 6e9 for stage in answer.stages)
    nowhere = solve(HierarchyProblem(graph, CLUSTERS["2x8"], memory_bytes=1e8))
    assert nowhere.status == "infeasible"
    assert "keeps" in nowhere.reason
