"""Every assignment that a bound leaves: a proof by looking, for what is small."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pdcompile.passes.partition.dynamic_program import Cost
from pdcompile.passes.partition.segments import Segments


def chains(segments: Segments, cost: Cost, below: Callable[[], float]) -> Iterator[tuple[int, ...]]:
    """Stages of each group, for all chains of ideals whose largest stage cost is < below().

    `below` is asked again before every step, so that the best found so far prunes the rest.
    """
    num_stages = segments.model.num_stages
    costs = [np.where(segments.allowed(s), cost(s), np.inf) for s in range(num_stages)]
    size = len(segments.ideals)
    to_go = np.full(size, np.inf)
    to_go[-1] = 0.0
    through: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = []
    for seconds in reversed(costs):
        through.insert(0, np.maximum(seconds, to_go[None, :]))
        to_go = through[0].min(1)
    stack: list[tuple[int, ...]] = [(0,)]
    while stack:
        chain = stack.pop()
        s = len(chain) - 1
        if s == num_stages:
            yield _stages(segments, chain)
            continue
        row = through[s][chain[-1]]
        order = np.argsort(-row, kind="stable")  # the cheapest is popped first
        used = len(set(chain)) - 1
        stack += [
            (*chain, int(j))
            for j in order
            if row[j] < below() and used + (j != chain[-1]) <= segments.model.most_used
        ]


def _stages(segments: Segments, chain: tuple[int, ...]) -> tuple[int, ...]:
    inside = segments.inside[list(chain)]
    first: np.ndarray[tuple[int, ...], np.dtype[np.intp]] = inside.argmax(0)
    return tuple(int(s) - 1 for s in first)
