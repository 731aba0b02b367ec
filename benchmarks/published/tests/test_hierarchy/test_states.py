"""Dominance loses no optimum, and the relaxation is below every plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.pipedream.bucket_bounds import (
    bounded_segments,
    least_boundaries,
    ranges,
)
from benchmarks.published.pipedream.level_tables import levels_of
from benchmarks.published.pipedream.nested_stages import search
from benchmarks.published.pipedream.profile_cuts import (
    arrange,
    dag_of,
    lattice_of,
    membership,
    segments_of,
    undominated,
)
from benchmarks.published.pipedream_model import HierarchyProblem
from benchmarks.published.tests.helpers.hierarchies import down_sets, random_graph, recursion
from pdcompile.passes.partition.budget import Budget

LEVELS = [((4, 3.0),), ((3, 9.0), (2, 1.0))]


@settings(max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 8), st.booleans())
def test_dominance_keeps_the_optimum(seed: int, size: int, memory: bool) -> None:
    graph = random_graph(seed, size, zeros=0.6)
    problem = HierarchyProblem(graph, LEVELS[seed % 2])
    dag = dag_of(graph)
    lattice = lattice_of(dag, 10_000, memory=memory)
    assert lattice is not None
    kept = arrange(dag, undominated(dag, lattice, memory=memory))
    every = down_sets(graph)
    assert len(kept) <= len(every)
    found = search(levels_of(problem), segments_of(dag, kept), Budget(None))
    assert found.seconds == pytest.approx(recursion(problem, every), rel=1e-9)


def test_dominance_removes_what_costs_nothing() -> None:
    graph = random_graph(0, 9, zeros=1.0)
    dag = dag_of(graph)
    lattice = lattice_of(dag, 10_000, memory=True)
    assert lattice is not None
    assert undominated(dag, lattice, memory=True) == [0, dag.everything]


def test_too_many_sets_are_none() -> None:
    graph = random_graph(5, 9, zeros=0.0)
    assert lattice_of(dag_of(graph), len(down_sets(graph)), memory=False) is not None
    assert lattice_of(dag_of(graph), len(down_sets(graph)) - 1, memory=False) is None


@settings(max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(2, 30))
def test_the_relaxation_is_below_every_plan(seed: int, size: int, buckets: int) -> None:
    graph = random_graph(seed, size)
    problem = HierarchyProblem(graph, LEVELS[seed % 2])
    segments = bounded_segments(dag_of(graph), buckets)
    bound = search(levels_of(problem), segments, Budget(None)).bound
    assert bound <= recursion(problem, down_sets(graph)) * (1 + 1e-9)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 8), st.data())
def test_closures_bound_every_set(seed: int, size: int, data: st.DataObject) -> None:
    graph = random_graph(seed, size)
    dag = dag_of(graph)
    lattice = lattice_of(dag, 10_000, memory=True)
    assert lattice is not None
    sets = data.draw(st.lists(st.sampled_from(lattice.sets[1:]), min_size=1, max_size=6))
    held = membership(dag, sets)
    end = np.zeros((1, dag.size), bool)
    inside = np.concatenate([end, held.all(axis=0)[None], ~end])
    outside = np.concatenate([~end, ~held.any(axis=0)[None], end])
    work = held @ dag.seconds
    total = dag.seconds.sum()
    low, high = np.array([0, work.min(), total]), np.array([0, work.max(), total])
    least = least_boundaries(dag, inside, outside)[1]
    fewest, most = ranges(dag, dag.parameters, inside, outside, low, high)
    for down_set, amount in zip(sets, held @ dag.parameters, strict=True):
        if down_set != dag.everything:
            assert least <= dag.boundary(down_set) + 1e-9
        assert fewest[1] - 1e-9 <= amount <= most[1] + 1e-9


def test_a_chain_is_bounded_tightly() -> None:
    """Indivisible layers are seen: every bucket of a chain is one of its cuts."""
    graph = random_graph(1, 6, zeros=0.0)
    chain = type(graph)(graph.nodes, tuple((v, v + 1) for v in range(5)))
    problem = HierarchyProblem(chain, ((3, 5.0),))
    bound = search(levels_of(problem), bounded_segments(dag_of(chain), 50), Budget(None)).bound
    assert bound == pytest.approx(recursion(problem, down_sets(chain)), rel=1e-6)
