"""What a candidate costs and whether it is allowed: the definition that the search is held to.

Straight from the problem, item by item and value by value; no code in common with the search.
Per microbatch, with r_s replicas: a stage computes for (F_s·(1 + recompute) + W_s) / r_s, its
busiest rank sends and receives for X_s, and its gradients are reduced in
A_s = 2·(r_s − 1)·(bytes / r_s / B + latency) / m over the slowest level that its ranks span,
hidden behind compute but on the same links: load_s = max(C_s, X_s + A_s).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdcompile.cluster import Cluster
from pdcompile.passes.partition.makespan import Timing, makespan
from pdcompile.problem import PartitionProblem
from pdcompile.problem.space import Candidate
from pdcompile.schedule.registry import GRADIENT_SLOTS, kind_of


@dataclass(frozen=True, slots=True)
class Hop:
    """One message of each microbatch between two stages; `once`: of each minibatch."""

    kind: str  # forward | backward | once
    source: int
    target: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds and bytes of a candidate.

    `seconds`: without a flush per microbatch, a lower bound where stages have replicas; with one
    the makespan where none has, else a lower bound.
    """

    seconds: float
    loads: tuple[float, ...]  # per stage and microbatch
    memory_bytes: tuple[int, ...]  # of one rank of each stage


class Measure:
    """One candidate against its problem and cluster."""

    def __init__(self, problem: PartitionProblem, cluster: Cluster, candidate: Candidate):
        self.problem, self.cluster, self.candidate = problem, cluster, candidate
        self.setting = candidate.setting
        self.kind = kind_of(self.setting.schedule)
        self.m = self.setting.num_microbatches
        self.stages = range(len(candidate.options))
        self.hops = list(self._hops())

    def result(self) -> Measured:
        loads = self._loads()
        return Measured(self._seconds(loads), tuple(loads), tuple(map(self.memory, self.stages)))

    def violations(self) -> list[str]:
        """What the candidate breaks, in words; empty when it is allowed."""
        candidate, problem = self.candidate, self.problem
        names, stage_of = [item.name for item in problem.items], candidate.stage_of
        found = []
        if len(stage_of) != len(names) or any(s not in self.stages for s in stage_of):
            return ["not every item is on a stage"]
        arcs = [(t.producer, c) for t in problem.traffic for c in t.consumers]
        for a, b in [*arcs, *problem.order]:
            if stage_of[a] > stage_of[b]:
                found.append(f"{names[b]!r} is on an earlier stage than {names[a]!r}")
        for group in problem.together:
            if len({stage_of[i] for i in group}) > 1:
                found.append(f"{', '.join(repr(names[i]) for i in group)} are not on one stage")
        for a, b in problem.apart:
            if stage_of[a] == stage_of[b]:
                found.append(f"{names[a]!r} and {names[b]!r} are on one stage")
        last, most = len(problem.stages) - 1, problem.max_stages
        for item, s in problem.pins:
            wanted = self.stages[-1] if s == last else s
            if stage_of[item] != wanted:
                found.append(f"{names[item]!r} is on stage {stage_of[item]}, pinned to {wanted}")
        for item, s in problem.forbidden:
            if stage_of[item] == s:
                found.append(f"{names[item]!r} is on stage {s}, where it may not be")
        if most is not None and len(self.stages) > most:
            found.append(f"{len(self.stages)} stages, at most {most} are allowed")
        found += [f"stage {s} is empty" for s in self.stages if s not in stage_of]
        for option, ranks in zip(candidate.options, candidate.ranks, strict=True):
            if option.replicas != len(ranks):
                found.append(f"{option.replicas} replicas on ranks {list(ranks)}")
        flat = [rank for ranks in candidate.ranks for rank in ranks]
        if len(set(flat)) != len(flat) or not set(flat) <= set(range(len(self.cluster.devices))):
            found.append(f"ranks {flat} are not devices of the cluster, each once")
        for parameter in problem.shared:
            holders = {stage_of[i] for i in parameter.items}
            if parameter.trainable and len(holders) > 1:
                found += [
                    f"stage {s} has replicas and shares {parameter.fqn!r}"
                    for s in sorted(holders)
                    if candidate.options[s].replicas > 1
                ]
        for s in self.stages:
            limits = [self.cluster.devices[rank].memory_bytes for rank in candidate.ranks[s]]
            least = min((limit for limit in limits if limit is not None), default=None)
            needed = self.memory(s)
            if least is not None and needed > least:
                found.append(f"stage {s} needs {needed} bytes of memory, and has {least}")
        return found

    # -- seconds -----------------------------------------------------------------------------

    def compute(self, s: int) -> tuple[float, float]:
        """Forward and backward seconds on the slowest of the stage's devices."""
        items = [
            i for i, t in zip(self.problem.items, self.candidate.stage_of, strict=True) if t == s
        ]
        speed = min(self.cluster.devices[rank].speed for rank in self.candidate.ranks[s])
        forward = math.fsum(item.forward_seconds / speed for item in items)
        backward = math.fsum(item.backward_seconds / speed for item in items)
        return forward, backward + (forward if self.candidate.options[s].recompute else 0.0)

    def _loads(self) -> list[float]:
        busy: dict[tuple[int, str], float] = defaultdict(float)
        for hop in self.hops:
            from_ranks, to_ranks = (
                self.candidate.ranks[hop.source],
                self.candidate.ranks[hop.target],
            )
            turns = math.lcm(len(from_ranks), len(to_ranks))
            every = turns * (self.m if hop.kind == "once" else 1)
            for k in range(turns):
                a, b = from_ranks[k % len(from_ranks)], to_ranks[k % len(to_ranks)]
                seconds = self._link(a, b, hop.bytes) / every
                busy[a, "out"] += seconds
                busy[b, "in"] += seconds
        loads = []
        for s, ranks in enumerate(self.candidate.ranks):
            shared = self._half_duplex(s)
            both = [(busy[rank, "out"], busy[rank, "in"]) for rank in ranks]
            link = max(out + into if shared else max(out, into) for out, into in both)
            compute = math.fsum(self.compute(s)) / len(ranks)
            loads.append(max(compute, link + self.reduction(s) / self.m))
        return loads

    def _seconds(self, loads: list[float]) -> float:
        times = [self.compute(s) for s in self.stages]
        if self.kind.stream:
            trips = [
                self._round_trip(s, times)
                / (self.candidate.options[s].replicas * (self.candidate.warmup[s] + 1))
                for s in self.stages
            ]
            return max(*loads, *trips)
        if self.candidate.straight:
            tables: dict[str, dict[tuple[int, int], float]] = defaultdict(
                lambda: defaultdict(float)
            )
            for hop in self.hops:
                (a,), (b,) = self.candidate.ranks[hop.source], self.candidate.ranks[hop.target]
                tables[hop.kind][hop.source, hop.target] += self._link(a, b, hop.bytes)
            timing = Timing(
                tuple(f for f, _ in times), tuple(w for _, w in times),
                tables["forward"], tables["backward"], tables["once"],
                not any(map(self._half_duplex, self.stages)),
            )  # fmt: skip
            depths = tuple(min(depth, self.m - 1) for depth in self.candidate.warmup)
            return makespan(timing, depths, self.m)
        return max(
            math.fsum(times[s]) * -(-self.m // self.candidate.options[s].replicas)
            + self.reduction(s)
            for s in self.stages
        )

    def _round_trip(self, first: int, times: Sequence[tuple[float, float]]) -> float:
        """Seconds from a stage's forward to the end of its backward, over the fastest pairs."""
        ahead, back = {first: times[first][0]}, dict[int, float]()
        for t in self.stages[first + 1 :]:
            arrivals = [
                ahead[hop.source] + self._fastest(hop)
                for hop in self.hops
                if hop.kind == "forward" and hop.target == t and hop.source in ahead
            ]
            if arrivals:
                ahead[t] = max(arrivals) + times[t][0]
        for t in reversed(self.stages[first:]):
            if t in ahead:
                arrivals = [
                    back[hop.source] + self._fastest(hop)
                    for hop in self.hops
                    if hop.kind == "backward" and hop.target == t and hop.source in back
                ]
                back[t] = max(ahead[t], *arrivals, 0.0) + times[t][1]
        return back[first]

    def reduction(self, s: int) -> float:
        """Seconds of one ring all-reduce of the stage's gradients."""
        ranks = self.candidate.ranks[s]
        levels = [self.cluster.level_between(ranks[0], other) for other in ranks[1:]]
        if not levels:
            return 0.0
        rate = min(level.bytes_per_second for level in levels)
        latency = max(level.latency_seconds for level in levels)
        return 2 * (len(ranks) - 1) * (self.trainable(s) / len(ranks) / rate + latency)

    # -- bytes -------------------------------------------------------------------------------

    def trainable(self, s: int) -> int:
        own = sum(
            item.trainable_bytes
            for item, t in zip(self.problem.items, self.candidate.stage_of, strict=True)
            if t == s
        )
        return own + sum(
            p.bytes for p in self.problem.shared if p.trainable and self._holds(s, p.items)
        )

    def memory(self, s: int) -> int:
        """Bytes of one rank when it holds the most, as its ledger counts them, at least.

        Trainable · versions, gradient buffers and the optimizer's state of what it updates, what
        is never trained, saved · in flight (recomputing: one set), receive slots, and the largest
        workspace; without sends under way and what the optimizer's step needs for a moment.
        """
        problem, option = self.problem, self.candidate.options[s]
        items = [i for i, t in zip(problem.items, self.candidate.stage_of, strict=True) if t == s]
        shared = [p for p in problem.shared if self._holds(s, p.items)]
        trainable = self.trainable(s)
        frozen = sum(i.parameter_bytes - i.trainable_bytes for i in items)
        frozen += sum(p.bytes for p in shared if not p.trainable)
        owned = trainable - sum(
            p.bytes
            for p in shared
            if p.trainable and min(self.candidate.stage_of[i] for i in p.items) < s
        )
        buffers = self.kind.gradient_buffers(late=self.setting.clipping or option.replicas > 1)
        depth, share = self.candidate.warmup[s], -(-self.m // option.replicas)
        in_flight, slots = self.kind.in_flight(depth, share), self.kind.slots(depth, share)
        total = trainable * self.kind.versions + owned * buffers + frozen
        total += math.floor(owned * self.setting.optimizer_factor)
        total += (1 if option.recompute else in_flight) * sum(item.saved_bytes for item in items)
        total += max((item.workspace_bytes for item in items), default=0)
        for hop in self.hops:
            if hop.target == s and hop.kind == "forward":
                total += hop.bytes * slots
            elif hop.target == s and hop.kind == "backward":
                total += hop.bytes * min(GRADIENT_SLOTS, in_flight)
        return total

    # -- who sends what to whom ----------------------------------------------------------------

    def _hops(self) -> list[Hop]:
        found = []
        for value in self.problem.traffic:
            source = self.candidate.stage_of[value.producer]
            targets = sorted({self.candidate.stage_of[c] for c in value.consumers} - {source})
            found += [Hop("forward", source, t, value.forward_bytes) for t in targets]
            if value.backward_bytes:
                found += [
                    Hop("backward", far, near, value.backward_bytes)
                    for near, far in pairwise([source, *targets])
                ]
        for parameter in self.problem.shared:
            holders = sorted({self.candidate.stage_of[i] for i in parameter.items})
            if parameter.trainable:
                found += [Hop("backward", b, a, parameter.bytes) for a, b in pairwise(holders)]
                found += [Hop("once", holders[0], t, parameter.bytes) for t in holders[1:]]
        return found

    def _holds(self, s: int, items: Sequence[int]) -> bool:
        return any(self.candidate.stage_of[i] == s for i in items)

    def _half_duplex(self, s: int) -> bool:
        near = [self.candidate.ranks[t] for t in (s - 1, s + 1) if t in self.stages]
        return any(
            not self.cluster.level_between(a, b).full_duplex
            for a in self.candidate.ranks[s]
            for ranks in near
            for b in ranks
        )

    def _link(self, a: int, b: int, num_bytes: float) -> float:
        level = self.cluster.level_between(a, b)
        return num_bytes / level.bytes_per_second + level.latency_seconds

    def _fastest(self, hop: Hop) -> float:
        pairs = (
            (a, b)
            for a in self.candidate.ranks[hop.source]
            for b in self.candidate.ranks[hop.target]
        )
        return min(self._link(a, b, hop.bytes) for a, b in pairs)


def measure(problem: PartitionProblem, cluster: Cluster, candidate: Candidate) -> Measured:
    """Seconds and bytes of a candidate that breaks nothing."""
    return Measure(problem, cluster, candidate).result()


def violations(problem: PartitionProblem, cluster: Cluster, candidate: Candidate) -> list[str]:
    """What a candidate breaks, in words; empty when it is allowed."""
    return Measure(problem, cluster, candidate).violations()
