"""Reductions of a LoadProblem that cannot lose the optimum.

R0, colours, components and equal pin sets, is part of what a LoadProblem is (`group.grouped`);
R3, transitive reduction, is `group.reduced`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pdcompile.passes.published.placement.group import components, reduced, topological
from pdcompile.passes.published.placement.loads import neighbours
from pdcompile.passes.published.placement_file import LoadProblem

MARGIN = 1e-9  # relative; a sum has to exceed the limit by it before anything is concluded


def without_zeros(problem: LoadProblem) -> LoadProblem:
    """R1: a group that costs nothing joins its only predecessor, or its only successor.

    Let v take no time wherever its neighbour nb runs, no memory that could matter, and let nb be
    its only direct predecessor (or successor).  Let c2 be the cost of the value with the pins
    {v, nb}, co that of all values with v and without nb.  If c2 ≥ co, some best placement has v
    on nb's stage.  Moving it there keeps the order, because all other neighbours lie on the
    other side.  The stage of nb gains at most co and loses c2; the stage that v leaves loses c2
    and gains at most co; values with v, nb and others were split already and are paid by no
    further stage; third stages hold neither.
    """
    while True:
        merged = _zero_pairs(problem)
        if not merged:
            return problem
        problem = merge(problem, merged)


def _zero_pairs(problem: LoadProblem) -> list[tuple[int, int]]:
    """Disjoint pairs (v, nb) as in `without_zeros`."""
    before, after = neighbours(problem)
    touching = _touching(problem)
    total = math.fsum(problem.sizes)
    loose = all(kind.memory >= total for kind in problem.classes)
    taken: set[int] = set()
    found = []
    for v, row in enumerate(problem.seconds):
        if v in taken or any(0 < s < math.inf for s in row) or (problem.sizes[v] and not loose):
            continue
        for near in (before[v], after[v]):
            if len(near) != 1 or near[0] in taken:
                continue
            nb = near[0]
            if any(
                math.isinf(a) and math.isfinite(b)
                for a, b in zip(row, problem.seconds[nb], strict=True)
            ):
                continue
            pair = math.fsum(
                problem.costs[e] for e in touching[v] if set(problem.pins[e]) == {v, nb}
            )
            other = math.fsum(problem.costs[e] for e in touching[v] if nb not in problem.pins[e])
            if pair >= other:
                found.append((v, nb))
                taken |= {v, nb}
                break
    return found


def together(problem: LoadProblem, upper: float) -> LoadProblem:
    """R2: groups that no placement with all loads ≤ `upper` separates become one.

    A stage with p and without q, of a class with transfers, pays p and every value that has both
    as pins.  If that exceeds `upper`, and so does p alone on every class without transfers, then
    p and q share a stage wherever all loads are ≤ `upper`.  Such placements are neither lost nor
    gained; others may be lost.
    """
    while True:
        pairs = _inseparable(problem, upper * (1 + MARGIN))
        if not pairs:
            return problem
        problem = merge(problem, pairs)


def _inseparable(problem: LoadProblem, upper: float) -> list[tuple[int, int]]:
    paying = [c for c, kind in enumerate(problem.classes) if kind.transfers and kind.count]
    free = [c for c, kind in enumerate(problem.classes) if not kind.transfers and kind.count]
    bound = [
        min((row[c] for c in paying), default=math.inf)
        if all(row[c] > upper for c in free)
        else -math.inf
        for row in problem.seconds
    ]
    touching = _touching(problem)
    found = []
    for p, least in enumerate(bound):
        if least == -math.inf or least + math.fsum(problem.costs[e] for e in touching[p]) <= upper:
            continue
        shared: dict[int, list[float]] = {}
        for e in touching[p]:
            for q in problem.pins[e]:
                shared.setdefault(q, []).append(problem.costs[e])
        found += [
            (p, q) for q, costs in shared.items() if q != p and least + math.fsum(costs) > upper
        ]
    return found


def _touching(problem: LoadProblem) -> list[list[int]]:
    touching: list[list[int]] = [[] for _ in problem.sizes]
    for e, pins in enumerate(problem.pins):
        for v in pins:
            touching[v].append(e)
    return touching


def merge(problem: LoadProblem, pairs: Sequence[tuple[int, int]]) -> LoadProblem:
    """Both groups of every pair on one stage, and whatever the order then forces with them."""
    after: list[set[int]] = [set() for _ in problem.sizes]
    for a, b in [*problem.arcs, *pairs, *((b, a) for a, b in pairs)]:
        after[a].add(b)
    part_of = components([sorted(following) for following in after])
    parts: list[list[int]] = [[] for _ in range(max(part_of) + 1)]
    for v, part in enumerate(part_of):
        parts[part].append(v)
    arcs = {(part_of[a], part_of[b]) for a, b in problem.arcs if part_of[a] != part_of[b]}
    order = topological(len(parts), arcs, [part[0] for part in parts])
    place = {part: i for i, part in enumerate(order)}
    group_of = [place[part] for part in part_of]
    total: dict[tuple[int, ...], list[float]] = {}
    for pins, cost in zip(problem.pins, problem.costs, strict=True):
        held = tuple(sorted({group_of[v] for v in pins}))
        if len(held) > 1:
            total.setdefault(held, []).append(cost)
    groups = [parts[part] for part in order]
    kinds = range(len(problem.classes))

    def summed(value: Callable[[int], float]) -> tuple[float, ...]:
        return tuple(math.fsum(value(v) for v in group) for group in groups)

    return LoadProblem(
        seconds=tuple(
            tuple(math.fsum(problem.seconds[v][c] for v in group) for c in kinds)
            for group in groups
        ),
        sizes=summed(problem.sizes.__getitem__),
        arcs=reduced(len(order), sorted((place[a], place[b]) for a, b in arcs)),
        pins=tuple(sorted(total)),
        costs=tuple(math.fsum(total[pins]) for pins in sorted(total)),
        classes=problem.classes,
        members=tuple(
            tuple(sorted(i for v in group for i in problem.members[v])) for group in groups
        ),
    )
