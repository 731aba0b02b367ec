"""Seats: which rank of the cluster runs which position of the pipeline, and what joins them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from pdcompile.cluster import Cluster, Device, Link, slowest
from pdcompile.problem import StageLimits

MAX_ARRANGEMENTS = 120


def arrangements(cluster: Cluster) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Orders of all ranks, and whether these are all that differ.

    Equal devices are taken in the order of their ranks; which class of devices takes which
    position is tried in every way where there are at most `MAX_ARRANGEMENTS`, else in rank
    order and by rising and falling speed and memory.
    """
    classes: dict[Device, list[int]] = defaultdict(list)
    for rank, device in enumerate(cluster.devices):
        classes[device].append(rank)
    every = range(len(cluster.devices))
    if len(classes) == 1:
        return (tuple(every),), True
    if len(every) < 1_000:
        alike = math.prod(math.factorial(len(ranks)) for ranks in classes.values())
        if math.factorial(len(every)) // alike <= MAX_ARRANGEMENTS:
            return tuple(_all(tuple(map(tuple, classes.values())))), True
    found = [tuple(every)]
    speeds = [device.speed for device in cluster.devices]
    limits = [device.memory_bytes for device in cluster.devices]
    memory = [math.inf if limit is None else float(limit) for limit in limits]
    for sign, keys in product((1, -1), (speeds, memory)):
        found.append(tuple(sorted(every, key=[sign * key for key in keys].__getitem__)))
    return tuple(dict.fromkeys(found)), False


def _all(classes: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, ...]]:
    """Every interleaving of the classes, the one in rank order first."""
    if not any(classes):
        yield ()
        return
    for first in sorted((ranks for ranks in classes if ranks), key=lambda ranks: ranks[0]):
        rest = tuple(ranks[1:] if ranks is first else ranks for ranks in classes)
        for following in _all(rest):
            yield (first[0], *following)


@dataclass(frozen=True)
class Seats:
    """Ranks in the order in which the pipeline takes them; all of them are used.

    `share`: of their memory, which stages may take.
    """

    cluster: Cluster
    ranks: tuple[int, ...]
    share: float = 1.0

    def speed(self, p: int, r: int) -> float:
        """Speed of the slowest of r devices from position p on: replicas take turns."""
        return float(self._speeds[p : p + r].min())

    def memory(self, p: int, r: int) -> int | None:
        limits = [self.cluster.devices[rank].memory_bytes for rank in self.ranks[p : p + r]]
        least = min((limit for limit in limits if limit is not None), default=None)
        return None if least is None else int(least * self.share)

    def ring(self, p: int, r: int) -> Link:
        """Link of an all-reduce: the slowest level that it spans."""
        first, *others = self.ranks[p : p + r]
        return slowest(self.cluster.level_between(first, other) for other in others)

    def between(self, first: slice, second: slice) -> StageLimits:
        """The best of all links from some positions to others; a free one where there is none."""
        rate, latency, full = (table[first, second] for table in self._links)
        if not rate.size:
            return StageLimits()
        return StageLimits(
            bytes_per_second=float(rate.max()),
            full_duplex=bool(full.any()),
            latency_seconds=float(latency.min()),
        )

    @cached_property
    def largest(self) -> int | None:
        """Bytes of the largest of all devices; None where one has no limit."""
        limits = [device.memory_bytes for device in self.cluster.devices]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == len(limits) else None

    @cached_property
    def fastest(self) -> float:
        return float(self._speeds.max())

    @cached_property
    def _speeds(self) -> NDArray[np.float64]:
        return np.array([self.cluster.devices[rank].speed for rank in self.ranks])

    @cached_property
    def _links(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """Rate, latency and full duplex of each pair of positions."""
        ranks = np.array(self.ranks)
        shape = (len(ranks), len(ranks))
        rate, latency = np.full(shape, np.inf), np.zeros(shape)
        full = np.ones(shape, dtype=bool)
        block, known = 1, np.eye(len(ranks), dtype=bool)
        for level in self.cluster.levels:
            block *= level.size
            here = (ranks[:, None] // block == ranks[None, :] // block) & ~known
            rate[here], latency[here] = level.bytes_per_second, level.latency_seconds
            full[here] = level.full_duplex
            known |= here
        return rate, latency, full
