"""The problem as the solvers see it: groups instead of items, flows instead of values.

Nothing is lost: items that must share a stage (given so, or in a cycle of precedence) become
one group, values with the same ends become one flow, pins become ranges of stages.  A flow is
either a value or a shared trainable parameter: it starts at the first stage that holds one of
its `sources` and goes to every other stage that holds one of its `sinks`.  Only `contracted`,
for very large problems, is not exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from pdcompile.cluster import Link, message_seconds
from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition import lattice
from pdcompile.problem import Item, PartitionProblem

T = TypeVar("T", int, float)
RUN = 64  # groups that are moved over a boundary together, at most


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes of one microbatch between groups, and how many messages they are.

    `received_bytes` is what a receiver keeps.  `tied`: a shared parameter, whose sums and new
    weights go once a minibatch, an m-th part of them with each of m microbatches: they load the
    links, but compute does not wait for them.
    """

    sources: tuple[int, ...]
    sinks: tuple[int, ...]
    forward_bytes: float
    backward_bytes: float
    forward_messages: float
    backward_messages: float
    received_bytes: int = 0
    tied: bool = False

    @property
    def returned_bytes(self) -> float:
        """Bytes that a receiver of gradients keeps for the next backward."""
        return 0.0 if self.tied else self.backward_bytes

    def forward_seconds(self, link: Link) -> float:
        return message_seconds(link, self.forward_bytes, self.forward_messages)

    def backward_seconds(self, link: Link) -> float:
        return message_seconds(link, self.backward_bytes, self.backward_messages)


@dataclass(frozen=True, slots=True)
class Copy:
    """A shared parameter, on every stage that holds one of its groups; the first updates it."""

    ends: tuple[int, ...]
    bytes: int
    trainable: bool


@dataclass(frozen=True, slots=True)
class Model:
    """Groups 0 … n−1 in a topological order; seconds at speed 1, bytes with all copies.

    `lowest` and `highest` bound each group's stage.  `arcs` are precedence pairs, `apart` pairs on
    different stages, `copies` shared parameters.
    """

    problem: PartitionProblem
    members: tuple[tuple[int, ...], ...]  # items of each group
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    trainable_bytes: tuple[int, ...]
    frozen_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    flows: tuple[Flow, ...]
    copies: tuple[Copy, ...]
    arcs: tuple[tuple[int, int], ...]
    apart: tuple[tuple[int, int], ...]
    lowest: tuple[int, ...]
    highest: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        return len(self.members)

    @property
    def num_stages(self) -> int:
        return len(self.problem.stages)

    def fixed_bytes(self, group: int, stage: int) -> float:
        """Bytes of a group's own parameters on a stage, with gradients and optimizer state."""
        held = self.problem.holding(stage)
        return (
            self.trainable_bytes[group] * (held.versions + held.updated) + self.frozen_bytes[group]
        )

    def held_bytes(self, copy: Copy, stage: int) -> int:
        """Bytes that a shared parameter takes on a stage that holds it."""
        return copy.bytes * (self.problem.holding(stage).versions if copy.trainable else 1)

    def updated_bytes(self, copy: Copy, stage: int) -> float:
        """Bytes that it takes besides on the stage that updates it."""
        return copy.bytes * self.problem.holding(stage).updated if copy.trainable else 0.0

    def items_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """The stage of every item, given that of every group."""
        result = [0] * len(self.problem.items)
        for group, stage in zip(self.members, stages, strict=True):
            for item in group:
                result[item] = stage
        return tuple(result)

    def groups_of(self, stage_of: Sequence[int]) -> tuple[int, ...]:
        """The stage of every group, given that of every item: that of its first one."""
        return tuple(stage_of[members[0]] for members in self.members)


