"""Deployment of stages: on how many ranks one runs, whether it recomputes, limits of positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdcompile.cluster import Amount, Cluster, Link, ring_seconds
from pdcompile.problem import StageLimits


def balanced_homes(
    ranks: Sequence[Sequence[int]], sizes: Sequence[Mapping[str, int]]
) -> dict[str, int]:
    """Home of each parameter, one of its stage's replicas: the largest first, each to the replica
    whose rank has the least so far of all its stages (Graham, 1969: where stages have the same
    ranks, at most one third above the best balance).

    Args:
        ranks: of each stage's replicas.
        sizes: bytes of the parameters that each stage updates, by name.
    """
    homes, held = dict[str, int](), Counter[int]()
    named = [(-size, name, own) for own, of in zip(ranks, sizes, strict=True)
             for name, size in of.items()]  # fmt: skip
    for size, name, own in sorted(named, key=lambda one: one[:2]):
        home = min(own, key=held.__getitem__)
        homes[name] = own.index(home)
        held[home] -= size
    return homes


@dataclass(frozen=True, slots=True)
class StageDeployment:
    """Deployment of a stage; everything that follows from these numbers alone."""

    replicas: int = 1  # which take microbatches in turn
    recompute: bool = False  # keeps the inputs of what is in flight, and runs forward again
    parts: int = 1  # ranks of a replica, which compute each microbatch together

    @property
    def ranks(self) -> int:
        """Number of ranks that the stage takes."""
        return self.replicas * self.parts

    @property
    def forwards(self) -> int:
        """Times that a microbatch goes forward."""
        return 1 + self.recompute

    def share(self, num_microbatches: int) -> int:
        """The most microbatches of a minibatch that one replica takes."""
        return -(-num_microbatches // self.replicas)

    def kept(self, in_flight: int) -> int:
        """Sets of activations that are held, of so many microbatches in flight."""
        return 1 if self.recompute else in_flight

    def again(self, forward_seconds: float) -> float:
        """Seconds of a forward that runs again before its backward."""
        return forward_seconds if self.recompute else 0.0

    def sum_seconds(self, link: Link, num_bytes: Amount) -> Amount:
        """Seconds in which the replicas sum gradients, `link` being the slowest between them."""
        return ring_seconds(link, num_bytes, self.replicas)

    def summed_bytes(self, num_bytes: int) -> int:
        """Bytes that one replica sends to sum gradients of so many."""
        return -(-2 * (self.replicas - 1) * num_bytes // self.replicas)


def stage_limits(cluster: Cluster, ranks: Sequence[int]) -> tuple[StageLimits, ...]:
    """Limits of each pipeline position when stage s runs on device `ranks`[s].

    The last position has no next: it repeats the link before it.
    """
    links = [cluster.level_between(a, b) for a, b in pairwise(ranks)]
    links = links + links[-1:] or [cluster.levels[0]]
    limits = []
    for rank, link in zip(ranks, links, strict=True):
        device = cluster.devices[rank]
        limits.append(
            StageLimits(
                speed=device.speed,
                memory_bytes=device.memory_bytes,
                bytes_per_second=link.bytes_per_second,
                full_duplex=link.full_duplex,
                latency_seconds=link.latency_seconds,
            )
        )
    return tuple(limits)
