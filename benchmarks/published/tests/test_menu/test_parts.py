"""The engine and the tables below Piper's search, each by itself."""

from __future__ import annotations

import importlib
import itertools
import math
import random

import numpy as np
import pytest

from benchmarks.published.chain_program import Choices, cheapest_chain
from benchmarks.published.piper import solve
from benchmarks.published.piper.menus import (
    EMPTY,
    device_seconds,
    divisors,
    extend,
    menus,
    pareto,
)
from benchmarks.published.piper.stage_tables import (
    achievable_table,
    alive,
    exact_table,
    pairs,
    relaxed_table,
)
from benchmarks.published.piper.states import Space, all_ideals
from benchmarks.published.piper_model import (
    MenuEdge,
    MenuNode,
    MenuProblem,
    NodeVariant,
    evaluate,
)
from benchmarks.published.solution import StageSolution
from benchmarks.published.tests.helpers.menus import brute_force, random_menu
from pdcompile.errors import PlanError


def fewest(rows: list[tuple[int, int, int, int, int]], states: int) -> int | None:
    """The devices of the best chain, by trying all of them from the end."""
    best: list[int] = []

    def walk(state: int, used: int, flown: int) -> None:
        if state == 0:
            best.append(used)
        for before, after, devices, replicas, reach in rows:
            if after == state and flown <= reach:
                walk(before, used + devices, flown + replicas)

    walk(states - 1, 0, 0)
    return min(best, default=None)


def test_the_engine_agrees_with_trying_every_chain() -> None:
    rng = random.Random(4)
    found = 0
    for _ in range(400):
        number = rng.randint(2, 6)
        rows = []
        for _ in range(rng.randint(1, 14)):
            before, after = sorted(rng.sample(range(number), 2))
            replicas = rng.randint(1, 4)
            devices = replicas * rng.randint(1, 3)
            rows.append((before, after, devices, replicas, rng.randint(0, 8)))
        columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
        choices = Choices(*columns)
        best = fewest(rows, number)
        chain = cheapest_chain(choices, number, 1000)
        if best is None:
            assert chain is None
            continue
        found += 1
        assert chain is not None
        assert sum(rows[row][2] for row in chain) == best
        assert rows[chain[0]][0] == 0
        assert rows[chain[-1]][1] == number - 1
        assert all(rows[a][1] == rows[b][0] for a, b in itertools.pairwise(chain))
        flown = 0
        for row in reversed(chain):
            assert flown <= rows[row][4]
            flown += rows[row][3]
        assert cheapest_chain(choices, number, best - 1) is None
    assert found > 100


def test_relaxed_below_exact_below_achievable() -> None:
    """Every threshold gives a relaxed stage at least the flights of the exact one, and so on."""
    compared = 0
    for seed in range(60):
        problem = random_menu(seed, nodes=5)
        masks = all_ideals(problem, 1000)
        assert masks is not None
        space = Space(problem, masks)
        for menu in menus(problem):
            part = pairs(space, menu, math.inf, 10**6)
            assert part is not None
            relaxed = relaxed_table(space, part)
            real, hoped = exact_table(
                space, relaxed, alive(relaxed, math.inf), math.inf, 10**6, lambda: False
            )
            assert hoped is None
            tables = (relaxed, real, achievable_table(space, part))
            for threshold in (0.5, 3.0, 10.0, 40.0):
                reaches = []
                for table in tables:
                    rows = np.arange(len(table.start), dtype=np.int64)
                    choices = table.choices(threshold, menu.widths[0], rows)
                    ends = zip(choices.before.tolist(), choices.after.tolist(), strict=True)
                    reaches.append(dict(zip(ends, choices.reach.tolist(), strict=True)))
                for lower, higher in itertools.pairwise(reaches):
                    for ends, reach in higher.items():
                        assert lower[ends] >= reach
                        compared += 1
    assert compared > 500


@pytest.mark.slow
def test_thinned_choices_leave_the_bound_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.published.piper.POINTS", 1)
    open_ones = 0
    for seed in range(200, 320):
        problem = random_menu(seed, even=seed % 2 == 0)
        best = brute_force(problem)
        if math.isinf(best):
            continue
        answer = solve(problem)
        assert answer.objective is not None
        assert answer.bound <= best * (1 + 1e-9)
        assert best <= answer.objective * (1 + 1e-9)
        open_ones += answer.status == "feasible"
    assert open_ones > 3


def test_some_ideals_leave_the_bound_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    solver = importlib.import_module("benchmarks.published.piper")
    monkeypatch.setattr(solver, "IDEALS", 0)
    for seed in range(400, 500):
        problem = random_menu(seed)
        best = brute_force(problem)
        answer = solve(problem)
        assert answer.bound <= best * (1 + 1e-9)
        if answer.objective is not None:
            assert best <= answer.objective * (1 + 1e-9)
        elif answer.status == "infeasible":
            assert math.isinf(best)