def build(problem: PartitionProblem, blocks: Iterable[Sequence[int]] = ()) -> Model:
    """Reduce the problem; `blocks` are further items to fuse (not exact: for upper bounds).

    Raises:
        InfeasibleError: constraints contradict each other.
    """
    n = len(problem.items)
    arcs = {(t.producer, c) for t in problem.traffic for c in t.consumers} | set(problem.order)
    bound = [pair for group in (*problem.together, *blocks) for pair in pairwise(group)]
    _, after = lattice.neighbours(n, [*sorted(arcs), *bound, *((b, a) for a, b in bound)])
    group_of, pairs = lattice.contracted(after)
    members: list[list[int]] = [[] for _ in range(max(group_of, default=-1) + 1)]
    for item, group in enumerate(group_of):
        members[group].append(item)
    lowest, highest = _ranges(problem, members, group_of, pairs)
    apart = {tuple(sorted((group_of[a], group_of[b]))) for a, b in problem.apart}
    for pair in problem.apart:
        if group_of[pair[0]] == group_of[pair[1]]:
            raise _inseparable(problem, pair)
    items = [[problem.items[i] for i in group] for group in members]

    def total(value: Callable[[Item], T]) -> tuple[T, ...]:
        return tuple(sum(map(value, group)) for group in items)

    return Model(
        problem=problem,
        members=tuple(map(tuple, members)),
        forward=total(lambda one: one.forward_seconds),
        backward=total(lambda one: one.backward_seconds),
        trainable_bytes=total(lambda one: one.trainable_bytes),
        frozen_bytes=total(lambda one: one.parameter_bytes - one.trainable_bytes),
        saved_bytes=total(lambda one: one.saved_bytes),
        workspace_bytes=tuple(max(one.workspace_bytes for one in group) for group in items),
        flows=_flows(problem, group_of),
        copies=tuple(
            Copy(ends, p.bytes, p.trainable)
            for p in problem.shared
            if len(ends := _unique(group_of[i] for i in p.items)) > 0
        ),
        arcs=pairs,
        apart=tuple((a, b) for a, b in sorted(apart)),
        lowest=lowest,
        highest=highest,
    )


def _inseparable(problem: PartitionProblem, pair: tuple[int, int]) -> InfeasibleError:
    """The error where two items are to be apart, and are bound to one stage."""
    asked = [wish.text for wish in problem.wishes if pair in wish.apart]
    bound = [one for one in problem.together if {*pair} <= {*one}]
    why = [wish.text for wish in problem.wishes if not {*wish.together}.isdisjoint(bound)]
    names = " and ".join(repr(problem.items[i].name) for i in pair)
    return InfeasibleError(
        f"{names} are asked to be apart{''.join(f' by {text}' for text in asked[:1])}, and must "
        f"share a stage{''.join(f' by {text}' for text in why[:1])}"
        + ("" if bound else ", as what stays together lies on both sides of one of them"),
        remedy="drop one of the constraints",
    )


def _unique(groups: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(groups)))


def _flows(problem: PartitionProblem, group_of: Sequence[int]) -> tuple[Flow, ...]:
    merged: dict[tuple[tuple[int, ...], tuple[int, ...], bool], list[float]]
    merged = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0, 0.0])
    for value in problem.traffic:
        source = group_of[value.producer]
        sinks = _unique(g for c in value.consumers if (g := group_of[c]) != source)
        if sinks:
            f, b = value.forward_bytes, value.backward_bytes
            row = merged[(source,), sinks, False]
            for i, amount in enumerate((float(f), float(b), 1.0, float(b > 0), float(f))):
                row[i] += amount
    m = problem.num_microbatches
    for parameter in problem.shared:
        ends = _unique(group_of[i] for i in parameter.items)
        if parameter.trainable and len(ends) > 1:
            row = merged[ends, ends, True]
            for i, amount in enumerate((parameter.bytes / m, parameter.bytes / m, 1 / m, 1 / m)):
                row[i] += amount
    return tuple(
        Flow(sources, sinks, row[0], row[1], row[2], row[3], int(row[4]), tied)
        for (sources, sinks, tied), row in sorted(merged.items())
    )


