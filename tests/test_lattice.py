"""Down-closed sets against their definition, on random graphs."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.chain_program import membership, smallest_threshold
from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.lattice import components, reduced


def drawn(seed: int) -> tuple[int, list[tuple[int, int]]]:
    r = random.Random(seed)
    n = r.randint(1, 8)
    return n, [(a, b) for b in range(n) for a in range(b) if r.random() < 0.35]


def closed(n: int, arcs: list[tuple[int, int]]) -> list[int]:
    return [m for m in range(1 << n) if all(m >> a & 1 or not m >> b & 1 for a, b in arcs)]


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_every_down_closed_set_is_listed_once_smaller_ones_first(seed: int) -> None:
    n, arcs = drawn(seed)
    before, after = lattice.neighbours(n, arcs)
    every = closed(n, arcs)
    assert lattice.down_closed(before, after, len(every)) == lattice.smaller_first(every)
    assert lattice.down_closed(before, after, len(every) - 1) is None
    assert lattice.down_closed(before, after, 10**6, late=lambda: True) is None
    rows = membership(every, n)
    assert [lattice.members(mask) for mask in every] == [row.nonzero()[0].tolist() for row in rows]


@settings(max_examples=60)
@given(
    st.lists(st.integers(10, 1000).map(lambda n: n / 10), min_size=1, max_size=9), st.floats(0, 1)
)
def test_bisection_ends_at_the_least_threshold(plans: list[float], lower: float) -> None:
    bound, objective, plan = smallest_threshold(
        lambda limit: max(((p, p) for p in plans if p <= limit), default=None),
        lower,
        1000.0,
        exact=1e-9,
    )
    assert plan == min(plans) == objective
    assert objective * (1 - 2e-9) <= bound <= objective


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(40))
def test_components_and_reduction_agree_with_networkx(seed: int) -> None:
    r = random.Random(seed)
    n = r.randint(1, 14)
    pairs = [p for p in itertools.permutations(range(n), 2) if r.random() < 0.15]
    graph = nx.DiGraph(pairs)
    graph.add_nodes_from(range(n))
    part = components([sorted(graph.successors(v)) for v in range(n)])
    expected = {frozenset(c) for c in nx.strongly_connected_components(graph)}
    assert {frozenset(v for v in range(n) if part[v] == p) for p in set(part)} == expected
    forward = [(a, b) for a, b in itertools.combinations(range(n), 2) if r.random() < 0.4]
    dag = nx.DiGraph(forward)
    dag.add_nodes_from(range(n))
    assert reduced(n, forward) == tuple(sorted(nx.transitive_reduction(dag).edges))
