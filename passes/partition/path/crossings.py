"""What goes from one stage to the next, at least, where a path is cut.

One value along the path always does.  Where the cut lies inside a branch (between the two ends of a
residual, say), one value of the branch does too, if both ends of it are on these two stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.model import Flow
from pdcompile.passes.partition.path.beside import Array, Beside, with_gradients
from pdcompile.problem import StageLimits

SHORT = 1.5  # of the average stage's work: ends of longer branches are seldom so close


@dataclass(frozen=True)
class Branch:
    """Groups beside the path in a row, and the values between them: wherever they are cut, one of
    these is sent."""

    start: int  # which of the path is before them, and behind them
    end: int
    flows: tuple[Flow, ...]


@dataclass(frozen=True)
class Hop:
    """Between a stage and the next one with some of the path: seconds there and back, by boundary.

    `more` besides the `least` where the first stage `begins` [j, k] before the branches that are
    cut there, and the second one `ends` [k, l] after them.  `around`: with other stages between
    them, directly or by one of these, whichever is less each way.
    """

    least: Array
    around: Array
    more: Array
    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]
    branches: bool  # are there any

    def before(self, of_first: Array, times: int = 1) -> Array:
        """[k, l]: the least of the first stage's [j, k] and `times` what is sent besides."""
        if not self.branches:
            least: Array = of_first.min(0)[:, None]
            return least
        far = np.where(self.begins, of_first, np.inf).min(0)
        near = np.where(self.begins, np.inf, of_first).min(0)
        with_it, without = np.minimum(far + times * self.more, near), np.minimum(far, near)
        found: Array = np.where(self.ends, with_it[:, None], without[:, None])
        return found

    def after(self, of_second: Array, times: int = 1) -> Array:
        """[j, k]: the least of the second stage's [k, l] and `times` what is sent besides."""
        if not self.branches:
            least: Array = of_second.min(1)[None, :]
            return least
        far = np.where(self.ends, of_second, np.inf).min(1)
        near = np.where(self.ends, np.inf, of_second).min(1)
        with_it, without = np.minimum(far + times * self.more, near), np.minimum(far, near)
        found: Array = np.where(self.begins, with_it[None, :], without[None, :])
        return found


def hop_over(beside: Beside, links: Sequence[StageLimits], branches: Iterable[Branch] = ()) -> Hop:
    """The least over any of these links, and one of each branch's values besides."""
    size = beside.length

    def seconds(flow: Flow) -> float:
        return min(flow.forward_seconds(link) + flow.backward_seconds(link) for link in links)

    least, more = np.full(size + 1, np.inf), np.zeros(size + 1)
    for boundary, flows in enumerate(beside.flows):
        least[boundary] = min(map(seconds, flows), default=np.inf)
    start, end = np.arange(size + 1), np.arange(size + 1)
    for branch in branches:
        least_of_it = min(map(seconds, branch.flows))
        along = {id(flow) for flow in branch.flows}
        for k in range(branch.start, branch.end):
            if not along & {id(flow) for flow in beside.flows[k]}:
                more[k] += least_of_it
                start[k], end[k] = min(start[k], branch.start), max(end[k], branch.end)
    numbers = np.arange(size + 1)
    begins, ends = numbers[:, None] < start[None, :], numbers[None, :] >= end[:, None]
    return Hop(least, least, more, begins, ends, bool(more.any()))


class Crossing(NamedTuple):
    """The least seconds that go over a link, forward and backward, by boundary: of values along the
    path, and into and out of what may be on a stage without the path there."""

    along: tuple[Array, Array]
    into: tuple[Array, Array]
    out: tuple[Array, Array]

    @staticmethod
    def over(beside: Beside, links: Sequence[StageLimits]) -> Crossing:
        """Over any of these links.  The gradient of what others read too may come from them."""
        found = [[np.full(beside.length + 1, np.inf) for _ in range(2)] for _ in range(3)]

        def less(tables: list[Array], at: slice, there: float, back: float) -> None:
            for table, seconds in zip(tables, (there, back), strict=True):
                table[at] = np.minimum(table[at], seconds)

        for k, flows in enumerate(beside.flows):
            for flow in flows:
                less(found[0], slice(k, k + 1), *_fastest(flow, links))
        for flow in with_gradients(beside.model):
            there, back = _fastest(flow, links)
            (source,) = flow.sources
            less(found[2], slice(beside.low[source], beside.high[source]), there, back)
            for sink in flow.sinks:
                at = slice(beside.low[sink], beside.high[sink])
                less(found[1], at, there, back)
                if len(flow.sinks) > 1:
                    less(found[2], at, np.inf, back)
        return Crossing(*((there, back) for there, back in found))


def _fastest(flow: Flow, links: Sequence[StageLimits]) -> tuple[float, float]:
    there = min(flow.forward_seconds(link) for link in links)
    return there, min(flow.backward_seconds(link) for link in links)


def hop_around(least: Array, between: Sequence[Crossing]) -> Array:
    """There and back over these links in a row, or from the first of them by a stage on the way:
    each way has to take the one or the other."""
    there, back = (np.max([one.along[way] for one in between], axis=0) for way in range(2))
    others = [between[0].into[way] + between[-1].out[way] for way in range(2)]
    found: Array = np.min(
        [least, others[0] + back, there + others[1], others[0] + others[1]], axis=0
    )
    return found


def branches_of(beside: Beside, work: Array, stages: int) -> list[Branch]:
    """Short branches that have no value in common."""
    model = beside.model
    on_path = beside.low == beside.high
    leaving: dict[int, list[tuple[int, Flow]]] = {}
    for flow in model.flows:
        if not flow.tied:
            for sink in flow.sinks:
                leaving.setdefault(flow.sources[0], []).append((sink, flow))
    until = beside.before(work)
    most = SHORT * work.sum() / stages
    found: list[Branch] = []
    used: set[int] = set()
    for v in np.flatnonzero(on_path):
        for first in leaving.get(int(v), ()):
            flows, (u, flow) = [first[1]], first
            while not on_path[u] and u in leaving:
                u, flow = min(leaving[u], key=lambda one: (beside.high[one[0]], one[0]))
                flows.append(flow)
            start, end = int(beside.high[v]), int(beside.high[u])
            short = on_path[u] and end > start + 1 and until[end] - until[start] <= most
            if short and not used & {id(flow) for flow in flows}:
                used |= {id(flow) for flow in flows}
                found.append(Branch(start, end, tuple(flows)))
    return found
