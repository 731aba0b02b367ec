"""Device-placement problems: random small ones with every feature, look-alikes of published
networks, and brute force that shares nothing with the planner."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

from benchmarks.published.placement_model import (
    DeviceClass,
    PlacementEdge,
    PlacementNode,
    PlacementProblem,
)

Stages = tuple[tuple[int, tuple[int, ...]], ...]  # of each stage (class, nodes)


def random_problem(seed: int, largest: int = 6) -> PlacementProblem:
    """Up to `largest` forward nodes, perhaps with backward ones, colours, CPUs, tight memory."""
    r = random.Random(seed)
    kinds = r.choice(((1, 0), (2, 0), (3, 0), (2, 1), (1, 1), (1, 2), (0, 2), (0, 0), (7, 1)))
    n = r.randint(1, min(largest, 3 if sum(kinds) > 3 else largest))
    whole = r.random() < 0.5

    def amount() -> float:
        return float(r.choice((0, 1, 2, 5, 9))) if whole else r.choice((0.0, r.random() * 4))

    density = r.choice((0.2, 0.5, 0.9))
    chain = r.random() < 0.3
    forward = [
        (a, b)
        for a in range(n)
        for b in range(a + 1, n)
        if (chain and b == a + 1) or (not chain and r.random() < density)
    ]
    colors: list[Any] = [r.choice((None, f"c{v}", f"c{r.randrange(n)}")) for v in range(n)]
    backward: list[tuple[int, Any]] = []  # (forward node it mirrors, colour)
    if r.random() < 0.5:
        for v in range(n):
            if r.random() < 0.8:
                lonely = r.random() < 0.25
                backward.append((v, r.choice((None, f"orphan{v}")) if lonely else colors[v]))
    nodes: list[PlacementNode] = []
    for _, color in [*enumerate(colors), *backward]:
        supported = r.random() < 0.93
        seconds = (amount() if supported else math.inf, 3 * amount() if kinds[1] else math.inf)
        size = float(r.randint(0, 6)) if r.random() < 0.7 else r.random() * 6
        nodes.append(PlacementNode(len(nodes), seconds, size, color, backward=len(nodes) >= n))
    place = {v: n + i for i, (v, _) in enumerate(backward)}
    pairs = list(forward)
    pairs += [(place[b], place[a]) for a, b in forward if a in place and b in place]
    pairs += [(v, place[v]) for v in place if r.random() < 0.5]
    costs = [amount() for _ in nodes]
    total = sum(node.size for node in nodes)
    memory = math.inf
    if r.random() < 0.5 and kinds[0]:
        memory = total / kinds[0] * r.choice((0.8, 1.0, 1.1, 1.3, 2.0))
        memory = float(math.ceil(memory)) if r.random() < 0.5 else memory
    classes = (
        DeviceClass("accelerator", kinds[0], memory),
        DeviceClass("cpu", kinds[1], transfers=False),
    )
    edges = tuple(PlacementEdge(a, b, costs[a]) for a, b in sorted(set(pairs)))
    return PlacementProblem(tuple(nodes), edges, classes)


def brute_force(problem: PlacementProblem) -> tuple[float, Stages]:
    """The least largest load over all contiguous pipelines, from the words of the paper.

    (inf, ()) when there is none.  Every node tries every stage, with every sequence of classes.
    """
    n = len(problem.nodes)
    parts: dict[Any, list[int]] = {}
    for v, node in enumerate(problem.nodes):
        parts.setdefault(("node", v) if node.color is None else ("color", node.color), []).append(v)
    together = list(parts.values())
    partner = {
        v: any(not problem.nodes[u].backward for u in part) for part in together for v in part
    }
    order = []
    for edge in problem.edges:
        a, b = problem.nodes[edge.source], problem.nodes[edge.target]
        if not a.backward and not b.backward:
            order.append((edge.source, edge.target))
        if a.backward and b.backward and not (partner[edge.source] and partner[edge.target]):
            order.append((edge.target, edge.source))
    counts = [min(kind.count, len(together)) for kind in problem.classes]
    kinds = [c for c, count in enumerate(counts) for _ in range(count)]
    best: tuple[float, Stages] = (math.inf, ())
    if not kinds:
        return best
    sequences = sorted(set(itertools.permutations(kinds))) if len(kinds) < 8 else [tuple(kinds)]
    for choice in itertools.product(range(len(kinds)), repeat=len(together)):
        stage = [0] * n
        for part, s in zip(together, choice, strict=True):
            for v in part:
                stage[v] = s
        if any(stage[a] > stage[b] for a, b in order):
            continue
        for sequence in sequences:
            worst = max(
                device_load(problem, sequence[s], {v for v in range(n) if stage[v] == s})
                for s in range(len(kinds))
            )
            if worst < best[0]:
                held = tuple(tuple(v for v in range(n) if stage[v] == s) for s in range(len(kinds)))
                best = (
                    worst,
                    tuple((c, part) for c, part in zip(sequence, held, strict=True) if part),
                )
    return best


def device_load(problem: PlacementProblem, kind: int, held: set[int]) -> float:
    device = problem.classes[kind]
    if math.fsum(problem.nodes[v].size for v in held) > device.memory:
        return math.inf
    parts = [problem.nodes[v].seconds[kind] for v in held]
    if device.transfers:
        for source in {edge.source for edge in problem.edges}:
            users = {edge.target for edge in problem.edges if edge.source == source}
            cost = next(edge.cost for edge in problem.edges if edge.source == source)
            if (source in held and users - held) or (source not in held and users & held):
                parts.append(cost)
    return math.fsum(parts)


def inception(
    seed: int, groups: int = 326, accelerators: int = 6, *, training: bool = True
) -> dict[str, Any]:
    """A device-placement file: modules of parallel branches of (convolution, norm, activation).

    `training`: a backward node for every forward one, tied by colour.
    """
    r = random.Random(seed)
    compute: list[float] = []
    output: list[float] = []
    pairs: list[tuple[int, int]] = []

    def node(kind: str, width: float, *inputs: int) -> int:
        v = len(compute)
        heavy = {"convolution": r.uniform(0.5, 4), "norm": r.uniform(0.1, 0.4)}.get(kind, 0.1)
        compute.append(heavy * width)
        output.append(r.uniform(0.3, 1.0) * width)
        pairs.extend((u, v) for u in inputs)
        return v

    def block(width: float, v: int) -> int:
        for kind in ("convolution", "norm", "activation"):
            v = node(kind, width, v)
        return v

    v = node("input", 1.0)
    for _ in range(3):
        v = block(2.0, v)
    while len(compute) < groups - 40:
        ends = []
        for _ in range(r.randint(3, 4)):
            end = node("pool", 0.5, v) if r.random() < 0.25 else v
            for _ in range(r.randint(1, 4)):
                end = block(r.uniform(0.2, 0.8), end)
            ends.append(end)
        v = node("concatenation", 1.5, *ends)
    while len(compute) < groups:
        v = node("activation", 0.5, v)
    nodes, edges = [], []
    for u, seconds in enumerate(compute):
        size = r.randint(0, 9_000_000)
        row = {"id": u, "supportedOnFpga": 1, "colorClass": u, "isBackwardNode": 0}
        nodes.append(row | {"fpgaLatency": seconds, "cpuLatency": 10 * seconds, "size": size})
        if training:
            slower = seconds * r.uniform(1.5, 2.5)
            row = row | {"id": groups + u, "isBackwardNode": 1}
            nodes.append(row | {"fpgaLatency": slower, "cpuLatency": 10 * slower, "size": size})
    for a, b in pairs:
        edges.append({"sourceId": a, "destId": b, "cost": output[a]})
        if training:
            edges.append({"sourceId": groups + b, "destId": groups + a, "cost": output[b]})
    return {
        "maxFPGAs": accelerators,
        "maxCPUs": 1,
        "maxSizePerFPGA": 17_185_374_208,
        "nodes": nodes,
        "edges": edges,
    }


def write(folder: Path, data: Any, name: str = "graph.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data), encoding="utf-8")
    return path
