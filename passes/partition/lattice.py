"""Down-closed sets of a graph as bit masks: a pipeline of convex stages is a chain of them.

A graph that is nearly a chain has few.  Groups are numbered; `before` and `after` list the direct
predecessors and successors of each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

Lists = list[list[int]]


def neighbours(size: int, arcs: Iterable[tuple[int, int]]) -> tuple[Lists, Lists]:
    """(before, after): direct predecessors and direct successors of every group."""
    before: Lists = [[] for _ in range(size)]
    after: Lists = [[] for _ in range(size)]
    for a, b in arcs:
        before[b].append(a)
        after[a].append(b)
    return before, after


def down_closed(
    before: Lists, after: Lists, limit: float, *, late: Callable[[], bool] = lambda: False
) -> list[int] | None:
    """Every down-closed set, smaller ones first; None when there are more than `limit`, or `late`
    ends the listing."""
    needs = [sum(1 << u for u in parents) for parents in before]
    start = sum(1 << v for v, parents in enumerate(before) if not parents)
    found, ready = [0], {0: start}
    for here, down_set in enumerate(found):  # grows while it is walked
        if not here & 255 and late():
            return None
        for v in members(ready[down_set]):
            larger = down_set | 1 << v
            if larger in ready:
                continue
            if len(found) >= limit:
                return None
            opened = sum(1 << u for u in after[v] if not needs[u] & ~larger)
            ready[larger] = ready[down_set] & ~(1 << v) | opened
            found.append(larger)
    return smaller_first(found)


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
    """The strongly connected component of every vertex: of those not yet in one, what the last to
    be finished in a walk along arcs reaches along them backwards (Kosaraju).

    Of our own, like `reduced`: networkx reduces 10,000 vertices in 21 s, and takes as long to
    import as a third of planning a published graph.
    """
    before: Lists = [[] for _ in after]
    for a, following in enumerate(after):
        for b in following:
            before[b].append(a)
    walk: list[tuple[int, Iterator[int]]]
    part, finished, seen = [-1] * len(after), list[int](), [False] * len(after)
    for root in range(len(after)):
        walk = [] if seen[root] else [(root, iter(after[root]))]
        seen[root] = True
        while walk:
            v, left = walk[-1]
            u = next((u for u in left if not seen[u]), None)
            if u is not None:
                seen[u] = True
                walk.append((u, iter(after[u])))
            else:
                finished.append(v)
                walk.pop()
    parts = 0
    for root in reversed(finished):
        waiting = [root] * (part[root] < 0)
        parts += len(waiting)
        while waiting:
            v = waiting.pop()
            part[v] = parts - 1
            waiting += [u for u in before[v] if part[u] < 0]
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
