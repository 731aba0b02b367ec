"""Small profiles at random, all of their plans, and PipeDream's recursion written out."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from benchmarks.published.pipedream_model import HierarchyProblem, ProfileGraph, ProfileNode
from benchmarks.published.solution import LevelSolution


def random_graph(seed: int, size: int, *, zeros: float = 0.3) -> ProfileGraph:
    """A DAG of `size` nodes, some without time, parameters or activation."""
    draw = random.Random(seed)

    def amount(scale: float) -> float:
        return 0.0 if draw.random() < zeros else round(scale * draw.uniform(0.1, 2), 3)

    nodes = tuple(
        ProfileNode(f"node{v}", "Layer", amount(1), amount(2), amount(4), amount(6))
        for v in range(size)
    )
    density = draw.choice([0.2, 0.4, 0.7])
    edges = tuple(
        (u, v)
        for v in range(size)
        for u in range(v)
        if draw.random() < (0.9 if u == v - 1 else density) * draw.choice([0.5, 1])
    )
    return ProfileGraph(nodes, edges)


def down_sets(graph: ProfileGraph) -> list[frozenset[int]]:
    """All down-closed sets of node indices, by size."""
    before: dict[int, set[int]] = {v: set() for v in range(len(graph.nodes))}
    for source, target in graph.edges:
        before[target].add(source)
    found = {frozenset[int]()}
    queue = [frozenset[int]()]
    for here in queue:
        for v in set(before) - here:
            larger = here | {v}
            if before[v] <= here and larger not in found:
                found.add(larger)
                queue.append(larger)
    return sorted(found, key=lambda s: (len(s), sorted(s)))


def plans(problem: HierarchyProblem) -> Iterator[tuple[LevelSolution, ...]]:
    """Every nested plan: chains of down-closed sets, replicas, and insides of each stage."""
    sets = down_sets(problem.graph)
    everything = sets[-1]
    names = [node.id for node in problem.graph.nodes]
    cache: dict[tuple[frozenset[int], frozenset[int], int], list[tuple[LevelSolution, ...]]] = {}

    def inside(
        start: frozenset[int], end: frozenset[int], depth: int
    ) -> list[tuple[LevelSolution, ...]]:
        if depth < 0:
            return [()]
        key = (start, end, depth)
        if key not in cache:
            cache[key] = list(chains(start, end, depth, problem.levels[depth][0]))
        return cache[key]

    def chains(
        start: frozenset[int], end: frozenset[int], depth: int, count: int
    ) -> Iterator[tuple[LevelSolution, ...]]:
        if start == end:
            yield ()
            return
        for middle in sets:
            if not (start < middle <= end):
                continue
            members = tuple(names[v] for v in sorted(middle - start))
            for m in range(1, (1 if problem.straight else count) + 1):
                if m > count:
                    break
                for rest in chains(middle, end, depth, count - m):
                    for inner in inside(start, middle, depth - 1):
                        yield (LevelSolution(members, m, inner), *rest)

    yield from chains(sets[0], everything, len(problem.levels) - 1, problem.levels[-1][0])


def recursion(problem: HierarchyProblem, states: list[frozenset[int]]) -> float:
    """PipeDream's recursion over nested states (the empty set first), up to m components."""
    graph = problem.graph
    size = len(states)
    cut = [boundary(graph, s) for s in states]
    cut[-1] = 0.0
    ratio = problem.activation_compression

    def total(i: int, j: int, amount: str) -> float:
        return math.fsum(getattr(graph.nodes[v], amount) for v in states[j] - states[i])

    pairs = [(i, j) for j in range(size) for i in range(j) if states[i] < states[j]]
    seconds = {(i, j): total(i, j, "seconds") for i, j in pairs}
    heavy = {(i, j): total(i, j, "parameter_bytes") for i, j in pairs}
    workers = 1
    for count, bandwidth in problem.levels:
        most = 1 if problem.straight else count
        best: dict[tuple[int, int, int], float] = {}
        for i, j in pairs:
            for m in range(1, count + 1):
                options = [best[i, j, m - 1]] if m > 1 else []
                if m <= most:
                    reduced = 4 * (m - 1) * heavy[i, j] / (bandwidth * m) / workers
                    options.append((seconds[i, j] + reduced) / m)
                for k in range(i + 1, j):
                    if (i, k) not in seconds or (k, j) not in seconds:
                        continue
                    for last in range(1, min(most, m - 1) + 1):
                        reduced = 4 * (last - 1) * heavy[k, j] / (bandwidth * last)
                        terms = [best[i, k, m - last], (seconds[k, j] + reduced) / last]
                        if ratio is not None:
                            terms += [2 * cut[c] / (bandwidth * last) / ratio for c in (k, j)]
                        options.append(max(terms))
                best[i, j, m] = min(options)
        seconds = {(i, j): best[i, j, count] for i, j in pairs}
        workers *= count
    return seconds[0, size - 1]


def boundary(graph: ProfileGraph, done: frozenset[int]) -> float:
    """Bytes of the augmented antichain at the cut after `done`."""
    after: dict[int, set[int]] = {v: set() for v in range(len(graph.nodes))}
    history: dict[int, set[int]] = {v: {v} for v in range(len(graph.nodes))}
    for source, target in sorted(graph.edges, key=lambda edge: edge[1]):
        after[source].add(target)
        history[target] |= history[source]
    counted = set()
    for v in done:
        if not after[v] & done:
            counted |= {v} | {u for u in history[v] - {v} if not after[u] <= history[v]}
    return math.fsum(graph.nodes[v].activation_bytes for v in counted)
