"""Synthetic operator graphs for the planner's benchmarks, of any size, and their JSON form.

    python benchmarks/graphs.py transformer 10000 --devices 64 --cpus 1 --training -o graph.json

Times are in arbitrary units: operators take 0.05 to 2, a value costs 0.1 to 1.5 to move.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks.published

from benchmarks.published.placement_model import (
    DeviceClass,
    PlacementEdge,
    PlacementNode,
    PlacementProblem,
)

SMALL, LARGE = 0.3, 1.2  # cost to move a residual stream, and the inside of a feed-forward block


class Sketch:
    """A forward graph being drawn: operators with work, and values with consumers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.work: list[float] = []
        self.cost: list[float] = []
        self.edges: list[tuple[int, int]] = []

    def op(self, work: float, cost: float, *inputs: int) -> int:
        """An operator of about `work`, whose output costs about `cost` to move."""
        self.work.append(work * self.random.uniform(0.8, 1.2))
        self.cost.append(cost * self.random.uniform(0.8, 1.2))
        node = len(self.work) - 1
        self.edges += [(source, node) for source in dict.fromkeys(inputs)]
        return node

    def scale(self, begin: int, factor: float) -> None:
        """Make all operators from `begin` on slower by a factor: layers differ in size."""
        for node in range(begin, len(self.work)):
            self.work[node] *= factor


def _attention(draw: Sketch, x: int) -> int:
    """Eleven operators from the layer norm to the residual add."""
    norm = draw.op(0.1, SMALL, x)
    q, k, v = (draw.op(1.0, SMALL, norm) for _ in range(3))
    scores = draw.op(0.8, LARGE, q, k)
    scaled = draw.op(0.05, LARGE, scores)
    soft = draw.op(0.3, LARGE, scaled)
    drop = draw.op(0.05, LARGE, soft)
    context = draw.op(0.8, SMALL, drop, v)
    out = draw.op(1.0, SMALL, context)
    return draw.op(0.05, SMALL, x, out)


def transformer(ops: int, seed: int = 0) -> Sketch:
    """Layers of sixteen operators with two residual adds."""
    draw = Sketch(seed)
    x = draw.op(0.5, SMALL)
    while len(draw.work) + 17 <= ops:
        begin = len(draw.work)
        x = _attention(draw, x)
        norm = draw.op(0.1, SMALL, x)
        up = draw.op(2.0, LARGE, norm)
        act = draw.op(0.1, LARGE, up)
        down = draw.op(2.0, SMALL, act)
        x = draw.op(0.05, SMALL, x, down)
        draw.scale(begin, draw.random.uniform(0.8, 1.2))
    while len(draw.work) < ops:
        x = draw.op(0.5, SMALL, x)
    return draw


def residual_chain(ops: int, seed: int = 0) -> Sketch:
    """Bottleneck blocks of ten operators; every fourth has a projection on its skip path."""
    draw = Sketch(seed)
    x = draw.op(1.0, LARGE)
    block = 0
    while len(draw.work) + 13 <= ops:
        begin = len(draw.work)
        y = x
        for work in (0.6, 1.6, 0.6):
            y = draw.op(work, LARGE, y)
            y = draw.op(0.1, LARGE, y)
            y = draw.op(0.05, LARGE, y)
        skip = draw.op(0.1, LARGE, draw.op(0.6, LARGE, x)) if block % 4 == 0 else x
        x = draw.op(0.05, LARGE, y, skip)
        draw.scale(begin, draw.random.uniform(0.6, 1.4))
        block += 1
    while len(draw.work) < ops:
        x = draw.op(0.5, SMALL, x)
    return draw


def series_parallel(ops: int, seed: int = 0) -> Sketch:
    """A random two-terminal series-parallel graph: parts in series or side by side, recursively."""
    draw = Sketch(seed)
    r = draw.random

    def one(*inputs: int) -> int:
        return draw.op(r.choice((0.05, 0.1, 0.5, 1.0, 2.0)), r.choice((0.1, 0.3, 1.2)), *inputs)

    x = one()
    todo: list[tuple[str, int]] = [("part", ops - 1)]
    results: list[int] = [x]  # the last node of the part drawn last
    stack: list[tuple[int, list[int]]] = []  # open forks: their source, their branches' ends
    while todo:
        kind, size = todo.pop()
        if kind == "fork":
            stack.append((results[-1], []))
        elif kind == "branch":
            stack[-1][1].append(results[-1])
            results[-1] = stack[-1][0]
        elif kind == "join":
            source, ends = stack.pop()
            results[-1] = one(*(ends or [source]))
        elif size <= 3:
            for _ in range(size):
                results[-1] = one(results[-1])
        elif r.random() < 0.6:
            cut = r.randint(1, size - 1)
            todo += [("part", size - cut), ("part", cut)]
        else:
            width = min(r.choice((2, 2, 2, 3, 4)), size - 1)
            marks = sorted(r.sample(range(1, size - 1), width - 1)) if width > 1 else []
            sizes = [b - a for a, b in zip([0, *marks], [*marks, size - 1], strict=True)]
            todo.append(("join", 0))
            for part in sizes:
                todo += [("branch", 0), ("part", part)]
            todo.append(("fork", 0))
    return draw


