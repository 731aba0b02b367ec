"""Levels of a cluster, found in how long messages take between each pair of devices.

Pairs are sorted by the time of a message, and divided where it jumps: devices that are joined by
links below a jump form blocks.  A jump makes a level where its blocks are what a cluster can say:
equally large, of consecutive ranks, each inside of one of the next level.  That is single-linkage
clustering (Sneath 1957), cut at its gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pdcompile.cluster import NETWORK, Level

JUMP = 1.5  # between times of neighbours in the sorted list: less is noise, or one kind of link
MESSAGE_BYTES = 1_000_000  # whose time is compared
UNLIKE = 3.0  # times of pairs of one level: more is told, and no noise
EQUAL_RATE = 0.8  # of a link alone: less where all send at once means that they share it
HALF = 0.65  # of a link alone: less where both ends send means half duplex

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Measurements between each pair of ranks, one pair at a time; symmetric.

    Args:
        latency_seconds: of a message of few bytes, one way.
        bytes_per_second: of a large one.
        both_ways: the same rate where the other end sends too.
    """

    latency_seconds: Matrix
    bytes_per_second: Matrix
    both_ways: Matrix

    @property
    def size(self) -> int:
        return len(self.latency_seconds)

    def seconds(self, a: int, b: int) -> float:
        """Seconds of a message of `MESSAGE_BYTES`."""
        return self.latency_seconds[a][b] + MESSAGE_BYTES / self.bytes_per_second[a][b]


def block_sizes(times: PairTimes) -> tuple[int, ...]:
    """Devices in a block of each level, innermost first; the last one is all of them."""
    n = times.size
    pairs = sorted((times.seconds(a, b), a, b) for a in range(n) for b in range(a + 1, n))
    found: list[int] = []
    block = list(range(n))  # of each rank the least rank that it is joined to

    for k, (seconds, a, b) in enumerate(pairs):
        old, new = max(block[a], block[b]), min(block[a], block[b])
        block = [new if one == old else one for one in block]
        following = pairs[k + 1][0] if k + 1 < len(pairs) else math.inf
        if following > JUMP * seconds:
            size, inner = _regular(block), found[-1] if found else 1
            if size > inner and size % inner == 0:
                found.append(size)
    if not found or found[-1] != n:
        found.append(n)
    while len(found) > 1 and found[-1] % found[-2]:
        del found[-2]
    return tuple(found)


def _regular(block: Sequence[int]) -> int:
    """The size of the blocks where all have the same and are of consecutive ranks; else 0."""
    size = block.count(0)
    if len(block) % size:
        return 0
    expected = [rank - rank % size for rank in range(len(block))]
    return size if list(block) == expected else 0


def level_pairs(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The pairs of ranks that each level joins."""
    n, found = sizes[-1], []
    for inner, outer in zip((1, *sizes), sizes, strict=False):
        found.append(
            [
                (a, b)
                for a in range(n)
                for b in range(a + 1, n)
                if a // outer == b // outer and a // inner != b // inner
            ]
        )
    return found


def partner(rank: int, inner: int, outer: int) -> tuple[int, int]:
    """(to, from): whom a rank sends to and receives from when all of a level send at once: its
    place in the next block, around."""
    begin = rank - rank % outer
    return begin + (rank - begin + inner) % outer, begin + (rank - begin - inner) % outer


def levels(
    times: PairTimes, sizes: Sequence[int], at_once: Sequence[float], hosts: Sequence[str] = ()
) -> tuple[tuple[Level, ...], tuple[str, ...]]:
    """Levels as a cluster has them, and notes on what was measured.

    Args:
        at_once: bytes per second of a device on each level, while all devices send on it.
        hosts: of each rank; levels inside of hosts are called ``host``, others ``network``.
    """
    found, notes, names = [], [], level_names(sizes, hosts)
    for k, pairs in enumerate(level_pairs(sizes)):
        size = sizes[k] // (sizes[k - 1] if k else 1)

        def typical(matrix: Matrix, among: list[tuple[int, int]] = pairs) -> float:
            return median(matrix[a][b] for a, b in among)

        alone, both = typical(times.bytes_per_second), typical(times.both_ways)
        full = both >= HALF * alone
        shared = at_once[k] < EQUAL_RATE * (alone if full else both)
        # A half duplex link takes the sum of what both ends send.
        rate = min(alone, at_once[k] * (1 if full else 2)) if shared else alone
        found.append(
            Level(names[k], size, _rounded(rate), _rounded(typical(times.latency_seconds)), full)
        )
        seconds = sorted((times.seconds(a, b), a, b) for a, b in pairs)
        (least, *_), (most, *slow) = seconds[0], seconds[-1]
        notes.append(
            f"{names[k]}, measured: {alone / 1e9:.3g} GB/s for a pair alone, {both / 1e9:.3g} GB/s "
            f"each where both send, {at_once[k] / 1e9:.3g} GB/s each where all devices send"
            + (f", so that its bandwidth is {rate / 1e9:.3g} GB/s here" * shared)
            + (
                f"; its pairs are not alike, and the file has their median: a message of "
                f"{MESSAGE_BYTES // 10**6} MB takes {most / least:.2g} times as long between ranks "
                f"{slow[0]} and {slow[1]} as between others"
            )
            * (most > UNLIKE * least)
        )
    return tuple(found), tuple(notes)


def level_names(sizes: Sequence[int], hosts: Sequence[str]) -> list[str]:
    """``host`` for levels inside of hosts and ``network`` for others, numbered where several are
    alike."""
    kinds = [
        NETWORK if any(hosts and hosts[a] != hosts[b] for a, b in pairs) else "host"
        for pairs in level_pairs(sizes)
    ]
    return [
        kind if kinds.count(kind) == 1 else f"{kind}{kinds[: k + 1].count(kind)}"
        for k, kind in enumerate(kinds)
    ]


def _rounded(number: float) -> float:
    """Three digits: more is noise."""
    return float(f"{number:.3g}")