def test_a_filter_by_threshold_keeps_every_stage_of_a_better_plan() -> None:
    for seed in range(60):
        problem = random_menu(seed, nodes=5)
        answer = solve(problem)
        if answer.objective is None or answer.objective == 0:
            continue
        masks = all_ideals(problem, 1000)
        assert masks is not None
        space = Space(problem, masks)
        index = {node.id: v for v, node in enumerate(problem.nodes)}
        done = 0
        for stage in answer.stages:
            part = sum(1 << index[name] for name in stage.members)
            ends = masks.index(done), masks.index(done | part)
            done |= part
            degree = stage.details["tensor_parallel"]
            kept = [
                found
                for menu in menus(problem)
                if menu.degree == degree and stage.replicas in menu.widths
                for found in [pairs(space, menu, answer.objective * (1 + 1e-9), 10**6)]
            ]
            assert any(
                found is not None
                and ends in zip(found.before.tolist(), found.after.tolist(), strict=True)
                for found in kept
            )


def test_device_seconds_are_below_every_plan() -> None:
    for seed in range(150):
        problem = random_menu(seed, nodes=4)
        best = brute_force(problem)
        assert device_seconds(problem) <= best * (1 + 1e-9)


def test_frontiers_agree_with_all_sums() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        options = [rng.integers(0, 6, (3, rng.integers(1, 4))).astype(float) for _ in range(5)]
        points = EMPTY
        for option in options:
            points = extend(points, option, math.inf, math.inf)
        sums = {
            tuple(np.sum(columns, axis=0))
            for columns in itertools.product(*(option.T for option in options))
        }
        best = {a for a in sums if not any(b != a and all(np.less_equal(b, a)) for b in sums)}
        assert {tuple(point) for point in points.T} == best


def test_many_points_are_swept_like_few() -> None:
    points = np.random.default_rng(1).integers(0, 30, (3, 2000)).astype(float)
    found = {tuple(point) for point in pareto(points).T}
    columns = np.unique(points.T, axis=0)
    beaten = (columns[:, None] <= columns).all(axis=2).sum(axis=0) > 1
    assert found == {tuple(point) for point in columns[~beaten]}


def test_divisors() -> None:
    assert divisors(12, 5) == (1, 2, 3, 4)
    assert divisors(7, 100) == (1, 7)
    assert divisors(5, 0) == ()


def pair() -> MenuProblem:
    first = MenuNode(0, {1: (NodeVariant("a", 2.0, 8.0, 3.0, 5.0, {}, {1: 4.0}),)})
    second = MenuNode(1, {1: (NodeVariant("a", 3.0, 0.0, 1.0, 1.0, {0: 6.0}, {}),)})
    return MenuProblem((first, second), (MenuEdge(0, 1, 10.0),), 3, 11.0, 4, 2.0)


def stage(name: int, replicas: int, chosen: str = "a", degree: int = 1) -> StageSolution:
    details = {"tensor_parallel": degree, "variants": {str(name): chosen}}
    return StageSolution((name,), replicas, details)


def test_the_evaluator_by_hand() -> None:
    result = evaluate(pair(), [stage(0, 2), stage(1, 1)])
    # 2·(10 + 4) bytes of the edge over two replicas, and 4·(1/2)·8/4 bytes of weights.
    assert result.seconds[0] == pytest.approx((14 + 4) / 2 + 2 / 2)
    assert result.seconds[1] == pytest.approx(2 * (10 + 6) / 2 + 3)
    assert result.in_flight == (2, 1)
    assert result.memory_bytes == (11.0, 2.0)
    assert result.objective == result.seconds[1]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([stage(0, 2)], "in no stage"),
        ([stage(1, 1), stage(0, 1)], "earlier stage"),
        ([stage(0, 2), stage(1, 2)], "takes 4 devices"),
        ([stage(0, 1), stage(1, 1), stage(0, 1)], "two stages"),
        ([stage(0, 1), stage(2, 1)], "unknown"),
        ([stage(0, 1, "b"), stage(1, 1)], "no variant 'b'"),
        ([stage(0, 1, "a", 2), stage(1, 1)], "no variant 'a' on 2"),
        ([stage(0, 0), stage(1, 1)], "do not divide"),
        ([stage(0, 1), StageSolution((), 1, {"tensor_parallel": 1}), stage(1, 1)], "empty"),
    ],
)
def test_the_evaluator_refuses(stages: list[StageSolution], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        evaluate(pair(), stages)


def test_the_evaluator_refuses_too_many_bytes() -> None:
    # Two later replicas and its own: three microbatches in flight.
    with pytest.raises(PlanError, match="14 bytes exceed"):
        evaluate(pair(), [stage(0, 1), stage(1, 2)])
