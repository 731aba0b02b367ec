"""Linear orders of the groups: each is a chain of cuts, in which `linear` finds the best ones.

No order is best everywhere; several together, with random ones, usually hold the optimum.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from pdcompile.passes.partition.orders import by_priority
from pdcompile.passes.published.placement.loads import neighbours
from pdcompile.passes.published.placement_file import LoadProblem


def orders(problem: LoadProblem, seed: int, rounds: int) -> Iterator[list[int]]:
    """Seven named orders, then `rounds` times four random ones."""
    n = len(problem.sizes)
    before, after = neighbours(problem)
    early, late = levels(before, after)
    ids = list(range(n))
    yield ids
    yield by_priority(before, after, early)
    yield by_priority(before, after, late)
    yield by_priority(before, after, [a + b for a, b in zip(early, late, strict=True)])
    yield depth_first(before, after, ids)
    yield depth_first(before, after, sorted(ids, key=lambda v: -early[v]))
    cut = _CheapestCut(problem, before, after)
    yield cut.order(random.Random(seed), 0.0)
    rng = random.Random(seed)
    for _ in range(rounds):
        yield cut.order(rng, 1.0)
        yield depth_first(before, after, rng.sample(ids, n))
        yield by_priority(before, after, [e + 3 * rng.random() for e in early])
        yield by_priority(before, after, [x + 3 * rng.random() for x in late])


def around(
    problem: LoadProblem, stage_of: Sequence[int], seed: int, count: int
) -> Iterator[list[int]]:
    """Random orders that pass through all cuts of a given pipeline."""
    before, after = neighbours(problem)
    early, late = levels(before, after)
    rng = random.Random(seed)
    far = 4.0 * (len(stage_of) + 1)
    for turn in range(count):
        base = (early, late)[turn % 2]
        noise = (1, 3, 10)[turn // 2 % 3]
        yield by_priority(
            before,
            after,
            [far * s + base[v] + noise * rng.random() for v, s in enumerate(stage_of)],
        )


def levels(before: list[list[int]], after: list[list[int]]) -> tuple[list[float], list[float]]:
    """How many groups lie on a longest path to each group, and n less those on one from it."""
    n = len(before)
    early, late = [0.0] * n, [0.0] * n
    for v in range(n):
        early[v] = 1 + max((early[u] for u in before[v]), default=0)
    for v in reversed(range(n)):
        late[v] = min((late[u] for u in after[v]), default=n) - 1
    return early, late


def depth_first(
    before: list[list[int]], after: list[list[int]], sequence: Sequence[int]
) -> list[int]:
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


class _CheapestCut:
    """Always the ready group that leaves the least cost of open values."""

    def __init__(
        self, problem: LoadProblem, before: list[list[int]], after: list[list[int]]
    ) -> None:
        self.problem, self.before, self.after = problem, before, after
        self.touching: list[list[int]] = [[] for _ in before]
        for e, pins in enumerate(problem.pins):
            for v in pins:
                self.touching[v].append(e)

    def order(self, rng: random.Random, noise: float) -> list[int]:
        """`noise` 1: the change of every ready group counts between half and one and a half."""
        pins, costs = self.problem.pins, self.problem.costs
        left = [len(p) for p in pins]
        waiting = [len(b) for b in self.before]
        ready = {v for v, count in enumerate(waiting) if not count}
        order: list[int] = []
        while ready:
            best, chosen = float("inf"), -1
            for v in sorted(ready):
                change = 0.0
                for e in self.touching[v]:
                    if left[e] == len(pins[e]):
                        change += costs[e]
                    elif left[e] == 1:
                        change -= costs[e]
                if noise:
                    change *= 1 + noise * (rng.random() - 0.5)
                if change < best:
                    best, chosen = change, v
            ready.remove(chosen)
            order.append(chosen)
            for e in self.touching[chosen]:
                left[e] -= 1
            for u in self.after[chosen]:
                waiting[u] -= 1
                if not waiting[u]:
                    ready.add(u)
        return order
