"""What an assignment costs and whether it is allowed: the definition that solvers are held to.

Straight from the problem, stage by stage and value by value, with no reductions and no code in
common with the solvers.  Every answer of the planner goes through here before anybody sees it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from pdcompile.errors import PlanError
from pdcompile.passes.partition.makespan import (
    Hop,
    Path,
    Timing,
    critical_path,
    longest_path,
    makespan,
    warmup_of,
)
from pdcompile.problem import Partition, PartitionProblem


def evaluate(problem: PartitionProblem, stage_of: Sequence[int]) -> Partition:
    """Objective, loads and memory of an assignment.

    Raises:
        PlanError: it breaks a constraint or a memory limit; names the first.
    """
    for message in violations(problem, stage_of):
        raise PlanError(f"the assignment is not allowed: {message}", where="partition")
    return measure(problem, stage_of)


def measure(problem: PartitionProblem, stage_of: Sequence[int]) -> Partition:
    """`evaluate` of an assignment that is known to break nothing."""
    traffic = Transfers(problem, stage_of)
    forward, backward = stage_seconds(problem, stage_of)
    compute = [f + w for f, w in zip(forward, backward, strict=True)]
    loads = tuple(map(max, compute, traffic.seconds()))
    if problem.objective == "flush":
        m = problem.num_microbatches
        warmup = warmup_of(problem.memory.in_flight, len(problem.stages), m)
        objective = makespan(traffic.timing(forward, backward), warmup, m)
    else:
        objective = max(loads)
        for s, count in enumerate(problem.memory.in_flight):
            trip = round_trip(traffic.timing(forward, backward), s)
            objective = max(objective, trip / count)
    return Partition(tuple(stage_of), objective, loads, memory(problem, stage_of))


def violations(problem: PartitionProblem, stage_of: Sequence[int]) -> list[str]:
    """Constraints that the assignment breaks, in words; empty when it is feasible."""
    names = [item.name for item in problem.items]
    num_stages = len(problem.stages)
    if len(stage_of) != len(names):
        return [f"{len(stage_of)} stages given for {len(names)} items"]
    found = [
        f"{names[i]!r} is on stage {s} of {num_stages}"
        for i, s in enumerate(stage_of)
        if not 0 <= s < num_stages
    ]
    if found:
        return found
    pairs = [(t.producer, c) for t in problem.traffic for c in t.consumers]
    for a, b in [*pairs, *problem.order]:
        if stage_of[a] > stage_of[b]:
            found.append(f"{names[b]!r} is on an earlier stage than {names[a]!r}")
    for group in problem.together:
        if len({stage_of[i] for i in group}) > 1:
            found.append(f"{', '.join(repr(names[i]) for i in group)} are not on one stage")
    for i, s in problem.pins:
        if stage_of[i] != s:
            found.append(f"{names[i]!r} is on stage {stage_of[i]}, pinned to {s}")
    for a, b in problem.apart:
        if stage_of[a] == stage_of[b]:
            found.append(f"{names[a]!r} and {names[b]!r} are on one stage")
    for i, s in problem.forbidden:
        if stage_of[i] == s:
            found.append(f"{names[i]!r} is on stage {s}, where it may not be")
    used = set(stage_of)
    if not problem.allow_empty:
        found += [f"stage {s} is empty" for s in range(num_stages) if s not in used]
    if problem.max_stages is not None and len(used) > problem.max_stages:
        found.append(f"{len(used)} stages are used, and {problem.max_stages} may be")
    for s, needed in enumerate(memory(problem, stage_of)):
        limit = problem.stages[s].memory_bytes
        if limit is not None and needed > limit:
            found.append(f"stage {s} needs {needed} bytes of memory, and has {limit}")
    return found


def stage_seconds(
    problem: PartitionProblem, stage_of: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Forward and backward seconds of one microbatch on each stage's device."""
    forward: list[list[float]] = [[] for _ in problem.stages]
    backward: list[list[float]] = [[] for _ in problem.stages]
    for item, s in zip(problem.items, stage_of, strict=True):
        forward[s].append(item.forward_seconds / problem.stages[s].speed)
        backward[s].append(item.backward_seconds / problem.stages[s].speed)
    return tuple(map(math.fsum, forward)), tuple(map(math.fsum, backward))


def memory(problem: PartitionProblem, stage_of: Sequence[int]) -> tuple[int, ...]:
    """Bytes per stage by `MemoryRule`'s formula; every holder of a shared parameter has a copy."""
    rule = problem.memory
    num_stages = len(problem.stages)
    trainable, frozen, saved = [0] * num_stages, [0] * num_stages, [0] * num_stages
    workspace, copied = [0] * num_stages, [0] * num_stages
    for item, s in zip(problem.items, stage_of, strict=True):
        trainable[s] += item.trainable_bytes
        frozen[s] += item.parameter_bytes - item.trainable_bytes
        saved[s] += item.saved_bytes
        workspace[s] = max(workspace[s], item.workspace_bytes)
    for parameter in problem.shared:
        holders = {stage_of[i] for i in parameter.items}
        for s in holders:
            if parameter.trainable:
                trainable[s] += parameter.bytes
                copied[s] += parameter.bytes if s > min(holders) else 0
            else:
                frozen[s] += parameter.bytes
    for value in problem.traffic:
        for s in {stage_of[c] for c in value.consumers} - {stage_of[value.producer]}:
            saved[s] += value.forward_bytes
    updated = rule.gradient_buffers + rule.optimizer_factor
    in_flight = rule.in_flight or (1,) * num_stages
    return tuple(
        math.ceil((trainable[s] - copied[s]) * updated)
        + trainable[s] * rule.versions
        + frozen[s]
        + in_flight[s] * saved[s]
        + workspace[s]
        for s in range(num_stages)
    )


