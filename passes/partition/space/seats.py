"""Seats: which rank of the cluster runs which position of the pipeline, and what joins them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdcompile.cluster import Cluster, Link, slowest
from pdcompile.problem import StageLimits


@dataclass(frozen=True)
class Seats:
    """Ranks in the order in which the pipeline takes them; all of them are used."""

    cluster: Cluster
    ranks: tuple[int, ...]

    def speed(self, p: int, r: int) -> float:
        """Of the slowest of r devices from position p on: replicas take turns."""
        return float(self._speeds[p : p + r].min())

    def memory(self, p: int, r: int) -> int | None:
        limits = [self.cluster.devices[rank].memory_bytes for rank in self.ranks[p : p + r]]
        return min((limit for limit in limits if limit is not None), default=None)

    def ring(self, p: int, r: int) -> Link:
        """What an all-reduce goes over: the slowest level that it spans."""
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
