"""Down-closed sets and linear orders against their definitions, on random graphs."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.chain_program import membership, smallest_threshold
from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.lattice import Link, components, reduced


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
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_eager_groups_are_in_every_set_but_the_empty_one_that_may_hold_them(
    seed: int, eager: int
) -> None:
    n, arcs = drawn(seed)
    before, after = lattice.neighbours(n, arcs)
    links: list[Link] = []
    found = lattice.down_closed(before, after, 10**6, eager=eager, links=links)
    assert found is not None

    def may(mask: int, v: int) -> bool:
        return all(mask >> u & 1 for u in before[v])

    wanted = [
        mask
        for mask in closed(n, arcs)
        if not mask
        or all(mask >> v & 1 or not eager >> v & 1 or not may(mask, v) for v in range(n))
    ]
    assert sorted(found) == sorted(wanted)
    for here, v, there in links:
        assert not found[here] >> v & 1
        assert found[there] >> v & 1
        assert found[here] & ~found[there] == 0


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_orders_are_topological_and_their_prefixes_down_closed(seed: int) -> None:
    n, arcs = drawn(seed)
    before, after = lattice.neighbours(n, arcs)
    values = [((a, b), float(a + 1)) for a, b in arcs]
    orders = list(lattice.orders(before, after, values, seed, rounds=2))
    assert len(orders) == 13
    for order in orders:
        place = {v: i for i, v in enumerate(order)}
        assert len(place) == n
        assert all(place[a] < place[b] for a, b in arcs)
    assert set(lattice.prefixes(orders, 10**6)) <= set(closed(n, arcs))
    assert len(lattice.prefixes(orders, 1)) == n + 1  # those of the first order are always there


def test_the_cheapest_cut_closes_what_is_open_first() -> None:
    before, after = lattice.neighbours(4, [(0, 1), (0, 2), (2, 3)])
    cheapest = lattice.CheapestCut(before, after, [((0, 1), 1.0), ((0, 2), 1.0), ((2, 3), 9.0)])
    assert cheapest.order(random.Random(0), 0.0) == [0, 1, 2, 3]


@settings(max_examples=60)
@given(st.lists(st.floats(1, 100), min_size=1, max_size=9), st.floats(0, 1))
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
