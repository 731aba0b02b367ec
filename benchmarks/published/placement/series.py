"""All cuts of a graph that is a series of small parts, with the exact load of every stage.

An anchor is a group that is comparable with every other one (in a graph with residual adds:
nearly every group outside the attention heads).  A cut between two anchors is everything up to
the first, and a down-closed set of the groups between them.  Where these sets are few, all cuts
of the graph fit into one chain, and the best pipeline of the chain is the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.published.chain_program import membership
from benchmarks.published.placement.cut_chain import (
    Arrays,
    CostSteps,
    CutChain,
    Floats,
    Ints,
    band_costs,
    chain_of,
    main_class,
    reach_of,
    speeds,
    steps_of,
)
from pdcompile.passes.partition import lattice

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
    before, _ = lattice.neighbours(a.groups, zip(a.source.tolist(), a.target.tolist(), strict=True))
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
    arcs = [(u - begin, v - begin) for v in range(begin, end) for u in before[v] if u >= begin]
    found = lattice.down_closed(*lattice.neighbours(size, arcs), most)
    if found is None:
        return None
    bits = membership(found, size)
    # Whole numbers add up alike in any order, so that a set never sorts before a part of it.
    here = work[begin:end]
    total = float(here.sum())
    share = here / total if total > 0 else np.zeros(size)
    whole = np.floor(share * 2.0**50).astype(np.int64)
    order = np.lexsort((bits.sum(axis=1), bits.astype(np.int64) @ whole))
    return np.asarray(bits[order], dtype=np.bool_)


MOST_ENTRIES = 60_000_000  # of the band: half a gigabyte for each class with transfers


@dataclass(frozen=True, slots=True)
class Series:
    """Segments with what all chains of their cuts have in common."""

    a: Arrays
    parts: list[Segment]
    first: Ints  # [segment]: its first cut; one more entry: the number of cuts
    work: Floats  # [cut]: least seconds of everything inside
    steps: CostSteps
    blocks: dict[int, Floats]  # [segment][set, set]: what the values cost; inf: not nested


def series(a: Arrays, parts: list[Segment]) -> Series:
    first = np.concatenate(([0], np.cumsum([len(part.inside) for part in parts])))
    steps, inner = steps_of_series(a, parts, first)
    blocks = {}
    for s, part in enumerate(parts):
        if part.inside.shape[1]:
            blocks[s] = block_of(a, part, inner.get(s, []))
    return Series(a, parts, first, prefix(parts, a.least), steps, blocks)


def prefix(parts: Sequence[Segment], amount: Floats) -> Floats:
    """[cut]: the summed amount of the groups inside."""
    sums, total = [], 0.0
    for part in parts:
        start = total + (float(amount[part.begin]) if part.has_anchor else 0.0)
        sums.append(start + part.inside @ amount[part.interior : part.end])
        total += float(amount[part.begin : part.end].sum())
    return np.concatenate(sums)


def series_chain(made: Series, reach: float, keep: Ints) -> CutChain | None:
    """The chain of the cuts in `keep` (ascending, the first and last among them), for loads up
    to `reach`; None when it does not fit into memory."""
    a, count = made.a, len(keep)
    work = made.work[keep]
    width = reach_of(work, reach)
    if count * width > MOST_ENTRIES:
        return None
    steps = made.steps
    moved = band_costs(
        CostSteps(
            steps.begin[keep],
            steps.end[keep],
            np.searchsorted(keep, steps.corner_begin),
            np.searchsorted(keep, steps.corner_end),
            steps.corner_cost,
        ),
        width,
    )
    _overwrite(made, keep, moved)
    # Sums are rounded unless they are whole numbers.
    total = float(a.sizes.sum())
    whole = total < 2.0**53 and bool((a.sizes == np.floor(a.sizes)).all())
    slack = 0.0 if whole else 4e-16 * a.groups * total

    def inside(amount: Floats) -> Floats:
        return np.asarray(prefix(made.parts, amount)[keep])

    return chain_of(a, reach, moved, inside, work[-1] - work, slack)


def useful(made: Series, limit: float) -> Ints:
    """The cuts that a pipeline of loads ≤ `limit` can have: with some devices of the smaller
    classes in front of it and the others behind, those of the largest one suffice."""
    a = made.a
    main = main_class(a)
    work = prefix(made.parts, a.seconds[main])
    speed = speeds(a)
    others = [
        (kind.count, limit / float(speed[c]) if speed[c] > 0 else np.inf)
        for c, kind in enumerate(a.classes)
        if c != main and kind.count
    ]
    keep = np.zeros(len(work), dtype=np.bool_)
    for before in itertools.product(*(range(count + 1) for count, _ in others)):
        done = sum(n * share for n, (_, share) in zip(before, others, strict=True) if n)
        rest = sum(
            (count - n) * share
            for n, (count, share) in zip(before, others, strict=True)
            if count > n
        )
        first = np.ceil((work - done).clip(min=0.0) / limit - 1e-6)
        second = np.ceil((work[-1] - work - rest).clip(min=0.0) / limit - 1e-6)
        keep |= first + second <= a.classes[main].count
    keep[0] = keep[-1] = True
    return np.flatnonzero(keep)


def stages_of(made: Series, cuts: Sequence[int]) -> Ints:
    """The stage of every group, for the cuts of a pipeline (numbers in the whole chain)."""
    a = made.a
    stage = np.full(a.groups, len(cuts) - 2, dtype=np.int64)
    for s in range(len(cuts) - 2, 0, -1):
        number = int(np.searchsorted(made.first, cuts[s], side="right")) - 1
        part = made.parts[number]
        inside = part.inside[cuts[s] - int(made.first[number])]
        stage[: part.interior] = s - 1
        stage[part.interior : part.end][inside] = s - 1
    return stage


def steps_of_series(
    a: Arrays, parts: list[Segment], first: Ints
) -> tuple[CostSteps, dict[int, list[int]]]:
    """The steps of all values, and the values with pins inside each segment.

    Costs of stages inside one segment are left to the blocks, so that a pair of pins inside
    the same one needs no corners there.
    """
    begins = np.array([part.begin for part in parts])
    if len(parts) > 1 and parts[1].begin == 0:
        begins[0] = -1  # the first segment is empty
    segment = np.searchsorted(begins, np.arange(a.groups), side="right") - 1
    interiors = np.array([part.interior for part in parts])
    free = interiors[segment] <= np.arange(a.groups)  # inside a segment, not an anchor
    at = first[segment]
    order = np.lexsort((a.pin_of, a.value_of))
    value_of, pin_of = a.value_of[order], a.pin_of[order]
    wild = np.zeros(len(a.costs), dtype=np.bool_)
    wild[value_of[free[pin_of]]] = True
    tame = ~wild[value_of]
    cuts = int(first[-1])
    steps = steps_of(cuts, value_of[tame], at[pin_of[tame]], a.costs)
    more = _Events(cuts)
    inner: dict[int, list[int]] = {}
    starts = np.searchsorted(value_of, np.arange(len(a.costs) + 1))
    for e in np.flatnonzero(wild).tolist():
        pins = pin_of[starts[e] : starts[e + 1]].tolist()
        changes: list[Change] = []
        k = 0
        while k < len(pins):
            s = int(segment[pins[k]])
            if not free[pins[k]]:
                changes.append((-1, first[s : s + 1], np.ones(1)))
                k += 1
                continue
            here = [p for p in pins[k:] if segment[p] == s]
            inner.setdefault(s, []).append(e)
            part = parts[s]
            number = part.inside[:, np.array(here) - part.interior].sum(axis=1)
            for t in range(1, len(here) + 1):
                change = np.diff((number >= t).astype(np.float64), prepend=0.0)
                where = np.flatnonzero(change)
                changes.append((s, where + int(first[s]), change[where]))
            k += len(here)
        more.value(changes, first, float(a.costs[e]))
    return more.added_to(steps), inner


Change = tuple[int, Ints, Floats]
"""Where an A_t steps up and down: the segment inside which it does (−1: at an anchor), the cuts,
and the signs."""


class _Events:
    def __init__(self, cuts: int) -> None:
        self.cuts = cuts
        self.begin: list[tuple[Ints, Floats]] = []
        self.end: list[tuple[Ints, Floats]] = []
        self.corners: list[tuple[Ints, Ints, Floats]] = []

    def value(self, changes: list[Change], first: Ints, cost: float) -> None:
        for _, where, sign in changes:
            self.begin.append((where, -cost * sign))
        self.end.append((changes[0][1], cost * changes[0][2]))
        self.end.append((changes[-1][1], -cost * changes[-1][2]))
        for one, two in (
            *itertools.pairwise(changes),
            (changes[0], changes[-1]),
        ):
            where, sign = two[1], two[2]
            if one[0] >= 0 and one[0] == two[0]:
                where, sign = first[one[0] + 1 : one[0] + 2], np.ones(1)
            self.corners.append(
                (
                    np.repeat(one[1], len(where)),
                    np.tile(where, len(one[1])),
                    cost * np.outer(one[2], sign).ravel(),
                )
            )

    def added_to(self, steps: CostSteps) -> CostSteps:
        if not self.begin:
            return steps
        begin, end = np.zeros(self.cuts + 1), np.zeros(self.cuts + 1)
        for sums, events in ((begin, self.begin), (end, self.end)):
            np.add.at(
                sums,
                np.concatenate([where for where, _ in events]),
                np.concatenate([cost for _, cost in events]),
            )
        corner_begin, corner_end, corner_cost = (
            np.concatenate(column) for column in zip(*self.corners, strict=True)
        )
        return CostSteps(
            steps.begin + np.cumsum(begin)[:-1],
            steps.end + np.cumsum(end)[:-1],
            np.concatenate((steps.corner_begin, corner_begin)),
            np.concatenate((steps.corner_end, corner_end)),
            np.concatenate((steps.corner_cost, corner_cost)),
        )


def block_of(a: Arrays, part: Segment, values: list[int]) -> Floats:
    """[set, set]: what the values cost a stage inside the segment; inf: not nested."""
    inside = part.inside
    less = inside.astype(np.float32)
    # groups of the first set that the second lacks
    missing = less @ (1 - less).T
    cost = np.where(missing > 0.5, np.inf, 0.0)
    for e in values:
        begin, end = np.searchsorted(a.value_of, (e, e + 1))
        pins = a.pin_of[begin:end]
        here = pins[(pins >= part.interior) & (pins < part.end)] - part.interior
        number = inside[:, here].sum(axis=1)
        held = number[None, :] - number[:, None]
        cost += a.costs[e] * ((held > 0) & (held < len(pins)))
    return cost


def _overwrite(made: Series, keep: Ints, moved: Floats) -> None:
    """Put the costs of stages inside one segment into the band."""
    bounds = np.searchsorted(keep, made.first)
    for s, block in made.blocks.items():
        low, high = int(bounds[s]), int(bounds[s + 1])
        if high - low < 2:
            continue
        chosen = keep[low:high] - int(made.first[s])
        put_block(moved, low, block[np.ix_(chosen, chosen)])


def put_block(moved: Floats, begin: int, block: Floats) -> None:
    """Put the costs of stages between the cuts from `begin` on into the band."""
    rows, columns = np.triu_indices(len(block), 1)
    near = columns - rows <= moved.shape[1]
    rows, columns = rows[near], columns[near]
    moved[rows + begin, columns - rows - 1] = block[rows, columns]
