"""Planning at scale, forced upon small problems: against brute force and the exact search."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graphs import FAMILIES, Sketch, problem
from benchmarks.published.placement import placement_search as search
from benchmarks.published.placement.cut_chain import arrays, best, linear_chain, positions_of
from benchmarks.published.placement.node_groups import grouped
from benchmarks.published.placement.placement_search import solve_large as solve
from benchmarks.published.placement.placements import (
    Placement,
    compact,
    objective,
    stage_loads,
)
from benchmarks.published.placement.relaxed import GraphPart, lines
from benchmarks.published.placement.series import (
    anchors,
    listed,
    segments,
    series,
    series_chain,
    stages_of,
)
from benchmarks.published.placement_model import LoadProblem
from benchmarks.published.tests.helpers.placements import brute_force, random_problem
from pdcompile.passes.partition.budget import Budget

SLOW_ENOUGH = 300.0  # seconds: no search here comes near it


def small(family: str, ops: int, seed: int, devices: int, cpus: int, training: bool) -> LoadProblem:
    """A little graph of a family; memory without limit."""
    if family == "experts":
        draw = FAMILIES["experts"](0, seed)
        draw = _experts(draw, ops)
    elif family == "transformer":
        draw = _heads(Sketch(seed), ops)
    else:
        draw = FAMILIES[family](ops, seed)
    made = problem(draw, devices, cpus=cpus, training=training, slower=2.0)
    classes = tuple(replace(kind, memory=math.inf) for kind in made.classes)
    return grouped(replace(made, classes=classes))


def _experts(draw: Sketch, ops: int) -> Sketch:
    x = draw.op(0.5, 0.3)
    router = draw.op(0.2, 0.3, x)
    ends = [draw.op(0.5, 0.1, router) for _ in range(max(1, ops - 3))]
    draw.op(0.2, 0.3, router, x, *ends)
    return draw


def _heads(draw: Sketch, ops: int) -> Sketch:
    x = draw.op(0.5, 0.3)
    while len(draw.work) + 6 <= ops:
        norm = draw.op(0.1, 0.3, x)
        q, k, v = (draw.op(1.0, 0.3, norm) for _ in range(3))
        x = draw.op(0.5, 0.6, draw.op(0.3, 0.2, q, k), v, x)
    return draw


problems = st.builds(
    small,
    st.sampled_from(sorted(FAMILIES)),
    st.integers(4, 9),
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.integers(0, 1),
    st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(problems, st.sampled_from([0, 1, 3, 1500]))
def test_bound_optimum_and_objective_are_in_order(made: LoadProblem, most: int) -> None:
    exact = search.solve(made, budget=Budget(SLOW_ENOUGH))
    found = solve(made, budget=Budget(SLOW_ENOUGH), most_in_segment=most, rounds=2)
    assert found.placement is not None
    assert found.objective == objective(made, found.placement)
    assert found.bound <= exact.objective * (1 + 1e-9)
    assert exact.bound <= found.objective * (1 + 1e-9)
    if most == 1500:
        assert found.bound >= found.objective * (1 - 1e-5)


@settings(max_examples=100)
@given(st.integers(0, 100_000), st.sampled_from([0, 2, 1500]))
def test_against_brute_force(seed: int, most: int) -> None:
    """Every feature of the problem: unlike devices, colours, tight memory, forbidden classes."""
    raw = random_problem(seed)
    made = grouped(raw)
    least, _ = brute_force(raw)
    found = solve(made, budget=Budget(SLOW_ENOUGH), most_in_segment=most, rounds=2)
    assert found.bound <= least * (1 + 1e-9)
    assert found.objective >= least * (1 - 1e-9)
    if found.placement is not None:
        assert objective(made, found.placement) == found.objective
        if most == 1500:
            assert found.objective == pytest.approx(least, rel=2e-5, abs=1e-12)


@settings(max_examples=60)
@given(problems)
def test_loads_of_a_linear_chain_are_true(made: LoadProblem) -> None:
    a = arrays(made)
    place = positions_of(list(range(a.groups)))
    cuts = np.arange(a.groups + 1)
    chain = linear_chain(a, place, cuts, 1e9)
    for begin in range(a.groups):
        for end in range(begin + 1, a.groups + 1):
            stages = [int(v >= begin) + int(v >= end) for v in range(a.groups)]
            for c in range(len(made.classes)):
                if made.classes[c].count:
                    true = stage_loads(made, Placement(tuple(stages), (c, c, c)))[1]
                    assert chain.loads[c][begin, end - begin - 1] == pytest.approx(true)


@settings(max_examples=60)
@given(problems)
def test_loads_of_all_cuts_are_true(made: LoadProblem) -> None:
    a = arrays(made)
    parts = listed(segments(a))
    assert parts is not None
    whole = series(a, parts)
    count = len(whole.work)
    if count > 60:
        return
    chain = series_chain(whole, 1e9, np.arange(count))
    assert chain is not None
    inside = [stages_of(whole, [0, cut, count - 1]) == 0 for cut in range(count)]
    inside[0], inside[-1] = np.zeros(a.groups, dtype=bool), np.ones(a.groups, dtype=bool)
    for begin in range(count):
        for end in range(begin + 1, count):
            load = chain.loads[0][begin, end - begin - 1]
            if (inside[begin] & ~inside[end]).any():
                assert load == math.inf
                continue
            stages = 2 - inside[end].astype(int) - inside[begin].astype(int)
            true = stage_loads(made, Placement(tuple(stages.tolist()), (0, 0, 0)))[1]
            assert load == pytest.approx(true)


@settings(max_examples=60)
@given(problems)
def test_all_cuts_are_all_down_closed_sets(made: LoadProblem) -> None:
    a = arrays(made)
    n = a.groups
    if n > 10:
        return
    parts = listed(segments(a))
    assert parts is not None
    down_closed = sum(
        all(mask >> s & 1 or not mask >> t & 1 for s, t in made.arcs) for mask in range(1 << n)
    )
    assert sum(len(part.inside) for part in parts) == down_closed


@settings(max_examples=60)
@given(problems)
def test_anchors_are_comparable_with_all(made: LoadProblem) -> None:
    n = len(made.sizes)
    reach = [1 << v for v in range(n)]
    for v in reversed(range(n)):
        for s, t in made.arcs:
            if s == v:
                reach[v] |= reach[t]
    true = [v for v in range(n) if all(reach[v] >> u & 1 or reach[u] >> v & 1 for u in range(n))]
    assert anchors(arrays(made)).tolist() == true


@settings(max_examples=60)
@given(problems, st.booleans())
def test_lines_lie_below_every_cut(made: LoadProblem, closed: bool) -> None:
    a = arrays(made)
    n = min(a.groups, 8)
    keep = a.pin_of < n
    part = GraphPart(
        a.seconds[0][:n],
        a.source[a.target < n],
        a.target[a.target < n],
        a.value_of[keep],
        a.pin_of[keep],
        a.costs,
    )
    known = lines(part, closed=closed)
    for mask in range(1 << n):
        held = [mask >> v & 1 for v in range(n)]
        if closed and any(held[t] > held[s] for s, t in zip(part.source, part.target, strict=True)):
            continue
        work = sum(float(part.work[v]) for v in range(n) if held[v])
        cost = 0.0
        for e in range(len(part.costs)):
            pins = {held[v] for v in part.pin_of[part.value_of == e]}
            cost += float(part.costs[e]) * (len(pins) > 1)
        low = known.least(np.array([work]), np.array([work]))[0]
        assert low <= cost + 1e-9 * (1 + cost)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["transformer", "residual"])
@pytest.mark.parametrize("training", [False, True])
def test_thousand_ops_on_64_devices_are_proved(family: str, training: bool) -> None:
    made = grouped(problem(FAMILIES[family](1000, 1), 64, cpus=1, training=training))
    found = solve(made, budget=Budget(SLOW_ENOUGH))
    assert found.placement is not None
    assert found.bound >= found.objective * (1 - 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ten_thousand_ops_on_64_devices(family: str) -> None:
    made = grouped(problem(FAMILIES[family](10_000, 1), 64))
    found = solve(made, budget=Budget(SLOW_ENOUGH), rounds=1)
    assert found.placement is not None
    gap = 1 - found.bound / found.objective
    largest = {"transformer": 1e-5, "residual": 1e-5, "experts": 0.015, "series-parallel": 0.05}
    assert gap <= largest[family]


def test_a_budget_that_is_spent_ends_the_search_with_a_plan() -> None:
    made = grouped(problem(FAMILIES["experts"](1000, 1), 16))
    budget = Budget(0.0)
    found = solve(made, budget=budget)
    assert found.placement is None or found.objective == objective(made, found.placement)
    assert found.bound > 0


@pytest.mark.slow
def test_equal_seeds_give_equal_placements() -> None:
    made = grouped(problem(FAMILIES["series-parallel"](120, 1), 5))
    first = solve(made, budget=Budget(SLOW_ENOUGH), seed=5, rounds=2)
    second = solve(made, budget=Budget(SLOW_ENOUGH), seed=5, rounds=2)
    assert (first.placement, first.bound) == (second.placement, second.bound)
    assert first.placement is not None
    again = compact(first.placement.stage_of, first.placement.kinds)
    assert objective(made, again) == first.objective
    chain = linear_chain(arrays(made), np.arange(120), np.arange(121), 2 * first.objective)
    assert best(chain, 0.0)[1] >= first.bound * (1 - 1e-6)
