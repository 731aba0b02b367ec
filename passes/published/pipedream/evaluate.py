"""Evaluate: what nested stages cost, from the raw profile alone.

Shares nothing with the search: its own graph walk, sets instead of bit masks, exact sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdcompile.errors import PlanError
from pdcompile.passes.published.pipedream_file import HierarchyProblem
from pdcompile.problem.answer import LevelAnswer


@dataclass(frozen=True, slots=True)
class Leaf:
    """A stage of the innermost level, in pipeline order over the whole network."""

    members: tuple[str, ...]
    replicas: int  # of all levels together
    replicas_per_level: tuple[int, ...]  # outermost first
    compute_seconds: float  # of one replica, for a minibatch
    activation_bytes: float
    parameter_bytes: float
    in_flight: int  # minibatches whose activations and weights a replica holds

    @property
    def memory_bytes(self) -> float:
        return self.in_flight * (self.activation_bytes + self.parameter_bytes)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The plan's bottleneck, seconds per minibatch, its leaves and the workers they take."""

    objective: float
    leaves: tuple[Leaf, ...]

    @property
    def workers(self) -> int:
        return sum(leaf.replicas for leaf in self.leaves)


def evaluate(problem: HierarchyProblem, stages: Sequence[LevelAnswer]) -> Evaluation:
    """Price nested stages, outermost first, over all levels (with one level: without `inner`).

    Raises:
        PlanError: the stages are no plan for this problem: a node is missing or on two stages,
            an edge points backwards, a level has too many components, or a worker too little
            memory.
    """
    return _Check(problem).plan(tuple(stages))


class _Check:
    def __init__(self, problem: HierarchyProblem) -> None:
        self.problem = problem
        nodes = problem.graph.nodes
        self.node = {node.id: node for node in nodes}
        self.consumers: dict[str, set[str]] = {node.id: set() for node in nodes}
        self.producers: dict[str, set[str]] = {node.id: set() for node in nodes}
        for source, target in problem.graph.edges:
            self.consumers[nodes[source].id].add(nodes[target].id)
            self.producers[nodes[target].id].add(nodes[source].id)

    def plan(self, stages: tuple[LevelAnswer, ...]) -> Evaluation:
        top = len(self.problem.levels) - 1
        objective = self._pipeline(stages, set(), set(self.node), top)
        flat: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
        self._flatten(stages, (), flat)
        workers = [math.prod(per_level) for _, per_level in flat]
        leaves = []
        for s, (names, per_level) in enumerate(flat):
            # Warm-up of 1F1B with replicas (SOSP 2019, section 3.2): this stage and all behind
            # it work at once, spread over this stage's replicas.
            in_flight = -(-sum(workers[s:]) // workers[s])
            leaf = Leaf(
                members=names,
                replicas=workers[s],
                replicas_per_level=per_level,
                compute_seconds=self._sum(names, "seconds"),
                activation_bytes=self._sum(names, "activation_bytes"),
                parameter_bytes=self._sum(names, "parameter_bytes"),
                in_flight=in_flight,
            )
            limit = self.problem.memory_bytes
            if limit is not None and leaf.memory_bytes > limit:
                raise PlanError(
                    f"stage {s} needs {leaf.memory_bytes:.0f} bytes, and a worker has {limit:.0f}",
                    where=f"stages[{s}]",
                )
            leaves.append(leaf)
        return Evaluation(objective, tuple(leaves))

    def _pipeline(
        self, stages: tuple[LevelAnswer, ...], before: set[str], inside: set[str], depth: int
    ) -> float:
        """Seconds of one component of level `depth` that runs `inside` after `before`."""
        count, bandwidth = self.problem.levels[depth]
        within = math.prod(n for n, _ in self.problem.levels[:depth])
        if not stages:
            raise PlanError("there is no stage", where=f"level {depth}")
        if any(type(s.replicas) is not int or s.replicas < 1 for s in stages):
            raise PlanError("a stage has no replica", where=f"level {depth}")
        if sum(stage.replicas for stage in stages) > count:
            raise PlanError(f"more than {count} components are used", where=f"level {depth}")
        if self.problem.straight and any(stage.replicas > 1 for stage in stages):
            raise PlanError("a straight pipeline has no replicas", where=f"level {depth}")
        covered = [str(name) for stage in stages for name in stage.members]
        if len(covered) != len(set(covered)) or set(covered) != inside:
            raise PlanError("the stages do not hold every node once", where=f"level {depth}")
        worst = 0.0
        done = set(before)
        entry = 0.0
        for place, stage in enumerate(stages):
            names = {str(name) for name in stage.members}
            if not names:
                raise PlanError("a stage is empty", where=f"level {depth}")
            start, done = set(done), done | names
            late = [n for n in names if not self.producers[n] <= done]
            if late:
                raise PlanError(f"{min(late)!r} runs before its inputs", where=f"level {depth}")
            if depth:
                alone = self._pipeline(stage.inner, start, names, depth - 1)
            elif stage.inner:
                raise PlanError("there are more levels than the cluster has", where="level 0")
            else:
                alone = self._sum(stage.members, "seconds")
            m = stage.replicas
            reduced = 4 * (m - 1) * self._sum(stage.members, "parameter_bytes") / (bandwidth * m)
            if place == 0:
                reduced /= within  # a component's workers share the first stage's exchange
            exit_bytes = self._boundary(done)
            worst = max(worst, (alone + reduced) / m)
            ratio = self.problem.activation_compression
            if place and ratio is not None:
                worst = max(worst, 2 * max(entry, exit_bytes) / (bandwidth * m) / ratio)
            entry = exit_bytes
        return worst

    def _boundary(self, done: set[str]) -> float:
        """Bytes at the cut after `done`: its maximal nodes, and what they augment."""
        if len(done) == len(self.node):
            return 0.0
        counted = set()
        for name in done:
            if self.consumers[name] & done:
                continue
            history = {name}
            stack = [name]
            while stack:
                for producer in self.producers[stack.pop()]:
                    if producer not in history:
                        history.add(producer)
                        stack.append(producer)
            counted.add(name)
            counted |= {n for n in history - {name} if not self.consumers[n] <= history}
        return math.fsum(self.node[name].activation_bytes for name in counted)

    def _sum(self, names: Sequence[int | str], amount: str) -> float:
        return math.fsum(getattr(self.node[str(name)], amount) for name in names)

    def _flatten(
        self,
        stages: tuple[LevelAnswer, ...],
        above: tuple[int, ...],
        found: list[tuple[tuple[str, ...], tuple[int, ...]]],
    ) -> None:
        for stage in stages:
            here = (*above, stage.replicas)
            if stage.inner:
                self._flatten(stage.inner, here, found)
            else:
                found.append((tuple(str(name) for name in stage.members), here))
