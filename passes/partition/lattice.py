"""Down-closed sets of a graph as bit masks, and linear orders whose prefixes are some of them.

A pipeline of convex stages is a chain of down-closed sets.  A graph that is nearly a chain has few
of them; of others, the prefixes of several linear orders are a choice.  Groups are numbered;
`before` and `after` list the direct predecessors and successors of each.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

Lists = list[list[int]]
Link = tuple[int, int, int]


def neighbours(size: int, arcs: Iterable[tuple[int, int]]) -> tuple[Lists, Lists]:
    """(before, after): direct predecessors and direct successors of every group."""
    before: Lists = [[] for _ in range(size)]
    after: Lists = [[] for _ in range(size)]
    for a, b in arcs:
        before[b].append(a)
        after[a].append(b)
    return before, after


def down_closed(
    before: Lists,
    after: Lists,
    limit: float,
    *,
    late: Callable[[], bool] = lambda: False,
    eager: int = 0,
    links: list[Link] | None = None,
) -> list[int] | None:
    """Every down-closed set; None when there are more than `limit`, or `late` ends the listing.

    Smaller ones come first.  With `eager`, a mask of groups that join as soon as they can, only
    sets that hold them where they can, in the order found; `links` then receives (position of a
    set, added group, position of the set it leads to).
    """
    needs = [sum(1 << u for u in parents) for parents in before]
    start = sum(1 << v for v, parents in enumerate(before) if not parents)
    position = {0: 0}
    found, ready = [0], [start]
    for here, down_set in enumerate(found):  # grows while it is walked
        if not here & 255 and late():
            return None
        for v in members(ready[here]):
            pulled = ready[here] & eager & ~(1 << v)
            larger = down_set | 1 << v | pulled
            opened = ready[here] & ~larger
            there = None if eager else position.get(larger)
            if there is None:
                fresh = [v, *members(pulled)]
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
            if links is not None:
                links.append((here, v, there))
    return found if eager or links is not None else smaller_first(found)


def smaller_first(masks: Iterable[int]) -> list[int]:
    return sorted(masks, key=lambda mask: (mask.bit_count(), mask))


def members(mask: int) -> list[int]:
    """The numbers of the set bits, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def reachable(following: Lists, *, from_end: bool) -> list[int]:
    """A mask of all that each group reaches, without itself; `from_end`: along `after`."""
    reach = [0] * len(following)
    for v in reversed(range(len(reach))) if from_end else range(len(reach)):
        for u in following[v]:
            reach[v] |= reach[u] | 1 << u
    return reach


def accumulated(following: Lists, amounts: Sequence[float], *, from_end: bool) -> list[float]:
    """The summed amount of each group and of all that it reaches; as `reachable`."""
    reach = reachable(following, from_end=from_end)
    found = [0.0] * len(reach)
    for v in reversed(range(len(reach))) if from_end else range(len(reach)):
        near = following[v]
        if len(near) == 1 and reach[v].bit_count() == reach[near[0]].bit_count() + 1:
            found[v] = found[near[0]] + amounts[v]
        else:
            found[v] = math.fsum(amounts[u] for u in members(reach[v] | 1 << v))
    return found


