"""All cuts of a graph that is a series of small parts.

An anchor is a group that is comparable with every other one (in a graph with residual adds:
nearly every group outside the attention heads).  A cut between two anchors is everything up to
the first, and a down-closed set of the groups between them.  Where these sets are few, all cuts
of the graph fit into one chain, and the best pipeline of the chain is the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdcompile.passes.published.placement.large.arrays import Arrays, Floats, Ints

MOST_IN_SEGMENT = 1500  # down-closed sets between two anchors
MOST_CUTS = 600_000
Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Segment:
    """The groups `begin` … `end` − 1: an anchor (unless it is the first segment, which has
    none) and those between it and the next.  `inside[s]` says which of the latter set s has;
    sets are in an order in which none comes before a part of it."""

    begin: int
    end: int
    has_anchor: bool
    inside: Bits

    @property
    def interior(self) -> int:
        return self.begin + self.has_anchor


@dataclass(frozen=True, slots=True)
class Unlisted:
    """A segment with too many down-closed sets to list them."""

    begin: int
    end: int
    has_anchor: bool

    @property
    def interior(self) -> int:
        return self.begin + self.has_anchor


def anchors(a: Arrays) -> Ints:
    """The groups comparable with every other, ascending; the arcs need not be reduced.

    v is such a group when from every earlier group (in topological order) an arc leads to one
    no later than v, and to every later group one from no earlier than v.
    """
    n = a.groups
    nearest_after = np.full(n, n, dtype=np.int64)
    np.minimum.at(nearest_after, a.source, a.target)
    nearest_before = np.full(n, -1, dtype=np.int64)
    np.maximum.at(nearest_before, a.target, a.source)
    forth = np.maximum.accumulate(np.concatenate(([-1], nearest_after)))[:-1]
    back = np.minimum.accumulate(np.concatenate(([n], nearest_before[::-1])))[:-1][::-1]
    place = np.arange(n)
    return np.flatnonzero((forth <= place) & (back >= place))


def segments(a: Arrays, most: int = MOST_IN_SEGMENT) -> list[Segment | Unlisted]:
    """The graph as a series of segments; those with more than `most` sets are not listed."""
    found: list[Segment | Unlisted] = []
    budget = MOST_CUTS
    marks = anchors(a).tolist()
    before: list[list[int]] = [[] for _ in range(a.groups)]
    for source, target in zip(a.source.tolist(), a.target.tolist(), strict=True):
        before[target].append(source)
    bounds = zip([0, *marks], [*marks, a.groups], strict=True)
    for number, (begin, end) in enumerate(bounds):
        interior = begin + (number > 0)
        inside = down_closed(before, interior, end, a.least, min(most, budget))
        if inside is None:
            found.append(Unlisted(begin, end, number > 0))
            continue
        budget -= len(inside)
        found.append(Segment(begin, end, number > 0, inside))
    return found


def listed(parts: list[Segment | Unlisted]) -> list[Segment] | None:
    """The segments, if all are listed."""
    found = [part for part in parts if isinstance(part, Segment)]
    return found if len(found) == len(parts) else None


def down_closed(
    before: Sequence[Sequence[int]], begin: int, end: int, work: Floats, most: int
) -> Bits | None:
    """[set, group]: the down-closed sets of groups begin … end − 1, by work; None: over `most`."""
    size = end - begin
    if size <= 1:
        return np.tri(size + 1, size, -1, dtype=np.bool_)
    needs = [sum(1 << (u - begin) for u in before[v] if u >= begin) for v in range(begin, end)]
    seen = {0}
    layer = [0]
    while layer:
        following = set()
        for mask in layer:
            for v, need in enumerate(needs):
                if not mask >> v & 1 and need & ~mask == 0:
                    following.add(mask | 1 << v)
        seen |= following
        if len(seen) > most:
            return None
        layer = sorted(following)
    count = (size + 7) // 8
    packed = np.frombuffer(
        b"".join(mask.to_bytes(count, "little") for mask in seen), dtype=np.uint8
    )
    bits = np.unpackbits(packed.reshape(-1, count), axis=1, bitorder="little")[:, :size]
    # Whole numbers add up alike in any order, so that a set never sorts before a part of it.
    here = work[begin:end]
    total = float(here.sum())
    share = here / total if total > 0 else np.zeros(size)
    whole = np.floor(share * 2.0**50).astype(np.int64)
    order = np.lexsort((bits.sum(axis=1), bits.astype(np.int64) @ whole))
    return np.asarray(bits[order], dtype=np.bool_)
