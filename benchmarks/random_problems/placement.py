"""Random placement problems: up to six forward nodes on up to three accelerators and a CPU.

The brute force below knows only the file's nodes and edges: it tries every assignment of devices
to nodes that a pipeline allows, and adds up loads as the paper defines them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

from benchmarks.published.placement_model import (
    DeviceClass,
    PlacementEdge,
    PlacementNode,
    PlacementProblem,
)

AGREE = 1e-5  # relative, the integer rounding that an answer may have


def drawn(seed: int) -> PlacementProblem:
    """Three to six forward nodes; half of the problems are training graphs, a third is tight."""
    r = random.Random(seed)
    count = r.randint(3, 6)
    training, limited = r.random() < 0.5, r.random() < 0.34
    edges = [(a, b) for a, b in itertools.combinations(range(count), 2) if r.random() < 1.6 / count]
    nodes = [_node(r, i, i if training else None, backward=False) for i in range(count)]
    if training:
        partners = [i for i in range(count) if r.random() < 0.8]
        twin = {node: count + k for k, node in enumerate(partners)}
        nodes += [_node(r, twin[i], i, backward=True) for i in partners]
        edges += [(twin[b], twin[a]) for a, b in edges if a in twin and b in twin]
        edges += [(i, twin[i]) for i in partners]
    cost = {source: r.choice((0.0, r.uniform(0, 2))) for source in range(len(nodes))}
    accelerators, total = r.randint(1, 3), sum(node.size for node in nodes)
    memory = total / accelerators * r.uniform(0.9, 1.6) if limited else math.inf
    return PlacementProblem(
        tuple(nodes),
        tuple(PlacementEdge(a, b, cost[a]) for a, b in edges),
        (
            DeviceClass("accelerator", accelerators, memory),
            DeviceClass("cpu", r.randint(0, 1), transfers=False),
        ),
    )


def _node(r: random.Random, name: int, color: int | None, *, backward: bool) -> PlacementNode:
    fast = math.inf if r.random() < 0.05 else r.uniform(0.1, 3)
    return PlacementNode(name, (fast, r.uniform(1, 12)), r.uniform(0, 2), color, backward)


def brute_force(problem: PlacementProblem) -> float:
    """The least largest load over all pipelines, infinite when there is none."""
    accelerators, cpus = problem.classes
    stages = accelerators.count + cpus.count
    best = math.inf
    for assigned in assignments(problem, stages):
        loads = [
            [_load(problem, assigned, stage, kind) for kind in (0, 1)] for stage in range(stages)
        ]
        for chosen in itertools.combinations(range(stages), cpus.count):
            best = min(best, max(loads[s][s in chosen] for s in range(stages)))
    return best


def assignments(problem: PlacementProblem, stages: int) -> Iterator[tuple[int, ...]]:
    """Every stage of every node: forward edges never go back, colours stay together."""
    nodes = problem.nodes
    forward = {node.color for node in nodes if not node.backward and node.color is not None}
    orphan = [node.backward and node.color not in forward for node in nodes]
    order = []
    for edge in problem.edges:
        a, b = edge.source, edge.target
        if not nodes[a].backward and not nodes[b].backward:
            order.append((a, b))
        elif nodes[a].backward and nodes[b].backward and (orphan[a] or orphan[b]):
            order.append((b, a))
    colors = [("node", i) if n.color is None else ("color", n.color) for i, n in enumerate(nodes)]
    groups = list(dict.fromkeys(colors))
    for choice in itertools.product(range(stages), repeat=len(groups)):
        at = dict(zip(groups, choice, strict=True))
        assigned = tuple(at[color] for color in colors)
        if all(assigned[a] <= assigned[b] for a, b in order):
            yield assigned


def _load(problem: PlacementProblem, assigned: tuple[int, ...], stage: int, kind: int) -> float:
    held = [i for i, s in enumerate(assigned) if s == stage]
    device = problem.classes[kind]
    load = math.fsum(problem.nodes[i].seconds[kind] for i in held)
    if math.fsum(problem.nodes[i].size for i in held) > device.memory:
        return math.inf
    if device.transfers:
        moved = {
            edge.source: edge.cost
            for edge in problem.edges
            if (assigned[edge.source] == stage) != (assigned[edge.target] == stage)
        }
        load += math.fsum(moved.values())
    return load


def compare(seed: int) -> tuple[bool, str]:
    """(feasible, how planner and brute force differ in words, "" when they do not)."""
    from benchmarks.published.placement import place

    problem = drawn(seed)
    answer, best = place(problem), brute_force(problem)
    if answer.objective is None or math.isinf(best):
        same = answer.status == "infeasible" and math.isinf(best)
        return math.isfinite(best), "" if same else f"{answer.status} instead of {best}"
    if answer.status != "optimal" or abs(answer.objective - best) > AGREE * best:
        return True, f"{answer.status} {answer.objective} instead of {best}"
    return True, ""


FAMILIES: dict[str, Callable[[int], tuple[bool, str]]] = {"placement": compare}
