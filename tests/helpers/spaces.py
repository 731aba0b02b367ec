"""Clusters, settings and brute force for the planner's whole space."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pdcompile.cluster import Cluster, Device, Level
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.partition.space.pipelines import (
    Part,
    Pipelines,
    PreparedProblem,
    filled,
    timed,
)
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.passes.schedules import warmup
from pdcompile.plan import MemoryLedger
from pdcompile.problem import PartitionProblem
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from tests.helpers.problems import random_problem


def random_case(seed: int) -> tuple[PartitionProblem, Cluster, SearchSpace, Setting]:
    """A small problem on two levels of links, unlike devices, tight memory, any schedule."""
    r = random.Random(seed)
    problem = random_problem(seed, max_items=5)
    last = len(problem.stages) - 1
    pins = ((len(problem.items) - 1, last),) if r.random() < 0.5 else ()
    problem = replace(problem, pins=pins)
    inner, outer = r.choice(((2, 2), (2, 1), (3, 1), (4, 1)))
    speeds, limits = [1.0], [None]
    if r.random() < 0.3:
        speeds = [1.0, 2.0]
    if r.random() < 0.4:
        limits = [r.randint(30, 200), r.randint(30, 200)]
    devices = tuple(Device("cpu", r.choice(limits), r.choice(speeds)) for _ in range(inner * outer))
    near = Level("near", inner, r.choice((float("inf"), 5.0)), r.choice((0.0, 0.25)))
    levels = (near, Level("far", outer, r.choice((4.0, 1.0)), 0.5, r.random() < 0.8))
    schedule = r.choice(("1f1b", "gpipe", "2bw", "2bw"))
    setting = Setting(
        schedule, r.randint(1, 9), r.randint(0, 1), r.choice((0.0, 2.0)), r.random() < 0.3
    )
    if seed % 9 == 0:  # whose stages the callers give one rank each
        setting = replace(setting, schedule="vsync", num_microbatches=1)
    space = SearchSpace(
        "any",
        r.choice(((False,), (True,), (False, True))),
        stages=r.choice((None, None, 2)),
    )
    return (
        replace(problem, num_microbatches=setting.num_microbatches),
        Cluster(devices, levels[: 1 if outer == 1 else 2]),
        space,
        setting,
    )


def harsh_case(seed: int) -> tuple[PartitionProblem, Cluster, SearchSpace, Setting]:
    """Half of the time a limit and a speed of its own for each device, and half-duplex links."""
    problem, cluster, space, setting = random_case(seed)
    r = random.Random(seed)
    if r.random() < 0.5:
        devices = tuple(
            replace(
                device,
                memory_bytes=r.choice((None, r.randint(20, 300))),
                speed=r.choice((1.0, 2.0, 0.5)),
            )
            for device in cluster.devices
        )
        levels = tuple(replace(level, full_duplex=r.random() < 0.7) for level in cluster.levels)
        cluster = Cluster(devices, levels)
    return problem, cluster, space, setting


def every_candidate(
    problem: PartitionProblem,
    space: SearchSpace,
    setting: Setting,
    ranks: tuple[int, ...],
    counts: tuple[int, ...],
) -> Iterator[Candidate]:
    """All partitions x replicas x recomputation on exactly these ranks, allowed or not."""
    for n in range(1, min(len(ranks), len(problem.items)) + 1):
        if space.stages not in (None, n):
            continue
        for replicas in itertools.product(counts, repeat=n):
            if sum(replicas) != len(ranks):
                continue
            ends = list(itertools.accumulate(replicas))
            placed = tuple(ranks[e - r : e] for e, r in zip(ends, replicas, strict=True))
            depths = warmup(
                setting.schedule, n, setting.num_microbatches, replicas, setting.extra_warmup
            )
            arcs = [(t.producer, c) for t in problem.traffic for c in t.consumers]
            cuts = [
                cut
                for cut in itertools.product(range(n), repeat=len(problem.items))
                if len(set(cut)) == n and all(cut[a] <= cut[b] for a, b in arcs)
            ]
            for again in itertools.product(space.recompute, repeat=n):
                options = tuple(StageDeployment(r, a) for r, a in zip(replicas, again, strict=True))
                for stage_of in cuts:
                    yield Candidate(setting, stage_of, options, placed, depths)


def brute_force(
    problem: PartitionProblem,
    cluster: Cluster,
    space: SearchSpace,
    setting: Setting,
    ranks: tuple[int, ...],
    counts: tuple[int, ...],
    *,
    simulated: bool,
) -> float | None:
    """The least objective (or closed form) of all that is allowed; None when nothing is."""
    best = None
    for one in every_candidate(problem, space, setting, ranks, counts):
        if not violations(problem, cluster, one):
            found = evaluation(problem, cluster, one).seconds
            seconds = seconds_of(problem, cluster, one) if simulated else found
            if seconds < float("inf"):  # else a ledger exceeds its device
                best = seconds if best is None else min(best, seconds)
    return best


def seconds_of(
    problem: PartitionProblem,
    cluster: Cluster,
    candidate: Candidate,
    ledgers: Callable[[Candidate], Sequence[MemoryLedger]] | None = None,
) -> float:
    """The objective of a candidate, infinite where a ledger exceeds the memory of its device.

    Args:
        ledgers: those of the plan that the candidate stands for; without a plan those of its
            graph-free plan.
    """
    seconds, share = timed(problem, cluster, candidate)
    if ledgers is not None:
        share = filled(ledgers(candidate), cluster)
    return seconds if share <= 1 else float("inf")


def best(
    problem: PartitionProblem,
    cluster: Cluster,
    space: SearchSpace,
    setting: Setting,
    ranks: tuple[int, ...],
    counts: tuple[int, ...],
    *,
    exactly: bool = True,
) -> tuple[float, Candidate] | None:
    """The first candidate by rising bound that none after it can beat; None when nothing fits.

    It uses exactly these ranks.  `exactly`: by `seconds_of`, else by the closed form alone.
    """
    prepared = PreparedProblem(problem, len(ranks) * len(counts) * len(set(space.recompute)))
    part = Part(prepared, space, setting, Seats(cluster, ranks), counts, space.stages)
    pipelines = Pipelines(part)
    if pipelines.bound() == float("inf"):
        return None
    found: list[tuple[float, Candidate]] = []
    seen: set[Candidate] = set()
    for _, candidate in pipelines.candidates(lambda: found[-1][0] if found else float("inf")):
        if candidate is not None and candidate not in seen:
            seen.add(candidate)
            seconds = evaluation(problem, cluster, candidate).seconds
            least = found[-1][0] if found else float("inf")
            if exactly and seconds < least:
                seconds = seconds_of(problem, cluster, candidate)
            if seconds < least:
                found.append((seconds, candidate))
    return found[-1] if found else None
