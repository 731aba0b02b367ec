"""Groups of the nodes of a file: what every contiguous answer keeps on one device.

The order that a pipeline has to keep, and the cost of a value as a set of pins, are explained
with `grouped`.  The reductions after it cannot lose the optimum either.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from benchmarks.published.placement.placements import Placement, neighbours
from benchmarks.published.placement_model import LoadProblem, PlacementProblem
from pdcompile.passes.partition.lattice import contracted


def grouped(problem: PlacementProblem) -> LoadProblem:
    """The same problem over groups of nodes; no contiguous answer is lost, none is gained.

    1. Nodes of one colour share a device.
    2. A forward to forward edge orders its ends.  Other edges order nothing (backward nodes run
       the pipeline in reverse, wherever their partners are), except backward to backward edges
       with an end that has no forward partner (no forward node in its colour): these order their
       ends in reverse.
    3. stage(a) ≤ stage(b) ≤ stage(a) means one stage, hence a strongly connected component is one
       group, and what remains has no cycle.
    4. A device pays a value once if it holds the producer and not all consumers (out), once if it
       holds some consumer and not the producer (in): once when it holds some of the pins
       {producer, consumers} but not all.  Values with one pin or no cost vanish, those with equal
       pins add up.
    """
    nodes = problem.nodes
    color_of = _numbered(
        (("color", node.color) if node.color is not None else ("node", i))
        for i, node in enumerate(nodes)
    )
    colors = max(color_of, default=-1) + 1
    partnered = [False] * colors
    for node, color in zip(nodes, color_of, strict=True):
        partnered[color] |= not node.backward
    after: list[set[int]] = [set() for _ in range(colors)]
    for edge in problem.edges:
        source, target = nodes[edge.source], nodes[edge.target]
        a, b = color_of[edge.source], color_of[edge.target]
        if not source.backward and not target.backward:
            after[a].add(b)
        elif source.backward and target.backward and not (partnered[a] and partnered[b]):
            after[b].add(a)
    part, arcs = contracted(after)
    values: dict[int, list[int]] = {}
    cost: dict[int, float] = {}
    for edge in problem.edges:
        if edge.cost > 0:
            values.setdefault(edge.source, [edge.source]).append(edge.target)
            cost[edge.source] = edge.cost
    return _joined(
        [part[color] for color in color_of],
        LoadProblem(
            seconds=tuple(node.seconds for node in nodes),
            sizes=tuple(node.size for node in nodes),
            arcs=arcs,
            pins=tuple(map(tuple, values.values())),
            costs=tuple(cost.values()),
            classes=problem.classes,
            members=tuple((i,) for i in range(len(nodes))),
        ),
    )


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _joined(group_of: Sequence[int], parts: LoadProblem) -> LoadProblem:
    """The problem with its groups summed up to larger ones; `parts.arcs` are those already."""
    groups: list[list[int]] = [[] for _ in range(max(group_of, default=-1) + 1)]
    for v, group in enumerate(group_of):
        groups[group].append(v)
    total: dict[tuple[int, ...], list[float]] = {}
    for pins, cost in zip(parts.pins, parts.costs, strict=True):
        held = tuple(sorted({group_of[v] for v in pins}))
        if len(held) > 1:
            total.setdefault(held, []).append(cost)
    kinds = range(len(parts.classes))
    return LoadProblem(
        seconds=tuple(
            tuple(math.fsum(parts.seconds[v][c] for v in group) for c in kinds) for group in groups
        ),
        sizes=tuple(math.fsum(parts.sizes[v] for v in group) for group in groups),
        arcs=parts.arcs,
        pins=tuple(sorted(total)),
        costs=tuple(math.fsum(total[pins]) for pins in sorted(total)),
        classes=parts.classes,
        members=tuple(
            tuple(sorted(i for v in group for i in parts.members[v])) for group in groups
        ),
    )


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
    part, arcs = contracted(after)
    return _joined(part, replace(problem, arcs=arcs))


def memory_problem(problem: LoadProblem) -> tuple[LoadProblem, float]:
    """(problem, limit): the placements that fit are those of `problem` with objective ≤ limit.

    The load of a device is the memory it holds; where classes have unlike limits, in parts of
    the first one's.
    """
    total = math.fsum(problem.sizes)
    bounded = [kind.memory for kind in problem.classes if kind.count and kind.memory < total]
    limit = bounded[0] if bounded else total

    def amount(v: int, c: int) -> float:
        memory, size = problem.classes[c].memory, problem.sizes[v]
        if math.isinf(problem.seconds[v][c]):
            return math.inf
        if memory >= total:
            return 0.0
        if memory == limit or size == 0:
            return size
        return size * (limit / memory) if memory > 0 else math.inf

    groups, kinds = range(len(problem.sizes)), range(len(problem.classes))
    roomy = [replace(kind, memory=math.inf, transfers=False) for kind in problem.classes]
    memory = replace(
        problem,
        seconds=tuple(tuple(amount(v, c) for c in kinds) for v in groups),
        sizes=(0.0,) * len(groups),
        pins=(),
        costs=(),
        classes=tuple(roomy),
    )
    return memory, limit


def lifted(small: LoadProblem, large: LoadProblem, placement: Placement) -> Placement:
    """A placement of merged groups as one of the groups they were merged from."""
    stage = {v: placement.stage_of[g] for g, group in enumerate(small.members) for v in group}
    return Placement(tuple(stage[group[0]] for group in large.members), placement.kinds)
