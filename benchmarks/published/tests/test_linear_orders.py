"""Linear orders, and sets that hold what may join, against their definitions on random graphs."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published import linear_orders
from benchmarks.published.linear_orders import Link
from pdcompile.passes.partition import lattice
from tests.test_lattice import closed, drawn


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_eager_groups_are_in_every_set_but_the_empty_one_that_may_hold_them(
    seed: int, eager: int
) -> None:
    n, arcs = drawn(seed)
    before, after = lattice.neighbours(n, arcs)
    links: list[Link] = []
    found = linear_orders.down_closed(before, after, 10**6, eager=eager, links=links)
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
    orders = list(linear_orders.orders(before, after, values, seed, rounds=2))
    assert len(orders) == 13
    for order in orders:
        place = {v: i for i, v in enumerate(order)}
        assert len(place) == n
        assert all(place[a] < place[b] for a, b in arcs)
    assert set(linear_orders.prefixes(orders, 10**6)) <= set(closed(n, arcs))
    assert len(linear_orders.prefixes(orders, 1)) == n + 1  # those of the first are always there


def test_the_cheapest_cut_closes_what_is_open_first() -> None:
    before, after = lattice.neighbours(4, [(0, 1), (0, 2), (2, 3)])
    cheapest = linear_orders.CheapestCut(
        before, after, [((0, 1), 1.0), ((0, 2), 1.0), ((2, 3), 9.0)]
    )
    assert cheapest.order(random.Random(0), 0.0) == [0, 1, 2, 3]