def prefixes(
    orders: Iterable[Sequence[int]],
    limit: float,
    *,
    each: int | None = None,
    late: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Prefixes of orders together, smaller ones first; an order that exceeds `limit` ends them.

    Those of the first order are always there.  Of each order about `each` are taken, evenly
    spaced, where there are more.
    """
    found: dict[int, None] = {}
    for order in orders:
        if found and late():
            break
        mask, fresh = 0, {0: None}
        step = max(1, -(-len(order) // each)) if each else 1
        for i, v in enumerate(order, start=1):
            mask |= 1 << v
            if i % step == 0 or i == len(order):
                fresh[mask] = None
        if found and len(found.keys() | fresh.keys()) > limit:
            break
        found |= fresh
    return smaller_first(found)


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
    ids = by_priority(before, after, range(n))
    yield ids
    early, late = levels(before, after)
    yield by_priority(before, after, early)
    yield by_priority(before, after, late)
    yield depth_first(before, after, ids)
    cheapest = CheapestCut(before, after, values)
    yield cheapest.order(random.Random(seed), 0.0)
    rng = random.Random(seed)
    for _ in range(rounds):
        yield cheapest.order(rng, 0.5)
        yield by_priority(before, after, [e + 3 * rng.random() for e in early])
        yield by_priority(before, after, [x + 3 * rng.random() for x in late])
        yield depth_first(before, after, rng.sample(ids, n))


def by_priority(before: Lists, after: Lists, priority: Sequence[float]) -> list[int]:
    """Always the ready group of the smallest priority; ties go to the smaller number."""
    waiting = [len(parents) for parents in before]
    heap = [(priority[v], v) for v, count in enumerate(waiting) if not count]
    heapq.heapify(heap)
    order = []
    while heap:
        _, v = heapq.heappop(heap)
        order.append(v)
        for u in after[v]:
            waiting[u] -= 1
            if not waiting[u]:
                heapq.heappush(heap, (priority[u], u))
    return order


def contracted(after: Sequence[Iterable[int]]) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Strongly connected vertices as one part: (part of every vertex, arcs between parts, reduced).

    Parts are numbered in topological order, the one of the first vertex first where it can be.
    """
    part_of = components([sorted(following) for following in after])
    first: dict[int, int] = {}
    for v, part in enumerate(part_of):
        first.setdefault(part, v)
    arcs = {(part_of[a], part_of[b]) for a, following in enumerate(after) for b in following}
    arcs = {(a, b) for a, b in arcs if a != b}
    order = by_priority(*neighbours(len(first), arcs), [first[part] for part in range(len(first))])
    place = {part: position for position, part in enumerate(order)}
    placed = sorted((place[a], place[b]) for a, b in arcs)
    return [place[part] for part in part_of], reduced(len(order), placed)


def components(after: Sequence[Sequence[int]]) -> list[int]:
    """The strongly connected component of every vertex (Tarjan 1972, without recursion).

    Of our own, like `reduced`: networkx reduces 10,000 vertices in 21 s, and takes as long to
    import as a third of planning a published graph.
    """
    n = len(after)
    part, low, found = [-1] * n, [0] * n, [-1] * n
    stack: list[int] = []
    clock = parts = 0
    for root in range(n):
        if found[root] >= 0:
            continue
        walk = [(root, 0)]
        while walk:
            v, i = walk.pop()
            if found[v] < 0:
                found[v] = low[v] = clock
                clock += 1
                stack.append(v)
            descended = False
            for j in range(i, len(after[v])):
                u = after[v][j]
                if found[u] < 0:
                    walk += [(v, j), (u, 0)]  # look at u once more when it is finished
                    descended = True
                    break
                if part[u] < 0:
                    low[v] = min(low[v], low[u])
            if descended:
                continue
            if low[v] == found[v]:
                while True:
                    u = stack.pop()
                    part[u] = parts
                    if u == v:
                        break
                parts += 1
    return part


def reduced(n: int, arcs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The arcs that no longer path implies (transitive reduction; vertices in topological order).

    Stages that do not fall along the remaining arcs do not fall along a path of them, so the
    same assignments are left.  One bit mask of descendants a vertex, forgotten once its last
    predecessor has been looked at.
    """
    after: list[list[int]] = [[] for _ in range(n)]
    users = [0] * n
    for a, b in arcs:
        after[a].append(b)
        users[b] += 1
    below: dict[int, int] = {}
    kept = []
    for v in reversed(range(n)):
        reach = 0
        for u in sorted(after[v]):
            # Bits count from the end, so that late vertices, which have few descendants, have
            # small numbers.
            bit = 1 << (n - 1 - u)
            if not reach & bit:
                kept.append((v, u))
                reach |= bit | below[u]
            users[u] -= 1
            if not users[u]:
                del below[u]
        if users[v]:
            below[v] = reach
    return tuple(sorted(kept))


def levels(before: Lists, after: Lists) -> tuple[list[float], list[float]]:
    """Numbers of groups that lie on a longest path to each, and n less those on one from it."""
    n = len(before)
    early, late = [0.0] * n, [0.0] * n
    order = by_priority(before, after, range(n))
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