def _ranges(
    problem: PartitionProblem,
    members: list[list[int]],
    group_of: Sequence[int],
    pairs: Sequence[tuple[int, int]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    n, last = len(members), len(problem.stages) - 1
    lowest, highest = [0] * n, [last] * n
    pinned: dict[int, tuple[int, int]] = {}  # group: item and stage
    for item, stage in problem.pins:
        group, name = group_of[item], problem.items[item].name
        if not 0 <= stage <= last:
            raise InfeasibleError(
                f"{name!r} is pinned to stage {stage} of {last + 1}",
                remedy=f"pin it to a stage from 0 to {last}",
            )
        other, before = pinned.setdefault(group, (item, stage))
        if before != stage:
            what = f"{name!r} to stage {stage}, and they must share a stage"
            what = what if other != item else f"and to stage {stage}"
            raise InfeasibleError(
                f"contradictory pins: {problem.items[other].name!r} to stage {before}, {what}",
                remedy="drop one of the pins",
            )
        lowest[group] = highest[group] = stage
    narrow(lowest, highest, pairs)
    for group in range(n):
        if lowest[group] > highest[group]:
            raise InfeasibleError(
                f"contradictory pins: {problem.items[members[group][0]].name!r} can be neither "
                f"before stage {lowest[group]} nor after stage {highest[group]}",
                remedy="pins must not decrease along the flow of data",
            )
    return tuple(lowest), tuple(highest)


def narrow(lowest: list[int], highest: list[int], arcs: Sequence[tuple[int, int]]) -> None:
    """Keep the ranges of stages to what these arcs leave, which are sorted."""
    for a, b in arcs:
        lowest[b] = max(lowest[b], lowest[a])
    for a, b in reversed(arcs):
        highest[a] = min(highest[a], highest[b])


def moves(
    arcs: Sequence[tuple[int, int]], stages: Sequence[int], num_stages: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """(groups, stage beside theirs that they may go to): each that no neighbour on its stage holds
    back, and 2, 3, 5, 8, … at an end of a stage."""
    own = np.asarray(stages)
    before, after = np.array(arcs, dtype=np.intp).reshape(-1, 2).T
    first, last = np.full(len(own), own.max() + 2), np.full(len(own), -2)  # of neighbours
    np.minimum.at(first, before, own[after])
    np.maximum.at(last, after, own[before])
    for v, s in enumerate(own.tolist()):
        if s < min(first[v], num_stages - 1):
            yield (v,), s + 1
        if s > max(last[v], 0):
            yield (v,), s - 1
    for s in range(num_stages - 1):
        for side, to in ((s, s + 1), (s + 1, s)):
            held, count = np.flatnonzero(own == side).tolist(), 2
            while count < min(len(held), RUN + 1):
                yield tuple(held[-count:] if to > side else held[:count]), to
                count = (3 * count + 1) // 2


def after(groups: Sequence[int], moved: Iterable[int], to: int) -> tuple[int, ...]:
    """The stages of groups after such a move."""
    other = list(groups)
    for v in moved:
        other[v] = to
    return tuple(other)


def contracted(model: Model, limit: int, coarse: int) -> Model:
    """The model itself when it has at most `limit` groups, else one with about `coarse`.

    In the given order the cheapest position of every block of equal length, and the cheapest of
    all, stay as places for a cut; what lies between becomes one group.
    """
    n = model.num_groups
    if n <= limit:
        return model
    limit = min(limit, coarse)
    crossing = _crossing(model)
    blocks = limit // 2
    edges = [n * i // blocks for i in range(blocks + 1)]
    kept = {
        min(range(max(a, 1), b), key=lambda i: (crossing[i], i))
        for a, b in pairwise(edges)
        if b > max(a, 1)
    }
    for position in sorted(range(1, n), key=lambda i: (crossing[i], i)):
        if len(kept) >= limit - 1:
            break
        kept.add(position)
    pinned = {v for v in range(n) if model.lowest[v] == model.highest[v]}
    kept |= {p for v in pinned for p in (v, v + 1) if 0 < p < n and len(pinned) < limit // 4}
    for a, b in model.apart:
        if not any(p in kept for p in range(a + 1, b + 1)):
            kept.add(b)
    return fused(model, sorted(kept))


def fused(model: Model, places: Sequence[int]) -> Model:
    """The model with one group of all that lies between two places of its order."""
    cuts = [0, *places, model.num_groups]
    blocks = [[item for group in model.members[a:b] for item in group] for a, b in pairwise(cuts)]
    return build(model.problem, blocks)


def _crossing(model: Model) -> list[float]:
    """Bytes that cross each position of the given order."""
    steps = [0.0] * (model.num_groups + 1)
    for flow in model.flows:
        if not flow.tied:
            size = flow.forward_bytes + flow.backward_bytes
            steps[flow.sources[0] + 1] += size
            steps[max(flow.sinks) + 1] -= size
    return list(accumulate(steps))


def all_ideals(
    model: Model, limit: int, late: Callable[[], bool] = lambda: False
) -> list[int] | None:
    """Every ideal as a bit mask, smaller ones first; None when there are more than `limit`, or
    `late` ends the listing."""
    return lattice.down_closed(*lattice.neighbours(model.num_groups, model.arcs), limit, late=late)


def nearest(places: Iterable[int], stage_of: Sequence[int], most: int) -> list[int]:
    """Nearest of these places between items, so many, to where an assignment is cut."""
    ends = np.flatnonzero(np.diff(stage_of)) + 1
    return sorted(sorted(places, key=lambda place: int(np.abs(ends - place).min()))[:most])


def between(problem: PartitionProblem, places: Sequence[int]) -> Model:
    """The model whose groups are the items from one of these places to the next.

    Raises:
        InfeasibleError: what is to be apart lies between two of them.
    """
    runs = pairwise((0, *places, len(problem.items)))
    return build(problem, [range(*run) for run in runs])


def positions(model: Model) -> list[int]:
    """The ideals that hold the first groups of the given order, as bit masks."""
    return [(1 << k) - 1 for k in range(model.num_groups + 1)]
