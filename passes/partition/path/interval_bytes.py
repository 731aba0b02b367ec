"""Bytes that a stage with some interval of a path needs, at least, and what else they leave room
for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.model import Copy, Flow
from pdcompile.passes.partition.path.beside import Array, Beside

PRICES = np.linspace(0.0, 1.0, 12)  # quantiles of work per byte
TOGETHER = 6  # groups of a branch: those of more are left out


class _Choice(NamedTuple):
    """Groups that may be before an interval or in it, if that begins at `start` and ends at `end`
    or later: those in it and bytes of what comes there, in every possible way."""

    start: int
    end: int
    options: list[tuple[list[int], float]]


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

    def of_branches(self, s: int) -> Array:
        """What stage s needs besides `least` for a branch that its interval begins in: for groups
        of that which it holds, and for what comes from the others or for those."""
        size, held = self.beside.length, self.beside.model.least_bytes(s).tolist()
        _, received, _ = self.beside.model.problem.memory.counts(s)
        found = np.zeros((size + 1, size + 1))
        for one in self._choices:
            found[one.start, one.end] += min(
                sum(held[v] for v in here) + received * num_bytes for here, num_bytes in one.options
            )
        result: Array = found.cumsum(1)
        return result

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
    def _choices(self) -> list[_Choice]:
        """Of what may be before an interval or in it, where that has all that is behind it."""
        beside, found = self.beside, []
        touching: dict[int, list[Flow]] = defaultdict(list)
        for flow in beside.model.flows:
            for v in {flow.sources[0], *flow.sinks} if not flow.tied else ():
                touching[v].append(flow)
        for start in range(1, beside.length + 1):
            open_there = (beside.low <= start) & (start < beside.high)
            there = set(np.flatnonzero(open_there).tolist())
            while there:
                own = _joined(there.pop(), there, touching)
                there -= own
                end = int(self._ends[list(own)].max())
                if len(own) <= TOGETHER and end <= beside.length:
                    flows = {id(flow): flow for v in own for flow in touching[v]}.values()
                    found.append(_Choice(start, end, [*self._options(start, end, own, flows)]))
        return found

    @cached_property
    def _after(self) -> list[list[int]]:
        return lattice.neighbours(self.beside.model.num_groups, self.beside.model.arcs)[1]

    def _options(
        self, start: int, end: int, own: set[int], flows: Collection[Flow]
    ) -> Iterator[tuple[list[int], float]]:
        """Those of some groups that are in the interval, and bytes of values that come to it from
        the others or for them."""
        low, high, ends = self._numbers
        arcs = [(u, v) for u in own for v in self._after[u] if v in own]
        for here in map(set, _subsets(own)):
            if any(u in here and v not in here for u, v in arcs):
                continue
            num_bytes = 0.0
            for flow in flows:
                source, sinks = flow.sources[0], flow.sinks
                read, later = not here.isdisjoint(sinks), [v for v in sinks if low[v] > start]
                if source in own:
                    read = read or any(ends[v] <= end for v in later)
                    comes = source not in here
                else:  # what groups behind the boundary read too is one of `_values`
                    comes = high[source] <= start and not later
                num_bytes += flow.received_bytes if comes and read else 0.0
            yield sorted(here), num_bytes

    @cached_property
    def _gradients(self) -> Array:
        """Bytes of gradients of values that surely are read on later stages."""
        beside, size = self.beside, self.beside.length
        found = np.zeros((size + 1, size + 1))
        for flow in beside.model.flows:
            last = int(beside.low[list(flow.sinks)].max())
            source = flow.sources[0]
            begins = int(beside.low[source]) or int(self.every)  # so many boundaries before it
            found[:begins, self._ends[source] : last] += flow.returned_bytes
        return found

    @cached_property
    def _numbers(self) -> tuple[list[int], list[int], list[int]]:
        """Of each group, the last of the path before it, the first behind it, and `_ends`."""
        return self.beside.low.tolist(), self.beside.high.tolist(), self._ends.tolist()

    @cached_property
    def _ends(self) -> NDArray[np.intp]:
        """Of each group, the first boundary behind it."""
        last = self.beside.length + (not self.every)
        found: NDArray[np.intp] = np.minimum(self.beside.high, last)
        return found


def _joined(first: int, others: set[int], touching: dict[int, list[Flow]]) -> set[int]:
    """A group and those of the others that values join it to."""
    found, waiting = {first}, [first]
    while waiting:
        for flow in touching[waiting.pop()]:
            new = ({flow.sources[0], *flow.sinks} & others) - found
            found |= new
            waiting += new
    return found


def _subsets(groups: set[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(groups) + 1):
        yield from combinations(groups, count)
