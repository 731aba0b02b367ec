"""Reductions leave the optimum where it is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.published import placement_model
from benchmarks.published.placement.ideal_program import all_ideals, best_chain
from benchmarks.published.placement.node_groups import (
    grouped,
    lifted,
    memory_problem,
    together,
    without_zeros,
)
from benchmarks.published.placement.placement_search import simple_bound
from benchmarks.published.placement.placements import objective, stage_ranges
from benchmarks.published.placement_model import DeviceClass, LoadProblem
from benchmarks.published.tests.helpers.placements import random_problem
from pdcompile.passes.partition.budget import Budget

SEEDS = st.integers(0, 10**9)


def problem_with_devices(seed: int) -> LoadProblem | None:
    groups = grouped(random_problem(seed, 7))
    return groups if any(kind.count for kind in groups.classes) else None


def optimum(groups: LoadProblem) -> float:
    found = all_ideals(groups, 10_000)
    assert found is not None
    chain = best_chain(groups, found, Budget())
    assert chain is not None
    return math.inf if chain.placement is None else objective(groups, chain.placement)


@settings(max_examples=150)
@given(SEEDS)
def test_joining_groups_that_cost_nothing_keeps_the_optimum(seed: int) -> None:
    groups = problem_with_devices(seed)
    if groups is None:
        return
    small = without_zeros(groups)
    assert optimum(small) == pytest.approx(optimum(groups), rel=1e-12)
    assert sorted(v for group in small.members for v in group) == list(
        range(sum(map(len, groups.members)))
    )


@settings(max_examples=150)
@given(SEEDS, st.floats(1.0, 1.5))
def test_joining_what_nothing_better_separates_keeps_the_optimum(seed: int, over: float) -> None:
    groups = problem_with_devices(seed)
    if groups is None or math.isinf(best := optimum(groups)):
        return
    assert optimum(together(groups, best * over)) == pytest.approx(best, rel=1e-12)


@settings(max_examples=150)
@given(SEEDS, st.floats(1.0, 1.5))
def test_ranges_hold_the_stages_of_all_placements_that_good(seed: int, over: float) -> None:
    groups = problem_with_devices(seed)
    if groups is None:
        return
    found = all_ideals(groups, 10_000)
    assert found is not None
    chain = best_chain(groups, found, Budget())
    assert chain is not None
    best = math.inf if chain.placement is None else objective(groups, chain.placement)
    if chain.placement is None or not 0 < best < math.inf:
        return
    stages = sum(min(kind.count, len(groups.sizes)) for kind in groups.classes)
    ranges = stage_ranges(groups, best * over, stages)
    assert ranges is not None
    used = len(chain.placement.kinds)
    for v, stage in enumerate(chain.placement.stage_of):
        # Empty stages may stand anywhere: the stage moves by up to those that are left over.
        low, high = ranges[v]
        assert low <= stage + stages - used
        assert high >= stage


@settings(max_examples=100)
@example(19688)  # all groups fill the accelerator but for rounding, and there is room elsewhere
@given(SEEDS)
def test_simple_bounds_are_bounds_and_memory_is_a_problem_of_its_own(seed: int) -> None:
    groups = problem_with_devices(seed)
    if groups is None:
        return
    best = optimum(groups)
    assert simple_bound(groups) <= best
    roomier = [replace(kind, memory=kind.memory * (1 + 1e-9)) for kind in groups.classes]
    fits = not math.isinf(optimum(replace(groups, classes=tuple(roomier))))
    memory, limit = memory_problem(groups)
    least = optimum(memory)
    if abs(least - limit) > 1e-9 * limit:  # sums of sizes that are no whole numbers are rounded
        assert (least <= limit) == fits


def chain_problem(costs: list[float], seconds: list[float], cpu: float) -> LoadProblem:
    n = len(seconds)
    return LoadProblem(
        tuple((s, cpu) for s in seconds),
        (0.0,) * n,
        tuple((i, i + 1) for i in range(n - 1)),
        tuple((i, i + 1) for i in range(n - 1)),
        tuple(costs),
        (DeviceClass("accelerator", 2), DeviceClass("cpu", 1, transfers=False)),
        tuple((i,) for i in range(n)),
    )


def test_a_free_group_joins_the_neighbour_it_is_dear_to_part_from() -> None:
    groups = chain_problem([2.0, 1.0], [1.0, 0.0, 1.0], 5.0)
    assert without_zeros(groups) == groups  # the CPU takes its time for all three
    free = tuple((0.0, 0.0) if v == 1 else row for v, row in enumerate(groups.seconds))
    small = without_zeros(replace(groups, seconds=free))
    assert small.members == ((0, 1), (2,))
    assert (small.pins, small.costs) == (((0, 1),), (1.0,))


def test_dear_values_are_not_cut_unless_a_cpu_can_stand_aside() -> None:
    dear = chain_problem([9.0, 1.0], [1.0, 1.0, 1.0], 50.0)
    assert together(dear, 5.0).members == ((0, 1), (2,))
    assert together(chain_problem([9.0, 1.0], [1.0, 1.0, 1.0], 1.0), 5.0).members == dear.members


def test_placements_of_merged_groups_are_lifted() -> None:
    dear = chain_problem([9.0, 1.0], [1.0, 1.0, 1.0], 50.0)
    small = together(dear, 5.0)
    found = all_ideals(small, 10)
    assert found is not None
    chain = best_chain(small, found, Budget())
    assert chain is not None
    assert chain.placement is not None
    assert lifted(small, dear, chain.placement).stage_of in ((0, 0, 1), (0, 0, 0))


def test_times_of_unlike_magnitude_are_bounded_without_a_warning() -> None:
    nodes = [
        {"id": 1, "fpgaLatency": 1e15, "cpuLatency": 0},
        {"id": 2, "fpgaLatency": 0.07, "cpuLatency": 10},
        {"id": 3, "fpgaLatency": 1e15, "cpuLatency": 0.1},
    ]
    data = {"maxFPGAs": 1, "maxCPUs": 1, "maxSizePerFPGA": 9, "nodes": nodes, "edges": []}
    groups = grouped(placement_model.parse(data, where="graph.json"))
    with np.errstate(all="raise"):
        assert simple_bound(groups) <= 0.1
