"""Ideals: the sets of groups that a prefix of stages can hold, closed under predecessors.

A monotone assignment to N stages is a chain of N − 1 ideals.  A graph that is nearly a chain
has few; otherwise the prefixes of some linear orders are a choice of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.orders import by_priority


def all_ideals(model: Model, limit: int, budget: Budget | None = None) -> list[int] | None:
    """Every ideal as a bit mask, smaller ones first; None when there are more than `limit`.

    Also None when the budget ends first.
    """
    before, after = _neighbours(model)
    needs = [sum(1 << u for u in parents) for parents in before]
    ready_of = {0: [v for v, parents in enumerate(before) if not parents]}
    found = [0]
    layer = [0]
    while layer:
        if budget is not None and budget.late:
            return None
        following: dict[int, list[int]] = {}
        for ideal in layer:
            ready = ready_of.pop(ideal)
            for v in ready:
                larger = ideal | 1 << v
                if larger not in following:
                    opened = [u for u in after[v] if needs[u] & ~larger == 0]
                    following[larger] = [u for u in ready if u != v] + opened
            if len(found) + len(following) > limit:
                return None
        ready_of = following
        layer = sorted(following)
        found += layer
    return found


def prefixes(model: Model, limit: int, seed: int, budget: Budget | None = None) -> list[int]:
    """Prefixes of several linear orders together, at most `limit`, the full set among them.

    Those of the given order are always there; a budget that ends keeps others out.
    """
    found: dict[int, None] = {}
    for order in orders(model, seed):
        if found and budget is not None and budget.late:
            break
        mask = 0
        fresh = {0: None}
        for v in order:
            mask |= 1 << v
            fresh[mask] = None
        if found and len(found.keys() | fresh.keys()) > limit:
            break
        found |= fresh
    return sorted(found, key=lambda mask: (mask.bit_count(), mask))


def orders(model: Model, seed: int) -> Iterator[list[int]]:
    """Topological orders: as given, early, late, depth first, cheapest cut, then random ones."""
    n = model.num_groups
    yield list(range(n))
    before, after = _neighbours(model)
    early, late = [0] * n, [0] * n
    for v in range(n):
        early[v] = 1 + max((early[u] for u in before[v]), default=0)
    for v in reversed(range(n)):
        late[v] = min((late[u] for u in after[v]), default=n) - 1
    yield by_priority(before, after, [float(e) for e in early])
    yield by_priority(before, after, [float(x) for x in late])
    yield _depth_first(before, after, list(range(n)))
    yield _cheapest_cut(model, before, after, random.Random(seed), 0.0)
    rng = random.Random(seed)
    for _ in range(6):
        yield _cheapest_cut(model, before, after, rng, 0.5)
        yield by_priority(before, after, [e + 3 * rng.random() for e in early])
        yield by_priority(before, after, [x + 3 * rng.random() for x in late])
        yield _depth_first(before, after, rng.sample(range(n), n))


def _neighbours(model: Model) -> tuple[list[list[int]], list[list[int]]]:
    before: list[list[int]] = [[] for _ in range(model.num_groups)]
    after: list[list[int]] = [[] for _ in range(model.num_groups)]
    for a, b in model.arcs:
        before[b].append(a)
        after[a].append(b)
    return before, after


def _depth_first(before: list[list[int]], after: list[list[int]], rank: list[int]) -> list[int]:
    """Reverse postorder of a search against the arcs: a group's inputs come just before it."""
    done: set[int] = set()
    order: list[int] = []
    roots = [v for v, children in enumerate(after) if not children]
    for root in sorted(roots, key=rank.__getitem__):
        stack = [(root, iter(sorted(before[root], key=rank.__getitem__)))]
        while stack:
            v, parents = stack[-1]
            u = next((p for p in parents if p not in done), None)
            if u is not None:
                stack.append((u, iter(sorted(before[u], key=rank.__getitem__))))
                continue
            stack.pop()
            if v not in done:
                done.add(v)
                order.append(v)
    return order


def _cheapest_cut(
    model: Model, before: list[list[int]], after: list[list[int]], rng: random.Random, noise: float
) -> list[int]:
    """Always the ready group that adds the least open bytes."""
    n = model.num_groups
    opens, closes = [0.0] * n, [0.0] * n
    waiting = {i: len(flow.sinks) for i, flow in enumerate(model.flows)}
    touching: list[list[int]] = [[] for _ in range(n)]
    for i, flow in enumerate(model.flows):
        size = flow.forward_bytes + flow.backward_bytes
        if flow.tied:
            continue
        opens[flow.sources[0]] += size
        for v in flow.sinks:
            touching[v].append(i)
        if len(flow.sinks) == 1:
            closes[flow.sinks[0]] += size
    missing = [len(b) for b in before]
    ready = {v for v, count in enumerate(missing) if not count}
    order: dict[int, None] = {}
    while ready:
        v = min(
            ready,
            key=lambda u: ((opens[u] - closes[u]) * (1 + noise * (rng.random() - 0.5)), u),
        )
        ready.remove(v)
        order[v] = None
        for i in touching[v]:
            waiting[i] -= 1
            if waiting[i] == 1 and (left := [u for u in model.flows[i].sinks if u not in order]):
                closes[left[0]] += model.flows[i].forward_bytes + model.flows[i].backward_bytes
        for u in after[v]:
            missing[u] -= 1
            if not missing[u]:
                ready.add(u)
    return list(order)
