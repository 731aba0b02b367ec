"""Piper's space: against trying everything, and what the answers promise."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module

import pytest

from benchmarks.published.piper import solve
from benchmarks.published.piper_model import (
    MenuEdge,
    MenuNode,
    MenuProblem,
    NodeVariant,
    evaluate,
)
from benchmarks.published.solution import Solution
from benchmarks.published.tests.helpers.menus import brute_force, random_menu
from pdcompile.units import parse_bytes


def agrees(problem: MenuProblem, answer: Solution) -> None:
    best = brute_force(problem)
    if math.isinf(best):
        assert answer.status == "infeasible"
        assert answer.objective is None
        assert answer.reason
        return
    assert answer.status == "optimal"
    assert answer.gap == 0
    assert answer.objective == pytest.approx(best, rel=1e-9, abs=1e-15)
    assert answer.bound <= best * (1 + 1e-9)
    assert evaluate(problem, answer.stages).objective == answer.objective


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", range(0, 240, 40))
def test_agrees_with_brute_force(first: int) -> None:
    for seed in range(first, first + 40):
        problem = random_menu(seed, even=seed % 2 == 0)
        agrees(problem, solve(problem))


@pytest.mark.slow
def test_agrees_with_brute_force_on_a_longer_sweep() -> None:
    for seed in range(10_000, 12_000):
        problem = random_menu(seed, even=seed % 2 == 0)
        agrees(problem, solve(problem))


def chain(count: int, **changes: object) -> MenuProblem:
    """Equal nodes in a row: 1 s, 10 bytes in flight, 10 bytes fixed; recomputing takes 1.4 s."""
    nodes = tuple(
        MenuNode(
            v,
            {
                1: (
                    NodeVariant(
                        "vanilla",
                        1.0,
                        8.0,
                        10.0,
                        10.0,
                        {v - 1: 0.0} if v else {},
                        {v + 1: 0.0} if v < count - 1 else {},
                    ),
                    NodeVariant(
                        "recompute",
                        1.4,
                        8.0,
                        1.0,
                        19.0,
                        {v - 1: 0.0} if v else {},
                        {v + 1: 0.0} if v < count - 1 else {},
                    ),
                )
            },
        )
        for v in range(count)
    )
    edges = tuple(MenuEdge(v, v + 1, 1.0) for v in range(count - 1))
    problem = MenuProblem(nodes, edges, 4, 1e3, 8, 1e6)
    return replace(problem, **changes)  # type: ignore[arg-type]


def test_stages_say_what_they_are() -> None:
    answer = solve(chain(4, memory_bytes=40.0))
    assert answer.status == "optimal"
    assert [name for stage in answer.stages for name in stage.members] == [0, 1, 2, 3]
    for stage in answer.stages:
        details = stage.details
        assert details["data_parallel"] == stage.replicas
        assert details["tensor_parallel"] == 1
        assert set(details["variants"]) == {str(name) for name in stage.members}
        assert details["memory_bytes"] <= 40
        assert details["in_flight"] >= 1
    assert max(stage.details["seconds"] for stage in answer.stages) == answer.objective


def test_recomputes_only_where_memory_is_short() -> None:
    # One node a stage: y = 4, 3, 2, 1 microbatches in flight need 50, 40, 30, 20 bytes.
    answer = solve(chain(4, memory_bytes=45.0, batch=1))
    names = [stage.details["variants"][str(stage.members[0])] for stage in answer.stages]
    assert names == ["recompute", "vanilla", "vanilla", "vanilla"]
    assert answer.objective == pytest.approx(1.4 + 2e-6)


def test_a_node_too_large_is_named_and_the_bytes_it_says_are_enough() -> None:
    problem = chain(3, memory_bytes=19.5)
    answer = solve(problem)
    assert answer.status == "infeasible"
    assert "node 0 alone needs 20 B" in answer.reason
    enough = parse_bytes(answer.reason.split("; ")[1].partition(" on each")[0])
    assert solve(replace(problem, memory_bytes=float(enough))).status == "optimal"


def test_the_least_memory_is_named_where_the_sum_is_too_large() -> None:
    problem = chain(4, devices=2, memory_bytes=39.0)
    answer = solve(problem)
    assert answer.status == "infeasible"
    # Two nodes a stage, recomputed: 2·(19 + 2) with two microbatches in flight.
    assert answer.reason.endswith("42 B on each device would be enough")
    assert solve(replace(problem, memory_bytes=42.0)).status == "optimal"
    assert solve(replace(problem, memory_bytes=41.0)).status == "infeasible"


def test_where_not_all_cuts_are_looked_at_nothing_is_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(import_module("benchmarks.published.piper"), "IDEALS", 0)
    answer = solve(chain(4, devices=2, memory_bytes=41.0))
    assert answer.status == "unknown"
    assert "cannot hold" not in answer.reason
    assert "it is not proved that there is none" in answer.reason


def test_degrees_that_do_not_go_together_need_more_devices() -> None:
    one, two = ({1: (NodeVariant("a", 1.0),)}, {2: (NodeVariant("a", 1.0),)})
    problem = MenuProblem((MenuNode(0, one), MenuNode(1, two)), (), 2, math.inf, 4, 1.0)
    answer = solve(problem)
    assert answer.status == "infeasible"
    assert "3 would be enough" in answer.reason
    assert solve(replace(problem, devices=3)).objective == pytest.approx(1.0)


def test_a_degree_above_all_devices_is_named() -> None:
    problem = MenuProblem((MenuNode("big", {4: (NodeVariant("a", 1.0),)}),), (), 2, 1.0, 4, 1.0)
    assert "node 'big' has variants for 4 devices or more" in solve(problem).reason


def test_replicas_divide_the_batch() -> None:
    problem = chain(1, devices=8, batch=6, memory_bytes=math.inf)
    (stage,) = solve(problem).stages
    assert stage.replicas == 6


def test_no_time_still_gives_a_plan_and_a_bound() -> None:
    problem = chain(40, devices=8, memory_bytes=400.0)
    answer = solve(problem, time_limit=0.0)
    assert answer.status in ("optimal", "feasible")
    assert answer.objective is not None
    exact = solve(problem)
    assert exact.status == "optimal"
    assert exact.objective is not None
    assert answer.bound <= exact.objective <= answer.objective


def test_the_same_seed_gives_the_same_answer() -> None:
    problem = random_menu(12, nodes=5)
    first, second = solve(problem, seed=3), solve(problem, seed=3)
    assert (first.stages, first.objective, first.bound) == (
        second.stages,
        second.objective,
        second.bound,
    )


def test_progress_hears_of_plans_and_bounds() -> None:
    heard: list[tuple[float | None, float]] = []
    answer = solve(chain(12, memory_bytes=90.0), progress=lambda *pair: heard.append(pair))
    assert answer.status == "optimal"
    assert heard
    assert heard[-1][1] <= answer.bound * (1 + 1e-12)
    objectives = [objective for objective, _ in heard if objective is not None]
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[-1] == answer.objective
