"""How long the flush schedules of many assignments take, found together."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product

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
FINAL, SUMS = 2, 3  # ways of a hop: forward, backward, and once in the end, there and back
HOP = np.finfo(np.float64).tiny  # of seconds: also one that takes no time is a hop
NEAR = 3  # stages: see `_alike`
MANY = 3  # times as many hops as needed are forgotten, when there are others


class Transfers:
    """What the flows of a model send from stage to stage, in many assignments."""

    def __init__(self, model: Model):
        ends = [sorted({*flow.sources, *flow.sinks}) for flow in model.flows]
        # The only reader of a value is never before its producer.
        ordered = [len(own) == 2 and not f.tied for own, f in zip(ends, model.flows, strict=True)]
        alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for i, own in enumerate(ends):
            alike[len(own), ordered[i]].append(i)
        self._flows = [
            (np.array(flows), np.array([ends[i] for i in flows]), one)
            for (count, one), flows in alike.items()
            if count > 1
        ]

    def of(self, stages: Stages) -> tuple[Stages, ...]:
        """Vectors: assignment, flow, the first of its stages, and two of them in a row."""
        found = [np.zeros((5, 0), dtype=np.intp)]
        for flows, ends, ordered in self._flows:
            chain = stages[:, ends] if ordered else np.sort(stages[:, ends], axis=2)
            n, i, k = np.nonzero(chain[:, :, 1:] != chain[:, :, :-1])
            rows = n, flows[i], chain[n, i, 0], chain[n, i, k], chain[n, i, k + 1]
            found.append(np.array(rows))
        return tuple(np.concatenate(found, axis=1))


class Makespans:
    """Seconds of assignments of a model's groups, as `Evaluation` has them one by one, but for
    rounding.

    They are all on one graph of events, with the hops that any of them has.  Who waits for less
    takes no longer: with few hops the graph is quick, and says what each takes at least.
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
        self._transfers = Transfers(model)
        self._amounts = np.array([self._sent(flow) for flow in model.flows]).reshape(-1, 4, 2)
        self._known: Flags = np.zeros((FINAL, count, count), dtype=np.bool_)  # hops of the graph

    def _sent(self, flow: Flow) -> list[tuple[float, float]]:
        """Bytes and messages of a hop in each way."""
        m, none = self.model.problem.num_microbatches, (0.0, 0.0)
        backward = flow.backward_bytes, flow.backward_messages
        if flow.tied:
            weights, sums = (
                (m * one[0], m * one[1])
                for one in ((flow.forward_bytes, flow.forward_messages), backward)
            )
            return [none, none, weights, sums]
        return [(flow.forward_bytes, flow.forward_messages), backward, none, none]

    def at_least(self, stages: Stages) -> Seconds:
        """Seconds of each assignment, [assignments], or at least so many: counted are hops to the
        next stage and back."""
        if not self._fixed_order:
            return np.zeros(len(stages))
        near = np.eye(self.count, k=1, dtype=np.bool_)
        return self._seconds(stages, self._hops(stages), np.array([near, near.T]))

    def exact(self, stages: Stages) -> Seconds:
        """Seconds of each assignment, [assignments]."""
        if not self._fixed_order:
            problem, items_of = self.model.problem, self.model.items_of
            return np.array([Evaluation(problem, items_of(one.tolist())).seconds for one in stages])
        hops = self._hops(stages)
        has: Flags = np.any(hops[:, :FINAL] > 0, axis=0)
        if (has & ~self._known).any():
            too_many = self._known.sum() > MANY * has.sum()
            self._known = self._alike(has) | (has if too_many else has | self._known)
        return self._seconds(stages, hops, self._known)

    def _alike(self, has: Flags) -> Flags:
        """What moves soon need: all hops as far as some of these, if that is not far, and others
        next to these."""
        found = np.zeros_like(has)
        for way, far in product(range(FINAL), range(-NEAR, NEAR + 1)):
            if np.diagonal(has[way], far).any():
                found[way] |= np.eye(self.count, k=far, dtype=np.bool_)
        distance = np.subtract.outer(np.arange(self.count), np.arange(self.count))
        around = np.pad(has & (np.abs(distance) > NEAR), ((0, 0), (1, 1), (1, 1)))
        for a, b in product(range(3), repeat=2):
            found |= around[:, a : a + self.count, b : b + self.count]
        return found

    def _seconds(self, stages: Stages, hops: Seconds, counted: Flags) -> Seconds:
        """Of each assignment, if of these hops and the final ones those that it has are all."""
        problem = self.model.problem
        ways = [tuple(map(tuple, np.argwhere(one).tolist())) for one in counted]
        graph = event_graph(self._warmup, problem.num_microbatches, problem.memory.schedule, *ways)
        moved = hops[:, :FINAL][:, counted].T
        moved = np.where(moved > 0, moved, -np.inf)
        done = graph.done(np.concatenate([self._computed(stages), moved]))
        for a, b in reversed(np.argwhere(hops[:, SUMS].any(0)).tolist()):
            seconds = hops[:, SUMS, a, b]
            done[b] = np.where(seconds > 0, np.maximum(done[b], done[a] + seconds), done[b])
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
        and so on; so do sums of tied ones, before new weights.
        """
        n, flow, first, near, far = self._transfers.of(stages)
        shape = len(stages), 4, self.count, self.count
        found = np.zeros(math.prod(shape))
        there, back = (first, far), (far, near)
        for way, (a, b) in enumerate((there, back, there, back)):
            num_bytes, messages = self._amounts[flow, way].T
            seconds = num_bytes / self._rates[a, b] + messages * self._latencies[a, b] + HOP
            hop = ((n * 4 + way) * self.count + a) * self.count + b
            found += np.bincount(hop, np.where(messages > 0, seconds, 0.0), found.size)
        return found.reshape(shape)
