"""Cost of an assignment and whether it is allowed: the definition that searches are held to.

Straight from the problem, stage by stage and value by value, with no reductions and no code in
common with the solvers.  Every answer of the planner goes through here before anybody sees it.

Per microbatch, with r_s replicas: a stage computes for (F_s·(1 + recompute) + W_s) / r_s, its
busiest rank sends and receives for X_s, and its gradients are reduced in
A_s = 2·(r_s − 1)·(bytes / r_s / B + latency) / u over the slowest level that its ranks span, with u
microbatches an update, hidden behind compute but on the same links: load_s = max(C_s, X_s + A_s).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise

from pdcompile.cluster import Link, slowest
from pdcompile.plan.makespan import warmup_of
from pdcompile.plan.times import Message, PipelineTimes, messages_of
from pdcompile.problem import Holding, Partition, PartitionProblem
from pdcompile.schedule.fetches import fetches_of
from pdcompile.schedule.registry import kind_of
from pdcompile.schedule.turns import Pattern


@dataclass(frozen=True, slots=True)
class Deployment:
    """Places of the stages of a pipeline and how these run; all but `link` by stage.

    `in_flight`: microbatches of one replica; empty where round trips do not count.  `rates`: bytes
    a second from its host to each rank, where it gets the weights of a stage to run it.
    """

    ranks: Sequence[tuple[int, ...]]
    speeds: Sequence[float]
    limits: Sequence[int | None]  # bytes of memory
    half_duplex: Sequence[bool]
    in_flight: Sequence[int]
    flush: bool
    schedule: str
    num_microbatches: int
    holdings: Sequence[Holding]
    recompute: Sequence[bool]
    link: Callable[[int, int], Link]
    clips: bool = False
    homes: bool = False
    patterns: Sequence[Pattern] = ()
    paces: Sequence[Sequence[float]] = ()
    rates: Mapping[int, float] = field(default_factory=dict)

    @staticmethod
    def straight(problem: PartitionProblem) -> Deployment:
        """One rank a stage, as the stages of the problem say."""
        stages = problem.stages

        @cache
        def link(a: int, b: int) -> Link:
            return slowest(stages[min(a, b) : max(a, b)])

        return Deployment(
            [(s,) for s in range(len(stages))],
            [stage.speed for stage in stages],
            [stage.memory_bytes for stage in stages],
            [not (a.full_duplex and b.full_duplex) for a, b in pairwise((*stages[:1], *stages))],
            problem.in_flight,
            problem.objective == "flush",
            problem.schedule,
            problem.num_microbatches,
            list(map(problem.holding, range(len(stages)))),
            (False,) * len(stages),
            link,
        )


class Evaluation:
    """One assignment of a problem's items to stages."""

    def __init__(
        self,
        problem: PartitionProblem,
        stage_of: Sequence[int],
        deployment: Deployment | None = None,
    ):
        """Take a straight one on the problem's own stages where no `deployment` is given."""
        self.problem, self.stage_of = problem, stage_of
        self.deployment = Deployment.straight(problem) if deployment is None else deployment
        self.m = self.deployment.num_microbatches
        self.stages = range(len(self.deployment.ranks))

    def partition(self) -> Partition:
        """Seconds and bytes of an assignment that is known to break nothing."""
        loads = tuple(self.times.loads(self.m))
        bytes_held = tuple(map(self.memory, self.stages))
        return Partition(tuple(self.stage_of), self.seconds, loads, bytes_held)

    # -- seconds -----------------------------------------------------------------------------

    @cached_property
    def seconds(self) -> float:
        """Makespan with a flush; else seconds per microbatch, a lower bound if stages have
        replicas."""
        if self.deployment.flush:
            return self.times.makespan(self.warmup, self.m)
        return self.times.period(self.deployment.in_flight, self.m)

    @property
    def chained(self) -> bool:
        """True if a chain of forwards, backwards (or equal halves) and transfers tells its time."""
        return self.bounded and self.times.straight

    @property
    def bounded(self) -> bool:
        """True if such a chain, and a reduction after it, takes no longer."""
        on = self.deployment
        halves = kind_of(on.schedule).splits_backward
        return on.flush and self.times.chained and not (halves and any(on.recompute))

    @property
    def warmup(self) -> tuple[int, ...]:
        return warmup_of(self.deployment.in_flight, len(self.stages), self.m)

    @cached_property
    def times(self) -> PipelineTimes:
        forward: list[list[float]] = [[] for _ in self.stages]
        backward: list[list[float]] = [[] for _ in self.stages]
        for item, s in zip(self.problem.items, self.stage_of, strict=True):
            forward[s].append(item.forward_seconds / self.deployment.speeds[s])
            backward[s].append(item.backward_seconds / self.deployment.speeds[s])
        ahead = list(map(math.fsum, forward))
        again = [f if r else 0.0 for f, r in zip(ahead, self.deployment.recompute, strict=True)]
        rates, (trainable, _, frozen, *_) = self.deployment.rates, self._held
        weights = [sum(both) for both in zip(trainable, frozen, strict=True)]
        return PipelineTimes(
            ahead,
            [math.fsum(w) + f for w, f in zip(backward, again, strict=True)],
            self.deployment.ranks,
            self.messages,
            self.deployment.link,
            self.deployment.half_duplex,
            [self.trainable(s) if len(self.deployment.ranks[s]) > 1 else 0 for s in self.stages],
            self.deployment.clips,
            self.deployment.schedule,
            again,
            self.deployment.homes,
            self.deployment.patterns,
            self.deployment.paces,
            bool(rates) or any(one.readers > 1 for one in self.deployment.holdings),
            fetches_of(rates, self.deployment.ranks, weights, trainable),
        )

    @cached_property
    def messages(self) -> list[Message]:
        """Every hop of one microbatch."""
        values, stage_of = [], self.stage_of
        for value in self.problem.traffic:
            source = stage_of[value.producer]
            targets = {stage_of[c] for c in value.consumers} - {source}
            if targets:
                sizes = value.forward_bytes, value.backward_bytes or None
                values.append(([source, *sorted(targets)], *sizes))
        shared = (one for one in self.problem.shared if one.trainable)
        return messages_of(
            values, ((sorted({stage_of[i] for i in one.items}), one.bytes) for one in shared)
        )

    # -- bytes -------------------------------------------------------------------------------

    def trainable(self, s: int) -> int:
        return self._held[0][s]

    def memory(self, s: int) -> int:
        """Bytes of one rank of the stage; every holder of a shared parameter has a copy, which
        the first of them updates.

        A lower bound of its ledger, without sends in flight and what the optimizer's step needs
        for a moment; but that gradients come one by one, in a minibatch's first backward, only
        the ledger knows.
        """
        return sum(self._bytes(s))

    def needed(self, s: int) -> int:
        """Bytes of one rank of the stage, with the other stages that it holds.

        A lower bound as well: what stages hold for microbatches is not at its most in all of
        them at once.
        """
        ranks = self.deployment.ranks
        held = [self._bytes(t) for t in self.stages if ranks[t] == ranks[s]]
        if self.deployment.rates:  # weights and gradients are there while their stage runs
            return max(map(sum, held))
        gradients = sum(one[1] for one in held)
        return sum(one[0] for one in held) + max(gradients, *(one[1] + one[2] for one in held))

    def _bytes(self, s: int) -> tuple[int, int, int]:
        """Bytes of one rank: held always, of gradients, and held for microbatches."""
        trainable, copied, frozen, saved, received, returned, workspace = (
            row[s] for row in self._held
        )
        holding, owned = self.deployment.holdings[s], trainable - copied
        return (
            (trainable * holding.versions + frozen) // holding.readers
            + math.floor(owned * holding.optimizer_factor),
            owned * holding.gradient_buffers,
            holding.saved * saved
            + holding.received * received
            + holding.returned * returned
            + workspace,
        )

    @cached_property
    def _held(self) -> tuple[list[int], ...]:
        """Bytes by stage: trainable, copied of it, frozen, saved, received, returned, workspace."""
        found = tuple([0] * len(self.stages) for _ in range(7))
        trainable, copied, frozen, saved, received, returned, workspace = found
        for item, s in zip(self.problem.items, self.stage_of, strict=True):
            trainable[s] += item.trainable_bytes
            frozen[s] += item.parameter_bytes - item.trainable_bytes
            saved[s] += item.saved_bytes
            workspace[s] = max(workspace[s], item.workspace_bytes)
        for parameter in self.problem.shared:
            holders = {self.stage_of[i] for i in parameter.items}
            for s in holders:
                (trainable if parameter.trainable else frozen)[s] += parameter.bytes
                if parameter.trainable and s > min(holders):
                    copied[s] += parameter.bytes
        for one in self.messages:
            if one.kind == "forward":
                received[one.target] += one.bytes
            elif one.kind == "backward":
                returned[one.target] += one.bytes
        return found

    # -- what is allowed ---------------------------------------------------------------------

    def violations(self) -> Iterator[str]:
        """Constraints that the assignment breaks, in words; nothing when it is feasible."""
        problem, stage_of = self.problem, self.stage_of
        names, last = [item.name for item in problem.items], len(problem.stages) - 1
        if len(stage_of) != len(names):
            yield f"{len(stage_of)} stages given for {len(names)} items"
            return
        strange = [i for i, s in enumerate(stage_of) if s not in self.stages]
        for i in strange:
            yield f"{names[i]!r} is on stage {stage_of[i]} of {len(self.stages)}"
        if strange:
            return
        pairs = [(t.producer, c) for t in problem.traffic for c in t.consumers]
        for a, b in [*pairs, *problem.order]:
            if stage_of[a] > stage_of[b]:
                yield f"{names[b]!r} is on an earlier stage than {names[a]!r}"
        for group in problem.together:
            if len({stage_of[i] for i in group}) > 1:
                yield f"{', '.join(repr(names[i]) for i in group)} are not on one stage"
        for i, s in problem.pins:
            wanted = self.stages[-1] if s == last else s  # a pin to the last stage is to any last
            if stage_of[i] != wanted:
                yield f"{names[i]!r} is on stage {stage_of[i]}, pinned to {wanted}"
        for a, b in problem.apart:
            if stage_of[a] == stage_of[b]:
                yield f"{names[a]!r} and {names[b]!r} are on one stage"
        used = set(stage_of)
        yield from (f"stage {s} is empty" for s in self.stages if s not in used)
        for s, limit in enumerate(self.deployment.limits):
            if limit is not None and (needed := self.needed(s)) > limit:
                yield f"stage {s} needs {needed} bytes of memory, and has {limit}"
