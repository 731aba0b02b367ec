"""In which order the pipeline may take the cluster's devices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from pdcompile.cluster import Cluster, Device

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
    count = math.factorial(len(cluster.devices)) if len(cluster.devices) < 1_000 else math.inf
    if len(classes) > 1 and count != math.inf:
        for ranks in classes.values():
            count //= math.factorial(len(ranks))
    if len(classes) == 1:
        return (tuple(range(len(cluster.devices))),), True
    if count <= MAX_ARRANGEMENTS:
        return tuple(_all(tuple(map(tuple, classes.values())))), True
    every = range(len(cluster.devices))
    found = [tuple(every)]
    for sign in (1, -1):
        for rule in (_speed, _memory):
            keys = {rank: sign * rule(cluster, rank) for rank in every}
            found.append(tuple(sorted(every, key=keys.__getitem__)))
    return tuple(dict.fromkeys(found)), False


def _speed(cluster: Cluster, rank: int) -> float:
    return cluster.devices[rank].speed


def _memory(cluster: Cluster, rank: int) -> float:
    limit = cluster.devices[rank].memory_bytes
    return math.inf if limit is None else float(limit)


def _all(classes: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, ...]]:
    """Every interleaving of the classes, the one in rank order first."""
    if not any(classes):
        yield ()
        return
    for first in sorted((ranks for ranks in classes if ranks), key=lambda ranks: ranks[0]):
        rest = tuple(ranks[1:] if ranks is first else ranks for ranks in classes)
        for following in _all(rest):
            yield (first[0], *following)
