"""Bytes that a stage with some interval of a path needs, at least, and what else they leave room
for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.model import Copy
from pdcompile.passes.partition.path.beside import Array, Beside

PRICES = np.linspace(0.0, 1.0, 12)  # quantiles of work per byte


@dataclass(frozen=True)
class IntervalBytes:
    """Matrices [j, k] by the boundaries of an interval; `every` as for `Beside.inside`."""

    beside: Beside
    every: bool

    def least(self, s: int) -> Array:
        """What stage s needs for what surely is there, and for what it surely receives."""
        model = self.beside.model
        _, received, returned = model.problem.memory.counts(s)
        found: Array = self._inside(model.least_bytes(s)) + self._workspace
        found += received * self._values + returned * self._gradients
        for copy, there in self._copies:
            once = model.held_bytes(copy, s) + (model.updated_bytes(copy, s) if s == 0 else 0.0)
            found += once * there
        return found

    def most(self, s: int, work: Array) -> Array:
        """The most of the groups' `work` that stage s has room for: what surely is there, and by
        prices of memory (a linear program with one row) of what may be there."""
        beside, model, surely = self.beside, self.beside.model, self._inside(work)
        limit, held = model.problem.stages[s].memory_bytes, model.least_bytes(s)
        found = np.full(surely.shape, np.inf)
        loose = (beside.low < beside.high) & (held > 0)
        if limit is None or held.sum() <= limit or not loose.any():
            return found
        left = np.maximum(limit * (1 + 1e-12) + 0.5 - self.least(s), 0.0)
        for price in np.quantile(work[loose] / held[loose], PRICES):
            gain = np.maximum(work - price * held, 0.0)
            may_be = gain.sum() - beside.before(gain)[:, None] - beside.behind(gain)[None, :]
            found = np.minimum(found, np.maximum(may_be - self._inside(gain), 0.0) + price * left)
        found += surely
        return found

    def _inside(self, of_groups: Array) -> Array:
        return self.beside.inside(of_groups, every=self.every)

    @cached_property
    def _copies(self) -> list[tuple[Copy, Array]]:
        """Shared parameters, and where an interval's stage surely holds one."""
        return [(copy, self._has(copy.ends)) for copy in self.beside.model.copies]

    def _has(self, groups: Sequence[int]) -> Array:
        """1 where one of these groups surely is on an interval's stage, else 0."""
        has = np.zeros(self.beside.model.num_groups)
        has[list(groups)] = 1.0
        return np.minimum(self._inside(has), 1.0)

    @cached_property
    def _workspace(self) -> Array:
        most = np.array(self.beside.model.workspace_bytes, dtype=np.float64)
        return self.beside.inside(most, every=self.every, of=np.maximum)

    @cached_property
    def _values(self) -> Array:
        """Of groups that surely are on earlier stages."""
        beside, size = self.beside, self.beside.length
        found = np.zeros((size + 1, size + 2))
        for flow in beside.model.flows:
            sinks, first = list(flow.sinks), int(beside.high[flow.sources[0]])
            last = int(beside.low[sinks].max())
            if flow.tied or first >= last:
                continue
            ends = np.full(size + 2, size + 1)  # by where an interval begins
            np.minimum.at(ends, beside.low[sinks], self._ends[sinks])
            begins = np.arange(first, last)
            ends = np.minimum.accumulate(ends[::-1])[::-1][begins + 1]
            found[begins, ends] += flow.received_bytes
        result: Array = found.cumsum(1)[:, : size + 1]
        return result

    @cached_property
    def _gradients(self) -> Array:
        """Of what surely is read on later stages, or of parameters shared with them."""
        beside, size = self.beside, self.beside.length
        found = np.zeros((size + 1, size + 1))
        for flow in beside.model.flows:
            last = int(beside.low[list(flow.sinks)].max())
            if flow.tied:
                found[:, :last] += flow.backward_bytes * self._has(flow.sources)[:, :last]
                continue
            source = flow.sources[0]
            begins = int(beside.low[source]) or int(self.every)  # so many boundaries before it
            found[:begins, self._ends[source] : last] += flow.backward_bytes
        return found

    @cached_property
    def _ends(self) -> NDArray[np.intp]:
        """Of each group, the first boundary behind it."""
        last = self.beside.length + (not self.every)
        found: NDArray[np.intp] = np.minimum(self.beside.high, last)
        return found
