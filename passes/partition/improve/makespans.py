"""How long the flush schedules of many assignments take, found together."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from pdcompile.cluster import slowest
from pdcompile.passes.partition.model import Flow, Model
from pdcompile.plan.evaluate import Evaluation
from pdcompile.plan.event_graph import event_graph
from pdcompile.plan.makespan import warmup_of
from pdcompile.schedule.registry import kind_of

Stages = NDArray[np.intp]  # [assignments, groups]
Seconds = NDArray[np.float64]
Flags = NDArray[np.bool_]
FINAL = 2  # ways of a hop: forward, backward, and once in the end
HOP = np.finfo(np.float64).tiny  # of seconds: also one that takes no time is a hop
OFTEN = 3  # hops that so many assignments have had are worth a graph of their own


class Makespans:
    """Seconds of assignments of a model's groups, as `Evaluation` has them one by one, but for
    rounding.

    Who waits for less takes no longer: with only the hops that many assignments have, they are on
    one graph of events, which says what each takes at least.
    """

    def __init__(self, model: Model):
        problem, count = model.problem, model.num_stages
        self.model, self.count = model, count
        self._fixed_order = all(stage.full_duplex for stage in problem.stages)
        self._work = np.array([model.forward, model.backward])
        self._speeds = np.array([stage.speed for stage in problem.stages])
        self._parts = kind_of(problem.memory.schedule).halves(1.0)
        links = [
            [slowest(problem.stages[min(a, b) : max(a, b)]) for b in range(count)]
            for a in range(count)
        ]
        self._rates = np.array([[one.bytes_per_second for one in row] for row in links])
        self._latencies = np.array([[one.latency_seconds for one in row] for row in links])
        self._warmup = tuple(warmup_of(problem.memory.in_flight, count, problem.num_microbatches))
        pairs = [flow for flow in model.flows if len({*flow.sources, *flow.sinks}) == 2]
        self._ends = np.array([sorted({*f.sources, *f.sinks}) for f in pairs], dtype=np.intp)
        self._amounts = np.array([self._sent(flow) for flow in pairs]).reshape(-1, 3, 2)
        self._others = [
            (sorted({*flow.sources, *flow.sinks}), np.array(self._sent(flow)))
            for flow in model.flows
            if len({*flow.sources, *flow.sinks}) > 2
        ]
        self._seen: Counter[bytes] = Counter()

    def _sent(self, flow: Flow) -> list[tuple[float, float]]:
        """Bytes and messages of a hop in each way."""
        m, none = self.model.problem.num_microbatches, (0.0, 0.0)
        backward = flow.backward_bytes, flow.backward_messages
        if flow.tied:
            return [none, backward, (m * flow.forward_bytes, m * flow.forward_messages)]
        return [(flow.forward_bytes, flow.forward_messages), backward, none]

    def at_least(self, stages: Stages) -> tuple[Seconds, Flags]:
        """Seconds of each assignment, [assignments], or at least so many; and whether that is all.

        Counted are the hops that the first one has, where an assignment has them too, and of these
        the hops to the next stage and back.
        """
        found, is_all = np.zeros(len(stages)), np.zeros(len(stages), dtype=np.bool_)
        if not self._fixed_order:
            return found, is_all
        hops = self._hops(stages)
        has = hops[:, :FINAL] > 0
        near = np.eye(self.count, k=1, dtype=np.bool_)
        for counted in (has[0] & np.array([near, near.T]), has[0]):
            waits = (has | ~counted).all((1, 2, 3))
            seconds = self._seconds(stages[waits], hops[waits], counted)
            found[waits] = np.maximum(found[waits], seconds)
            is_all |= waits & (has == counted).all((1, 2, 3))
        return found, is_all

    def exact(self, stages: Stages) -> float:
        """Seconds of one assignment, [groups]."""
        if self._fixed_order:
            hops = self._hops(stages[None, :])
            has = hops[0, :FINAL] > 0
            self._seen[has.tobytes()] += 1
            if self._seen[has.tobytes()] >= OFTEN:
                return float(self._seconds(stages[None, :], hops, has)[0])
        return Evaluation(self.model.problem, self.model.items_of(stages.tolist())).seconds

    def _seconds(self, stages: Stages, hops: Seconds, counted: Flags) -> Seconds:
        """Of each assignment, if these hops and the final ones are all."""
        problem = self.model.problem
        ways = [tuple(map(tuple, np.argwhere(one).tolist())) for one in counted]
        graph = event_graph(self._warmup, problem.num_microbatches, problem.memory.schedule, *ways)
        done = graph.done(np.concatenate([self._computed(stages), hops[:, :FINAL][:, counted].T]))
        found: Seconds = done.max(0)
        for a, b in np.argwhere(hops[:, FINAL].any(0)).tolist():
            seconds = hops[:, FINAL, a, b]
            late = np.maximum(done[a], done[b]) + seconds
            found = np.where(seconds > 0, np.maximum(found, late), found)
        return found

    def _computed(self, stages: Stages) -> Seconds:
        """Seconds of the actions of stages, [actions of stages, assignments]."""
        size, count = len(stages), self.count
        cell = (stages + count * np.arange(size)[:, None]).ravel()
        forward, backward = (
            np.bincount(cell, np.tile(one, size), size * count).reshape(size, count) / self._speeds
            for one in self._work
        )
        found: Seconds = np.concatenate(
            [forward, backward, *(part * backward for part in self._parts)], axis=1
        ).T
        return found

    def _hops(self, stages: Stages) -> Seconds:
        """Seconds of each hop, [assignments, way, source, target].

        A value goes to each stage that reads it; gradients go from the last one to the one before,
        and so on.
        """
        found = np.zeros((len(stages), 3, self.count, self.count))
        if len(self._ends):
            near, far = np.moveaxis(np.sort(stages[:, self._ends], axis=2), 2, 0)
            n, flow = np.nonzero(near != far)
            ends = near[n, flow], far[n, flow]
            self._add(found, n, ends[0], *ends, self._amounts[flow].transpose(1, 2, 0))
        for groups, amounts in self._others:
            chain = np.sort(stages[:, groups], axis=1)
            n, i = np.nonzero(chain[:, 1:] > chain[:, :-1])
            if len(n):
                self._add(found, n, chain[n, 0], chain[n, i], chain[n, i + 1], amounts[:, :, None])
        return found

    def _add(
        self, found: Seconds, n: Stages, first: Stages, near: Stages, far: Stages, amounts: Seconds
    ) -> None:
        """`amounts`: bytes and messages in each way."""
        for way, (a, b) in enumerate(((first, far), (far, near), (first, far))):
            num_bytes, messages = amounts[way]
            seconds = num_bytes / self._rates[a, b] + messages * self._latencies[a, b] + HOP
            hop = ((n * 3 + way) * self.count + a) * self.count + b
            np.add.at(found.reshape(-1), hop, np.where(messages > 0, seconds, 0.0))
