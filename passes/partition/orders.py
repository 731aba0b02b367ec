"""Topological orders: shared by all searches that cut along one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def by_priority(
    before: list[list[int]], after: list[list[int]], priority: Sequence[float]
) -> list[int]:
    """Always the ready node of the smallest priority; ties go to the smaller index."""
    waiting = [len(sources) for sources in before]
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