def path_of(problem: PartitionProblem, stage_of: Sequence[int]) -> Path:
    """The critical path of the assignment's flush schedule."""
    timing = Transfers(problem, stage_of).timing(*stage_seconds(problem, stage_of))
    m = problem.num_microbatches
    return critical_path(timing, warmup_of(problem.memory.in_flight, len(problem.stages), m), m)


def any_path_of(problem: PartitionProblem, stage_of: Sequence[int]) -> Path:
    """A path as long as the assignment's flush schedule; takes less time than `path_of`."""
    timing = Transfers(problem, stage_of).timing(*stage_seconds(problem, stage_of))
    m = problem.num_microbatches
    return longest_path(timing, warmup_of(problem.memory.in_flight, len(problem.stages), m), m)


class Transfers:
    """Every hop of one microbatch: who sends what to whom.

    A value goes directly from its stage to each stage that consumes it; its gradient goes from
    the last of these to the one before, …, to the first, to the source.  A shared trainable
    parameter's gradient is chained in the same way once a microbatch; its new weights go from
    the first holder to the others once a minibatch.
    """

    def __init__(self, problem: PartitionProblem, stage_of: Sequence[int]):
        self.stages = problem.stages
        self.forward: dict[Hop, float] = defaultdict(float)  # seconds
        self.backward: dict[Hop, float] = defaultdict(float)
        self.final: dict[Hop, float] = defaultdict(float)  # once a minibatch
        self.num_microbatches = problem.num_microbatches
        for value in problem.traffic:
            source = stage_of[value.producer]
            found = {stage_of[c] for c in value.consumers}
            found.discard(source)
            if not found:
                continue
            targets = sorted(found)
            for target in targets:
                self.forward[source, target] += self._hop(source, target, value.forward_bytes)
            if value.backward_bytes:
                for near, far in zip([source, *targets], targets, strict=False):
                    self.backward[far, near] += self._hop(near, far, value.backward_bytes)
        for parameter in problem.shared:
            holders = sorted({stage_of[i] for i in parameter.items})
            if not parameter.trainable:
                continue
            for near, far in pairwise(holders):
                self.backward[far, near] += self._hop(near, far, parameter.bytes)
            for holder in holders[1:]:
                self.final[holders[0], holder] += self._hop(holders[0], holder, parameter.bytes)

    def _hop(self, near: int, far: int, num_bytes: float) -> float:
        """Seconds between two stages: the slowest link that lies between."""
        links = self.stages[near:far]
        rate = min(link.bytes_per_second for link in links)
        return num_bytes / rate + max(link.latency_seconds for link in links)

    def seconds(self) -> list[float]:
        """Link seconds per stage: the busier direction, or both on a half-duplex link."""
        sent, received = [0.0] * len(self.stages), [0.0] * len(self.stages)
        kinds = ((self.forward, 1), (self.backward, 1), (self.final, self.num_microbatches))
        for hops, every in kinds:
            for (source, target), duration in hops.items():
                sent[source] += duration / every
                received[target] += duration / every
        return [
            max(s, r) if limits.full_duplex else s + r
            for s, r, limits in zip(sent, received, self.stages, strict=True)
        ]

    def timing(self, forward: Sequence[float], backward: Sequence[float]) -> Timing:
        duplex = all(limits.full_duplex for limits in self.stages)
        return Timing(
            tuple(forward), tuple(backward), self.forward, self.backward, self.final, duplex
        )


def round_trip(timing: Timing, stage: int) -> float:
    """Seconds from a stage's forward to the end of its backward of the same microbatch, alone.

    The longest path forward through the stages that depend on it and back.
    """
    num_stages = len(timing.forward)
    ahead = [-math.inf] * num_stages  # end of forward
    ahead[stage] = timing.forward[stage]
    for t in range(stage + 1, num_stages):
        arrivals = [
            ahead[source] + duration
            for (source, target), duration in timing.forward_hops.items()
            if target == t and source >= stage
        ]
        ahead[t] = max(arrivals, default=-math.inf) + timing.forward[t]
    back = list(ahead)  # start of backward, then its end
    for t in range(num_stages - 1, stage - 1, -1):
        for (source, target), duration in timing.backward_hops.items():
            if target == t and source > t:
                back[t] = max(back[t], back[source] + duration)
        back[t] += timing.backward[t]
    return back[stage]
