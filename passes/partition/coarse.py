"""Fewer groups for very large problems: only where cutting is cheap may a cut be.

Not exact: good for a first plan, never for a bound.
"""

from __future__ import annotations

from itertools import pairwise

from pdcompile.passes.partition.model import Model, build


def contracted(model: Model, limit: int, coarse: int) -> Model:
    """The model itself when it has at most `limit` groups, else one with about `coarse`.

    In the given order the cheapest position of every block of equal length, and the cheapest of
    all, stay as places for a cut; what lies between becomes one group.
    """
    n = model.num_groups
    if n <= limit:
        return model
    limit = min(limit, coarse)
    crossing = _crossing(model)
    blocks = limit // 2
    edges = [n * i // blocks for i in range(blocks + 1)]
    kept = {
        min(range(max(a, 1), b), key=lambda i: (crossing[i], i))
        for a, b in pairwise(edges)
        if b > max(a, 1)
    }
    for position in sorted(range(1, n), key=lambda i: (crossing[i], i)):
        if len(kept) >= limit - 1:
            break
        kept.add(position)
    pinned = {v for v in range(n) if model.lowest[v] == model.highest[v]}
    kept |= {p for v in pinned for p in (v, v + 1) if 0 < p < n and len(pinned) < limit // 4}
    cuts = [0, *sorted(kept), n]
    fused = [[item for group in model.members[a:b] for item in group] for a, b in pairwise(cuts)]
    return build(model.problem, fused)


def _crossing(model: Model) -> list[float]:
    """Bytes that cross each position of the given order."""
    steps = [0.0] * (model.num_groups + 1)
    for flow in model.flows:
        if not flow.tied:
            size = flow.forward_bytes + flow.backward_bytes
            steps[flow.sources[0] + 1] += size
            steps[max(flow.sinks) + 1] -= size
    total, result = 0.0, []
    for step in steps:
        total += step
        result.append(total)
    return result