def mixture_of_experts(ops: int, seed: int = 0, experts: int = 64) -> Sketch:
    """Attention, a router, `experts` feed-forward networks of three operators, a weighted sum."""
    draw = Sketch(seed)
    x = draw.op(0.5, SMALL)
    layer = 15 + 3 * experts
    while len(draw.work) + layer <= ops:
        begin = len(draw.work)
        x = _attention(draw, x)
        norm = draw.op(0.1, SMALL, x)
        router = draw.op(0.2, SMALL, norm)
        ends = []
        for _ in range(experts):
            up = draw.op(0.5, 0.1, router)
            act = draw.op(0.05, 0.1, up)
            ends.append(draw.op(0.5, 0.05, act))
        total = draw.op(0.2, SMALL, router, *ends)
        x = draw.op(0.05, SMALL, x, total)
        draw.scale(begin, draw.random.uniform(0.8, 1.2))
    while len(draw.work) < ops:
        x = draw.op(0.5, SMALL, x)
    return draw


FAMILIES: dict[str, Callable[[int, int], Sketch]] = {
    "transformer": transformer,
    "residual": residual_chain,
    "series-parallel": series_parallel,
    "experts": mixture_of_experts,
}


def problem(
    draw: Sketch, devices: int, *, cpus: int = 0, training: bool = False, slower: float = 8.0
) -> PlacementProblem:
    """The placement problem of a sketch; CPUs are `slower` times as slow as accelerators.

    Training doubles the graph: a backward operator of twice the work for each forward one, tied
    to it by its colour, that consumes the forward values its partner consumed and passes a
    gradient back along every edge.
    """
    count = len(draw.work)
    nodes = [
        PlacementNode(i, (draw.work[i], draw.work[i] * slower), 1.0, i if training else None, False)
        for i in range(count)
    ]
    edges = [PlacementEdge(a, b, draw.cost[a]) for a, b in draw.edges]
    if training:
        nodes += [
            PlacementNode(count + i, (2 * draw.work[i], 2 * draw.work[i] * slower), 0.0, i, True)
            for i in range(count)
        ]
        edges += [PlacementEdge(count + b, count + a, draw.cost[b]) for a, b in draw.edges]
        edges += [PlacementEdge(a, count + b, draw.cost[a]) for a, b in draw.edges]
    classes = (
        DeviceClass("accelerator", devices, 2.0 * count / devices + 64),
        DeviceClass("cpu", cpus, transfers=False),
    )
    return PlacementProblem(tuple(nodes), tuple(edges), classes)


def write(made: PlacementProblem, path: Path) -> None:
    """Write a problem as device-placement JSON."""
    accelerator, cpu = made.classes
    document = {
        "maxFPGAs": accelerator.count,
        "maxCPUs": cpu.count,
        "maxSizePerFPGA": accelerator.memory,
        "nodes": [
            {
                "id": node.id,
                "supportedOnFpga": 1,
                "fpgaLatency": node.seconds[0],
                "cpuLatency": node.seconds[1],
                "isBackwardNode": int(node.backward),
                **({} if node.color is None else {"colorClass": node.color}),
                "size": node.size,
            }
            for node in made.nodes
        ],
        "edges": [
            {"sourceId": made.nodes[e.source].id, "destId": made.nodes[e.target].id, "cost": e.cost}
            for e in made.edges
        ],
    }
    path.write_text(json.dumps(document))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("ops", type=int)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--cpus", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("-o", type=Path, required=True)
    arguments = parser.parse_args()
    draw = FAMILIES[arguments.family](arguments.ops, arguments.seed)
    made = problem(draw, arguments.devices, cpus=arguments.cpus, training=arguments.training)
    write(made, arguments.o)


if __name__ == "__main__":
    main()
