"""What plans along a path cost: matrices by a stage's interval of it, its end and its length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pdcompile.cluster import Level, Link
from pdcompile.passes.partition.bounds import passage
from pdcompile.passes.partition.path.beside import Array, Beside
from pdcompile.passes.partition.path.branches import read_with
from pdcompile.plan.makespan import warmup_of
from pdcompile.problem import StageLimits
from pdcompile.schedule.registry import kind_of

WORTH = 0.01  # of the average stage's work: less gets no stage

#: [k, l]: what goes there and back to an interval from not far before it; and that or, if it takes
#: longer, a value that goes further, which it does at the same time
Hops: TypeAlias = tuple[Array, Array]


class Band(NamedTuple):
    """Intervals that have these ends and at most this length."""

    ends: slice
    most: int

    def of(self, table: NDArray[Any]) -> NDArray[Any]:
        """What a table `by_length` says of them."""
        return table[self.ends, : self.most]

    def starts(self, of_boundaries: Array) -> Array:
        """What is known of the boundary where each begins; inf where there is none."""
        padded = np.concatenate([np.full(self.most, np.inf), of_boundaries])
        found: Array = sliding_window_view(padded, self.most)[self.ends, ::-1]
        return found


def by_length(table: NDArray[Any]) -> NDArray[Any]:
    """[end, length − 1] of a table [start, end]; the one from 0 where there is no such start."""
    ends, lengths = np.ogrid[: len(table), 1 : len(table)]
    found: NDArray[Any] = table[np.maximum(ends - lengths, 0), ends]
    return found


class Tables(NamedTuple):
    """Two of each where what may be at an interval's first boundary is on its stage, and where that
    is on a stage beside the path."""

    own: list[Array]
    taken: list[list[Array]]  # seconds of a schedule, by stage
    apart: Array  # what may be beside it; inf where that is next to nothing
    number: Array  # of groups that may be beside it
    at_once: Array  # seconds of one microbatch at which both work, if it is
    around: Callable[[Level], Array]  # hops to what is beside it and from there, there and back
    hops: list[list[Hops]]  # to it, by sending stage
    to_end: list[Hops]  # from each boundary to the path's end, if they are on such a stage


@dataclass
class PathCosts:
    """Seconds of a path's groups and values on the stages that may be used."""

    beside: Beside
    stages: tuple[StageLimits, ...]
    fastest: float = field(init=False)
    work: Array = field(init=False)  # seconds of each group
    until: Array = field(init=False)  # of what is on stages up to a boundary
    until_forward: Array = field(init=False)
    depth: tuple[int, ...] = field(init=False)  # warm-up by stage
    hops: list[Hops] = field(init=False)  # by sending stage

    def __post_init__(self) -> None:
        beside, model = self.beside, self.beside.model
        self.fastest = max(stage.speed for stage in self.stages)
        self.work = np.array(model.forward) + np.array(model.backward)
        self.until, self.until_forward = (
            beside.before(self.work),
            beside.before(np.array(model.forward)),
        )
        self.until[-1], self.until_forward[-1] = self.work.sum(), sum(model.forward)
        problem = model.problem
        in_flight, m = problem.memory.in_flight, problem.num_microbatches
        self.depth = warmup_of(in_flight, model.num_stages, m)
        self.hops = self._hops()

    def tables(self, beside_it: NDArray[np.bool_]) -> Tables:
        """`beside_it`: the groups that may have a stage beside the path."""
        model, none = self.beside.model, np.tri(self.beside.length + 1, dtype=bool)
        own = np.subtract.outer(-self.until, -self.until)
        forward = np.subtract.outer(-self.until_forward, -self.until_forward)
        apart = _spanning(self.beside, np.where(beside_it, self.work, 0.0))
        number = _spanning(self.beside, beside_it.astype(np.float64))
        at_once = _at_once(self.beside, own, forward, apart, beside_it)
        apart[apart < WORTH * self.until[-1] / len(self.stages)] = np.inf
        late = [
            _since(self.beside, np.where(beside_it, one, 0.0)) for one in (self.work, model.forward)
        ]
        owns = [(own, forward), (own - late[0], forward - late[1])]
        taken = [
            [np.where(none, np.inf, self._taken(s, f, both - f)) for s in range(len(self.stages))]
            for both, f in owns
        ]
        elsewhere = frozenset(np.flatnonzero(beside_it).tolist())
        hops = [self.hops, self._hops(elsewhere)]

        @cache
        def around(link: Level) -> Array:
            return by_length(_spanning(self.beside, self._ends(elsewhere, link)))

        return Tables(
            [by_length(one) for one, _ in owns],
            [[by_length(one) for one in some] for some in taken],
            by_length(apart), by_length(number), by_length(at_once), around,
            [[(by_length(a), by_length(b)) for a, b in some] for some in hops],
            [(near[:, -1], far[:, -1]) for near, far in hops[1]],
        )  # fmt: skip

    def _taken(self, s: int, forward: Array, backward: Array) -> Array:
        """Seconds of a schedule in which a stage has an interval, links apart."""
        problem, speed = self.beside.model.problem, self.stages[s].speed
        part = kind_of(problem.memory.schedule).halves(1.0)[0]
        way = self.until_forward + part * (self.until - self.until_forward)
        f, w = forward / speed, part * backward / speed
        after = (way[-1] - way)[None, :] / self.fastest
        found = passage(f, w, after, problem.num_microbatches, self.depth[s] + 1)
        result: Array = found + way[:, None] / self.fastest
        return result

    def _hops(self, elsewhere: Collection[int] = ()) -> list[Hops]:
        """By sending stage, if some groups are on a stage beside the path."""
        links = [(stage.bytes_per_second, stage.latency_seconds) for stage in self.stages]
        unlike = dict(zip(links, self.stages, strict=True))
        found = {link: self._hop(stage, elsewhere) for link, stage in unlike.items()}
        return [found[link] for link in links]

    def _hop(self, link: Link, elsewhere: Collection[int]) -> Hops:
        model, size, high = self.beside.model, self.beside.length, self.beside.high
        found, longest = np.zeros((size + 1, size + 1)), np.zeros(size + 1)
        near = size // model.num_stages
        for flow in model.flows:
            sinks = sorted({int(high[v]) for v in flow.sinks if v not in elsewhere})
            if sinks and not flow.tied and flow.sources[0] not in elsewhere:
                at, seconds = int(high[flow.sources[0]]), flow.forward_seconds(link)
                seconds += flow.backward_seconds(link)
                for k in range(at, min(sinks[-1], at + near, size)):
                    found[k, sinks[bisect_right(sinks, k)] :] += seconds
                    longest[k] = max(longest[k], seconds)
        return found, np.maximum(found, longest[:, None])

    def _ends(self, elsewhere: Collection[int], link: Link) -> Array:
        """Of each group, if it is on a stage beside the path: seconds of what comes there and what
        goes from there, there and back."""
        model, found = self.beside.model, np.zeros(len(self.work))
        for flow in model.flows:
            source, seconds = flow.sources[0], flow.forward_seconds(link)
            sinks = [v for v in flow.sinks if (v in elsewhere) != (source in elsewhere)]
            if sinks and not flow.tied:
                at = source if source in elsewhere else sinks[0]
                found[at] += seconds + flow.backward_seconds(link)
        return found


