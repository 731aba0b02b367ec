"""Linear orders of a graph, whose prefixes are some of its down-closed sets, and sets with groups
that join as soon as they can.

Groups are numbered; `before` and `after` list the direct predecessors and successors of each.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.lattice import Lists

Link = tuple[int, int, int]


def down_closed(
    before: Lists,
    after: Lists,
    limit: float,
    *,
    eager: int,
    links: list[Link],
) -> list[int] | None:
    """Down-closed sets that hold the groups of the mask `eager` as soon as they can, in the order
    found; None when there are more than `limit`.

    `links` receives (position of a set, added group, position of the set it leads to).
    """
    needs = [sum(1 << u for u in parents) for parents in before]
    start = sum(1 << v for v, parents in enumerate(before) if not parents)
    position = {0: 0}
    found, ready = [0], [start]
    for here, down_set in enumerate(found):  # grows while it is walked
        for v in lattice.members(ready[here]):
            pulled = ready[here] & eager & ~(1 << v)
            larger = down_set | 1 << v | pulled
            opened = ready[here] & ~larger
            there = None if eager else position.get(larger)
            if there is None:
                fresh = [v, *lattice.members(pulled)]
                while fresh:
                    for u in after[fresh.pop()]:
                        if not needs[u] & ~larger:
                            if eager >> u & 1:
                                larger |= 1 << u
                                fresh.append(u)
                            else:
                                opened |= 1 << u
                there = position.setdefault(larger, len(found))
            if there == len(found):
                if there >= limit:
                    return None
                found.append(larger)
                ready.append(opened)
            links.append((here, v, there))
    return found


def prefixes(
    orders: Iterable[Sequence[int]],
    limit: float,
    *,
    each: int | None = None,
) -> list[int]:
    """Prefixes of orders together, smaller ones first; an order that exceeds `limit` ends them.

    Those of the first order are always there.  Of each order about `each` are taken, evenly
    spaced, where there are more.
    """
    found: dict[int, None] = {}
    for order in orders:
        mask, fresh = 0, {0: None}
        step = max(1, -(-len(order) // each)) if each else 1
        for i, v in enumerate(order, start=1):
            mask |= 1 << v
            if i % step == 0 or i == len(order):
                fresh[mask] = None
        if found and len(found.keys() | fresh.keys()) > limit:
            break
        found |= fresh
    return lattice.smaller_first(found)


def orders(
    before: Lists,
    after: Lists,
    values: Iterable[tuple[Sequence[int], float]],
    seed: int,
    rounds: int,
) -> Iterator[list[int]]:
    """Topological orders: as numbered, early, late, depth first, cheapest cut, then random ones.

    Args:
        values: pins and cost of what a cut goes through, when it has some of the pins before it
            and some behind.
        rounds: times four random orders.
    """
    n = len(before)
    ids = lattice.by_priority(before, after, range(n))
    yield ids
    early, late = levels(before, after)
    yield lattice.by_priority(before, after, early)
    yield lattice.by_priority(before, after, late)
    yield depth_first(before, after, ids)
    cheapest = CheapestCut(before, after, values)
    yield cheapest.order(random.Random(seed), 0.0)
    rng = random.Random(seed)
    for _ in range(rounds):
        yield cheapest.order(rng, 0.5)
        yield lattice.by_priority(before, after, [e + 3 * rng.random() for e in early])
        yield lattice.by_priority(before, after, [x + 3 * rng.random() for x in late])
        yield depth_first(before, after, rng.sample(ids, n))


def levels(before: Lists, after: Lists) -> tuple[list[float], list[float]]:
    """Numbers of groups that lie on a longest path to each, and n less those on one from it."""
    n = len(before)
    early, late = [0.0] * n, [0.0] * n
    order = lattice.by_priority(before, after, range(n))
    for v in order:
        early[v] = 1 + max((early[u] for u in before[v]), default=0)
    for v in reversed(order):
        late[v] = min((late[u] for u in after[v]), default=n) - 1
    return early, late


def depth_first(before: Lists, after: Lists, sequence: Sequence[int]) -> list[int]:
    """Postorder of a search against the arcs: what a group needs comes just before it.

    Sinks, and the predecessors of a group, are visited in the order that `sequence` has them.
    """
    rank = [0] * len(before)
    for i, v in enumerate(sequence):
        rank[v] = i
    done = [False] * len(before)
    order: list[int] = []
    for root in sorted((v for v in sequence if not after[v]), key=rank.__getitem__):
        stack = [(root, iter(sorted(before[root], key=rank.__getitem__)))]
        while stack:
            v, parents = stack[-1]
            u = next((p for p in parents if not done[p]), None)
            if u is not None:
                stack.append((u, iter(sorted(before[u], key=rank.__getitem__))))
                continue
            stack.pop()
            if not done[v]:
                done[v] = True
                order.append(v)
    return order


class CheapestCut:
    """Orders that always take the ready group which adds least to the cost of the cut."""

    def __init__(
        self, before: Lists, after: Lists, values: Iterable[tuple[Sequence[int], float]]
    ) -> None:
        self.before, self.after = before, after
        self.values = [(set(pins), cost) for pins, cost in values]
        self.touching: Lists = [[] for _ in before]
        for e, (pins, _) in enumerate(self.values):
            for v in pins:
                self.touching[v].append(e)

    def order(self, rng: random.Random, noise: float) -> list[int]:
        """`noise` 1: the change of every ready group counts between half and one and a half."""
        left = [pins.copy() for pins, _ in self.values]
        change = [sum(self.values[e][1] for e in touched) for touched in self.touching]
        waiting = [len(parents) for parents in self.before]
        ready = {v for v, count in enumerate(waiting) if not count}
        order: list[int] = []
        while ready:
            v = min(ready, key=lambda u: (change[u] * (1 + noise * (rng.random() - 0.5)), u))
            ready.remove(v)
            order.append(v)
            for e in self.touching[v]:
                first = len(left[e]) == len(self.values[e][0])
                left[e].remove(v)
                for u in left[e] if first or len(left[e]) == 1 else ():
                    change[u] = sum(self._change(f, left[f]) for f in self.touching[u])
            for u in self.after[v]:
                waiting[u] -= 1
                if not waiting[u]:
                    ready.add(u)
        return order

    def _change(self, value: int, left: set[int]) -> float:
        pins, cost = self.values[value]
        return (len(left) == len(pins)) * cost - (len(left) == 1) * cost
