"""Known critical paths: they tell without the clock that an assignment takes longer than another.

The order of a flush is given, so a path that is critical in one assignment is a chain of work in
every other one whose stages have its hops (`PipelineTimes.critical_path`).  Near a good assignment
a few dozen paths decide about nearly all others: what a move changes of them, which are sums over
stages and hops, is looked up in some ten microseconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np

from pdcompile.passes.partition.model import Flow, Model
from pdcompile.plan.evaluate import Deployment, Evaluation
from pdcompile.plan.makespan import Path
from pdcompile.plan.times import PipelineTimes
from pdcompile.plan.wires import Direction, StagePair

MOST = 64  # paths
Hop = tuple[StagePair, Direction]


@dataclass
class KnownPaths:
    """Critical paths by their order of tasks, those first that told something last."""

    _paths: dict[object, list[Path]] = field(default_factory=dict)

    def of(self, on: Deployment) -> list[Path]:
        """Those of a deployment."""
        order = on.schedule, on.num_microbatches, tuple(on.ranks), tuple(on.in_flight)
        return self._paths.setdefault(order, [])

    def seconds(self, plan: Evaluation, below: float) -> float:
        """Seconds of a plan; where they are not `below` a limit, no less than that limit."""
        if not plan.chained:
            return plan.seconds
        paths = self.of(plan.deployment)
        for n, path in enumerate(paths):
            if (least := along(path, plan.times)) >= below:
                paths.insert(0, paths.pop(n))
                return least
        path = plan.times.critical_path(plan.warmup, plan.m)
        paths[:] = [path, *paths[: MOST - 1]]
        least = along(path, plan.times)
        return least if least >= below else plan.seconds


def along(path: Path, times: PipelineTimes) -> float:
    """Seconds of a chain of work; 0 where one of its hops is missing."""
    hops = [(count, times.hops[kind].get(hop)) for hop, kind, count in path.hops]
    parts: list[tuple[float, float | None]] = [*zip(path.forward, times.forward, strict=True)]
    parts += [*zip(path.backward, times.backward, strict=True), *hops]
    known = [count * seconds for count, seconds in parts if seconds is not None]
    return math.fsum(known) if len(known) == len(parts) else 0.0


class Neighbourhood:
    """Neighbourhood of an assignment: what moves of groups change of it, and of known paths.

    Args:
        stages: of every group.
        paths: critical paths of this and other assignments.
    """

    def __init__(self, model: Model, on: Deployment, stages: Sequence[int], paths: Sequence[Path]):
        self.model, self.on, self.stages = model, on, [*stages]
        self.flows: dict[int, list[int]] = defaultdict(list)  # of each group
        for e, flow in enumerate(model.flows):
            for v in {*flow.sources, *flow.sinks}:
                self.flows[v].append(e)
        self.carried = [[*self._hops(flow)] for flow in model.flows]
        self.hops = _summed((1, each) for each in self.carried)
        self.column = {hop: n for n, hop in enumerate(self.hops)}
        self.work = np.array([model.forward, model.backward])
        self.know(paths)

    def know(self, paths: Sequence[Path]) -> None:
        """Go by these paths from now on."""
        own = [np.bincount(self.stages, each, len(self.on.speeds)) for each in self.work]
        counts = np.array([(one.forward, one.backward) for one in paths])
        #: [path, forward and backward, stage]: how often it runs a second of work
        self.counts = counts.reshape(-1, *np.shape(own)) / self.on.speeds
        self.taken = np.zeros((len(paths), len(self.hops)))  # how often it takes each hop
        self.lengths = (self.counts * own).sum((1, 2))
        for n, path in enumerate(paths):
            for hop, kind, count in path.hops:
                if (known := self.column.get((hop, kind))) is not None:
                    self.taken[n, known] = count
                else:
                    self.lengths[n] = -np.inf
        self.lengths += self.taken @ [seconds for _, seconds in self.hops.values()]

    def least(self, groups: Sequence[int], to: int) -> float:
        """Seconds that no clock is below once these groups, which share a stage, are on another."""
        was, flows = self.stages[groups[0]], {e for v in groups for e in self.flows[v]}
        for v in groups:
            self.stages[v] = to
        now = [(1, self._hops(self.model.flows[e])) for e in flows]
        changed = _summed(chain(now, ((-1, self.carried[e]) for e in flows)))
        for v in groups:
            self.stages[v] = was
        work = self.work[:, [*groups]].sum(1)
        found = self.lengths + (self.counts[:, :, to] - self.counts[:, :, was]) @ work
        for hop, (count, seconds) in changed.items():
            if (n := self.column.get(hop)) is not None:
                found = found + self.taken[:, n] * seconds
                if self.hops[hop][0] + count == 0:  # a path that takes it says nothing
                    found = np.where(self.taken[:, n] > 0, -np.inf, found)
        return float(found.max(initial=0.0))

    def _hops(self, flow: Flow) -> Iterator[tuple[Hop, float]]:
        """Hops of a flow, and its seconds on each, as `messages_of` has them."""
        source = min(self.stages[v] for v in flow.sources)
        stages = [source, *sorted({self.stages[v] for v in flow.sinks} - {source})]
        once, link = self.on.num_microbatches if flow.tied else 1, self.on.link
        for far in stages[1:]:
            seconds = once * flow.forward_seconds(link(source, far))
            yield ((source, far), "final" if flow.tied else "forward"), seconds
        for near, far in pairwise(stages) if flow.backward_messages else ():
            seconds = once * flow.backward_seconds(link(near, far))
            yield ((far, near), "final" if flow.tied else "backward"), seconds


def _summed(flows: Iterable[tuple[int, Iterable[tuple[Hop, float]]]]) -> dict[Hop, list[float]]:
    """Number of flows on each hop, and their seconds; each flow so many times."""
    found = defaultdict[Hop, list[float]](lambda: [0, 0.0])
    for times, hops in flows:
        for hop, seconds in hops:
            found[hop][0] += times
            found[hop][1] += times * seconds
    return found
