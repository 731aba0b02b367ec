"""Local search: groups move over a boundary, one or several, as long as that helps.

Near a good assignment a few dozen critical paths decide about nearly all others: what a move
changes of them, which are sums over stages and hops, is looked up in some ten microseconds.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from pdcompile.passes.partition.known_paths import KnownPaths, along
from pdcompile.passes.partition.model import Flow, Model, after, moves
from pdcompile.plan.evaluate import Evaluation
from pdcompile.plan.makespan import Path
from pdcompile.plan.wires import Direction, StagePair

Groups = tuple[int, ...]  # the stage of each
Hop = tuple[StagePair, Direction]
KICKS = 30  # without gain, after which it ends
NEAR, MADE = 2, (2, 6)  # boundaries around one whose groups a kick moves, and how many moves it is
UNIT = 1 << 30  # bytes: what they take more is told apart from what a message takes at least


@dataclass(frozen=True)
class LocalSearch:
    """Moves of a model's groups.

    Args:
        plan_of: an assignment of groups, on the deployment that all of them have.
        offer: seconds of an assignment, if they are less than so many.
        ends: True once time is over, or nothing more can be won.
    """

    model: Model
    plan_of: Callable[[Groups], Evaluation]
    offer: Callable[[Groups, float], float | None]
    ends: Callable[[], bool]
    known: KnownPaths

    def climb(self, stages: Groups, seconds: float) -> None:
        """Makes moves as long as one helps; those that shorten known paths most come first."""
        better = True
        while better:
            plan, better = self.plan_of(stages), False
            paths = self.known.of(plan.deployment)
            near = Neighbourhood(self.model, stages, plan, paths)
            every = [*moves(self.model.arcs, stages, len(plan.stages))]
            for least, n in sorted((near.least(*move), n) for n, move in enumerate(every)):
                if self.ends():
                    return
                if least >= seconds or near.least(*every[n]) >= seconds:
                    continue
                found = self.offer(moved := after(stages, *every[n]), seconds)
                if found is not None:
                    stages, seconds, better = moved, found, True
                    break
                near.know(paths)

    def go_on(self, best: Callable[[], tuple[Groups, float]], draws: random.Random) -> None:
        """Climbs from near the best assignment that there is, with its seconds, until that gains
        nothing any more (iterated local search: Lourenço, Martin and Stützle, 2003)."""
        kicks = 0
        while kicks < KICKS and not self.ends():
            groups, seconds = best()
            kicked = self._kicked(groups, draws)
            if (found := self.offer(kicked, math.inf)) is not None:
                self.climb(kicked, found)
            kicks = 0 if best()[1] < seconds else kicks + 1

    def _kicked(self, stages: Groups, draws: random.Random) -> Groups:
        """An assignment after a few random moves near one boundary, whether they help or not."""
        count = max(stages) + 1
        at = draws.randrange(max(count - 1, 1))
        for _ in range(draws.randint(*MADE)):
            every = moves(self.model.arcs, stages, count)
            near = [(own, to) for own, to in every if abs(min(to, stages[own[0]]) - at) <= NEAR]
            stages = after(stages, *draws.choice(near)) if near else stages
        return stages


class Neighbourhood:
    """Neighbourhood of an assignment: what moves of groups change of it, and of known paths.

    Args:
        stages: of every group.
        plan: the same assignment.
        paths: critical paths of this and other assignments.
    """

    def __init__(
        self, model: Model, stages: Sequence[int], plan: Evaluation, paths: Sequence[Path]
    ):
        self.model, self.times, self.stages = model, plan.times, [*stages]
        self.on, self.ties = plan.deployment, np.zeros(model.num_groups)
        self.flows: dict[int, list[int]] = defaultdict(list)  # of each group
        for e, flow in enumerate(model.flows):
            for v in {*flow.sources, *flow.sinks}:
                self.flows[v].append(e)
        for copy in model.copies:
            self.ties[[*copy.ends]] += copy.bytes * copy.trainable
        self.carried = [[*self._hops(flow)] for flow in model.flows]
        self.hops = _summed((1, each) for each in self.carried)
        self.column = {hop: n for n, hop in enumerate(self.hops)}
        self.work = np.array([model.forward, model.backward, model.trainable_bytes])
        self.know(paths)

    def know(self, paths: Sequence[Path]) -> None:
        """Go by these paths from now on."""
        #: [path, forward, backward and bytes, stage]: seconds that it takes of one more
        self.counts = np.zeros((len(paths), 3, len(self.on.ranks)))
        self.taken = np.zeros((len(paths), len(self.hops)))  # how often it takes each hop
        self.lengths = np.array([along(path, self.times) for path in paths])
        again, times = np.array(self.on.recompute, dtype=float), self.times
        for n, path in enumerate(paths):
            ahead, back = np.array(path.forward), np.array(path.backward)
            self.counts[n, :2] = (ahead + again * back, back) / np.array(self.on.speeds)
            for s, share in path.sums:
                more = times.reduction(s, UNIT) - times.reduction(s, 0)
                self.counts[n, 2, s] += share * more / UNIT
            for hop, kind, count in path.hops:
                if (known := self.column.get((hop, kind))) is not None:
                    self.taken[n, known] = count

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
        found = found - self.counts[:, 2, was] * self.ties[[*groups]].sum()  # they may stay
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
        once, ranks = self.on.num_microbatches if flow.tied else 1, self.on.ranks
        for far in stages[1:]:
            seconds = once * flow.forward_seconds(self.on.link(ranks[source][0], ranks[far][0]))
            yield ((source, far), "final" if flow.tied else "forward"), seconds
        for near, far in pairwise(stages) if flow.backward_messages else ():
            seconds = once * flow.backward_seconds(self.on.link(ranks[near][0], ranks[far][0]))
            yield ((far, near), "final" if flow.tied else "backward"), seconds


def _summed(flows: Iterable[tuple[int, Iterable[tuple[Hop, float]]]]) -> dict[Hop, list[float]]:
    """Number of flows on each hop, and their seconds; each flow so many times."""
    found = defaultdict[Hop, list[float]](lambda: [0, 0.0])
    for times, hops in flows:
        for hop, seconds in hops:
            found[hop][0] += times
            found[hop][1] += times * seconds
    return found
