"""States of the chain: ideals (down-closed sets of nodes) as bit masks, smaller ones first."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from pdcompile.passes.partition.orders import by_priority
from pdcompile.passes.published.piper_file import MenuProblem


def all_ideals(problem: MenuProblem, limit: int) -> list[int] | None:
    """Every ideal, or None when there are more than `limit`."""
    before, after = neighbours(problem)
    needs = [sum(1 << u for u in parents) for parents in before]
    found = [0]
    layer = {0: [v for v, parents in enumerate(before) if not parents]}
    while layer:
        following: dict[int, list[int]] = {}
        for ideal, ready in layer.items():
            for v in ready:
                larger = ideal | 1 << v
                if larger not in following:
                    opened = [u for u in after[v] if needs[u] & ~larger == 0]
                    following[larger] = [u for u in ready if u != v] + opened
            if len(found) + len(following) > limit:
                return None
        layer = dict(sorted(following.items()))
        found += layer
    return found


def orders(problem: MenuProblem, seed: int) -> list[list[int]]:
    """Topological orders: as in the file, early, late, depth first, cheapest cut, random cuts."""
    before, after = neighbours(problem)
    n = len(before)
    given = by_priority(before, after, range(n))
    early, late = [0] * n, [0] * n
    for v in given:
        early[v] = 1 + max((early[u] for u in before[v]), default=0)
    for v in reversed(given):
        late[v] = min((late[u] for u in after[v]), default=n) - 1
    rng = random.Random(seed)
    found = [given, by_priority(before, after, early), by_priority(before, after, late)]
    found.append(_depth_first(before, after))
    found += [_cheapest_cut(problem, before, after, rng, noise) for noise in (0.0, 0.5, 0.5)]
    return found


def prefixes(orders: Iterable[Sequence[int]], most: int) -> list[int]:
    """Prefixes of each order, all of them where they are few, else evenly spaced ones."""
    found: set[int] = set()
    for order in orders:
        step = max(1, -(-len(order) // most))
        mask = 0
        for i, v in enumerate(order):
            if i % step == 0:
                found.add(mask)
            mask |= 1 << v
        found.add(mask)
    return sort(found)


def around(problem: MenuProblem, cuts: Iterable[int], order: Sequence[int], most: int) -> list[int]:
    """Ideals near given ones: with the next nodes of `order`, or without the last ones."""
    before, after = neighbours(problem)
    needs = [sum(1 << u for u in parents) for parents in before]
    gives = [sum(1 << u for u in children) for children in after]
    found: set[int] = set()
    for cut in cuts:
        found.add(cut)
        larger = smaller = cut
        for _ in range(most):
            for v in order:
                if not larger >> v & 1 and needs[v] & ~larger == 0:
                    larger |= 1 << v
                    break
            for v in reversed(order):
                if smaller >> v & 1 and gives[v] & smaller == 0:
                    smaller &= ~(1 << v)
                    break
            found |= {larger, smaller}
    return sort(found)


def sort(masks: Iterable[int]) -> list[int]:
    return sorted(masks, key=lambda mask: (mask.bit_count(), mask))


def members(mask: int) -> list[int]:
    """Positions of the set bits, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def neighbours(problem: MenuProblem) -> tuple[list[list[int]], list[list[int]]]:
    """(sources, targets) of every node."""
    before: list[list[int]] = [[] for _ in problem.nodes]
    after: list[list[int]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        before[edge.target].append(edge.source)
        after[edge.source].append(edge.target)
    return before, after


def _depth_first(before: list[list[int]], after: list[list[int]]) -> list[int]:
    """A node's inputs come just before it."""
    done: set[int] = set()
    order: list[int] = []
    for root in (v for v, children in enumerate(after) if not children):
        stack = [(root, iter(before[root]))]
        while stack:
            v, parents = stack[-1]
            u = next((p for p in parents if p not in done), None)
            if u is not None:
                stack.append((u, iter(before[u])))
                continue
            stack.pop()
            if v not in done:
                done.add(v)
                order.append(v)
    return order


def _cheapest_cut(
    problem: MenuProblem,
    before: list[list[int]],
    after: list[list[int]],
    rng: random.Random,
    noise: float,
) -> list[int]:
    """Always the ready node that adds least to the bytes across the cut."""
    gain = [0.0] * len(before)
    for edge in problem.edges:
        gain[edge.source] += edge.bytes
        gain[edge.target] -= edge.bytes
    return by_priority(before, after, [g * (1 + noise * (rng.random() - 0.5)) for g in gain])