def _since(beside: Beside, work: Array) -> Array:
    """[k, l]: of what may be at boundary k and is on its way to the interval's end."""
    size = beside.length
    table = np.zeros((size + 2, size + 2))
    np.add.at(table, (beside.low, beside.high), work)
    found = table.cumsum(0).cumsum(1)[: size + 1, : size + 1]  # low up to k, high up to l
    result: Array = np.maximum(found - np.diag(found)[:, None], 0.0)
    return result


def _spanning(beside: Beside, of_groups: Array) -> Array:
    """[j, k]: the sum over groups that may be before the interval as well as behind it."""
    size = beside.length
    table = np.zeros((size + 2, size + 2))
    np.add.at(table, (beside.low, beside.high), of_groups)
    found: Array = table.cumsum(0)[:, ::-1].cumsum(1)[:, ::-1]  # low up to j, high from k
    found = found[: size + 1, 1:].copy()
    found[np.tri(size + 1, dtype=bool)] = 0.0
    return found


def _at_once(
    beside: Beside, own: Array, forward: Array, apart: Array, beside_it: NDArray[np.bool_]
) -> Array:
    """Seconds at which an interval's stage and the one beside it both work."""
    model, reads = beside.model, read_with(beside)
    ahead = _spanning(beside, np.where(beside_it, model.forward, 0.0))
    back = apart - ahead
    for v in np.flatnonzero(beside_it).tolist():
        low, high = beside.low[v], beside.high[v]
        within = np.zeros((high - low, high - low), dtype=bool)
        for u in reads[v]:
            first, last = max(beside.low[u], low), beside.high[u]
            within[: max(first - low, 0), max(last - low, 0) :] = True
        back[low:high, low:high] -= np.where(within, model.backward[v], 0.0)
    found: Array = np.minimum(forward, ahead) + np.minimum(own - forward, np.maximum(back, 0.0))
    return found
