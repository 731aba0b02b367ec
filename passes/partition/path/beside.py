"""A path through the groups of a model, and what lies beside it.

Real models are almost chains: masks, rotary angles, branches of attention and labels sit beside one
long path of groups whose values carry gradients.  Where the path is cut, a group beside it surely
is on the stage whose interval holds the last of the path before it and the first of the path
behind it; where a boundary lies between these two it is on one of the stages around the boundary,
or on a stage without the path that lies there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.model import Flow, Model

Array = NDArray[np.float64]

MOST = 240  # groups of the path that are told apart; between them cuts are looked at as one


def heaviest_path(model: Model) -> tuple[int, ...]:
    """Groups in a row, each reading a value with a gradient of the one before; the most work."""
    after: list[list[int]] = [[] for _ in range(model.num_groups)]
    for flow in with_gradients(model):
        after[flow.sources[0]] += flow.sinks
    heaviest, following = [0.0] * model.num_groups, [-1] * model.num_groups
    for v in reversed(range(model.num_groups)):
        work, following[v] = max(((heaviest[u], u) for u in after[v]), default=(0.0, -1))
        heaviest[v] = work + model.forward[v] + model.backward[v]
    path, v = [], max(range(model.num_groups), key=heaviest.__getitem__)
    while v >= 0:
        path.append(v)
        v = following[v]
    return tuple(path)


@dataclass
class Beside:
    """A path, and of every group the last of the path before it and the first behind it.

    Groups of the path have numbers from 1: `low` and `high` are both its own number for one of
    them, 0 and one more than there are where there is none before or behind.  `near_low` and
    `near_high` count only what is joined to the group by values that carry gradients.
    """

    model: Model
    length: int
    low: NDArray[np.intp]
    high: NDArray[np.intp]
    near_low: NDArray[np.intp]
    near_high: NDArray[np.intp]
    flows: list[list[Flow]]  # by boundary: of the values along the path, which a cut there sends

    @staticmethod
    def of(model: Model, path: tuple[int, ...], most: int = MOST) -> Beside | None:
        """None where the path has no boundary; at most so many groups are told apart."""
        kept = _kept(model, path, most)
        if len(kept) < 2:
            return None
        size = len(kept)
        number = {v: n for n, v in enumerate(kept, start=1)}
        carried = [(flow.sources[0], sink) for flow in with_gradients(model) for sink in flow.sinks]
        ends = (
            *sides(model.num_groups, model.arcs, number, size),
            *sides(model.num_groups, carried, number, size),
        )
        return Beside(model, size, *ends, _along(model, path, number, size))

    def inside(self, of_groups: Array, *, every: bool, of: np.ufunc = np.add) -> Array:
        """[j, k]: the sum (the ufunc `of`) over groups that surely are on a stage with groups j + 1
        to k.

        Where `every` stage holds some of the path, the first one also has what nothing of the
        path is before, and the last one what nothing is behind.
        """
        table = np.zeros((self.length + 2, self.length + 2))
        if of is np.add:  # quicker
            cells = np.ravel_multi_index((self.low, self.high), table.shape)
            table += np.bincount(cells, of_groups, table.size).reshape(table.shape)
        else:
            of.at(table, (self.low, self.high), of_groups)
        found = of.accumulate(of.accumulate(table[::-1])[::-1], 1)  # low from a on, high up to b
        rows, columns = np.arange(1, self.length + 2), np.arange(self.length + 1)
        if every:
            rows[0], columns[-1] = 0, self.length + 1
        result: Array = found[np.ix_(rows, columns)]
        return result

    def before(self, of_groups: Array) -> Array:
        """[j]: the sum over groups that are on earlier stages when j of the path are."""
        found: Array = np.bincount(self.high, of_groups, self.length + 2).cumsum()
        return found[: self.length + 1]

    def behind(self, of_groups: Array) -> Array:
        """[j]: the sum over groups that are not on earlier stages when j of the path are."""
        found = self.beyond(of_groups)
        found[0] = of_groups.sum()
        return found

    def beyond(self, of_groups: Array) -> Array:
        """[j]: the same, where stages before the path may have what nothing of it is before."""
        counted = np.bincount(self.low, of_groups, self.length + 2)
        found: Array = counted[::-1].cumsum()[::-1][1:]
        return found

    def across(self, of_groups: Array) -> Array:
        """[j]: the sum over groups that may be on a stage without the path where j of it are on
        earlier ones."""
        begun = np.bincount(self.low, of_groups, self.length + 2).cumsum()[: self.length + 1]
        found: Array = begun - self.before(of_groups)
        return found

    def assignments(self, ends: list[int]) -> Iterator[tuple[int, ...]]:
        """Stages of groups whose path is cut at these boundaries, the last at its end: what is
        open as early or as late as may be, but what nothing of the path is before always late."""
        stage = np.searchsorted(np.array(ends), np.arange(self.length + 2), side="left")
        stage[-1] = len(ends) - 1
        before, after = lattice.neighbours(self.model.num_groups, self.model.arcs)
        first, last = stage[self.low].tolist(), stage[self.high].tolist()
        for v in reversed(range(len(last))):
            last[v] = min([last[v], *(last[u] for u in after[v])])
        yield tuple(last)
        for v in range(len(first)):
            first[v] = last[v] if self.low[v] == 0 else first[v]
            first[v] = max([first[v], *(first[u] for u in before[v])])
        yield tuple(first)


def with_gradients(model: Model) -> list[Flow]:
    """Values of which gradients come back."""
    return [flow for flow in model.flows if not flow.tied and flow.backward_messages > 0]


def sides(
    count: int, arcs: Iterable[tuple[int, int]], number: dict[int, int], size: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Of every group the last of the path before it and the first behind it, as these arcs go."""
    before, after = lattice.neighbours(count, arcs)
    low, high = np.zeros(count, dtype=np.intp), np.full(count, size + 1, dtype=np.intp)
    for v in range(count):
        low[v] = number.get(v) or max((low[u] for u in before[v]), default=0)
    for v in reversed(range(count)):
        high[v] = number.get(v) or min((high[u] for u in after[v]), default=size + 1)
    return low, high


def _kept(model: Model, path: tuple[int, ...], most: int) -> tuple[int, ...]:
    """At most `most` groups of the path: light ones are left out, no more of them in a row than
    weigh as little as has to be."""
    work = [model.forward[v] + model.backward[v] for v in path]
    light, kept = 0.0, path
    while len(kept) > most:
        light = max(2 * light, sum(work) / 1e5)
        found, since = [], math.inf  # the first one stays
        for v, own in zip(path, work, strict=True):
            since += own
            if since > light:
                found.append(v)
                since = 0.0
        kept = tuple(found)
    return kept


def _along(
    model: Model, path: tuple[int, ...], number: dict[int, int], size: int
) -> list[list[Flow]]:
    """The values from one group of the path to the next, by the boundary that lies there."""
    flow_of: dict[tuple[int, int], Flow] = {}
    for flow in with_gradients(model):
        flow_of |= {(flow.sources[0], sink): flow for sink in flow.sinks}
    found: list[list[Flow]] = [[] for _ in range(size + 1)]
    at = 0
    for u, v in pairwise(path):
        at = number.get(u, at)
        found[at].append(flow_of[u, v])
    return found
