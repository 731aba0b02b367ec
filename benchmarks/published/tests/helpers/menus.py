"""Small random problems of Piper's kind, and what they cost by trying everything."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from functools import cache

from benchmarks.published.piper_model import MenuEdge, MenuNode, MenuProblem, NodeVariant


def random_menu(seed: int, *, nodes: int = 5, devices: int = 5, even: bool = False) -> MenuProblem:
    """A small problem; `even`: variants of a node differ in seconds and memory only.

    Bytes are whole numbers in half of the cases.  About a third has no plan.
    """
    rng = random.Random(seed)
    n = rng.randint(1, nodes)
    whole = rng.random() < 0.5

    def size(most: float) -> float:
        return float(rng.randint(0, int(most))) if whole else rng.uniform(0, most)

    pairs = [(u, v) for u in range(n) for v in range(u + 1, n) if rng.random() < 0.5]
    # Ids in an order that is not topological.
    place = rng.sample(range(n), n)
    edges = tuple(MenuEdge(place[u], place[v], size(30)) for u, v in pairs)
    menu = []
    for v in range(n):
        ins = [edge.source for edge in edges if edge.target == v]
        outs = [edge.target for edge in edges if edge.source == v]
        variants: dict[int, tuple[NodeVariant, ...]] = {}
        for degree in rng.choice(((1,), (1,), (1, 2), (1, 2), (2,), (1, 3))):
            weights = size(60)
            forward = {u: size(10) for u in ins}
            backward = {w: size(10) for w in outs}
            variants[degree] = tuple(
                NodeVariant(
                    id=f"v{k}",
                    seconds=rng.choice((0.0, rng.uniform(0, 10), float(rng.randint(0, 5)))),
                    parameter_bytes=weights if even else size(60),
                    moving_bytes=size(20),
                    fixed_bytes=size(40),
                    sync_forward=forward if even else {u: size(10) for u in ins},
                    sync_backward=backward if even else {w: size(10) for w in outs},
                )
                for k in range(rng.randint(1, 3))
            )
        menu.append(MenuNode(v if whole else f"n{v}", variants))
    return MenuProblem(
        nodes=tuple(menu),
        edges=edges,
        devices=rng.randint(1, devices),
        memory_bytes=rng.choice((math.inf, 400.0, 150.0, 100.0, 60.0)),
        batch=rng.choice((1, 2, 4, 6, 12)),
        bytes_per_second=rng.choice((1.0, 10.0, 1000.0)),
    )


def brute_force(problem: MenuProblem) -> float:
    """The least objective over every plan, in exact arithmetic until the end; inf: no plan."""
    n = len(problem.nodes)
    before = [0] * n
    for edge in problem.edges:
        before[edge.target] |= 1 << edge.source
    everything = (1 << n) - 1
    ideals = [
        mask
        for mask in range(everything + 1)
        if all(before[v] & ~mask == 0 for v in range(n) if mask >> v & 1)
    ]

    @cache
    def rest(done: int, devices: int, later: int) -> float:
        """Plans for the nodes in `done`, whose later stages have `later` replicas in sum."""
        if not done:
            return 0.0
        best = math.inf
        for start in ideals:
            if start == done or start & ~done:
                continue
            for d in range(1, devices + 1):
                if problem.batch % d:
                    continue
                for t in range(1, devices // d + 1):
                    time = stage(start, done, d, t, -(-(later + d) // d))
                    if time < best:
                        best = min(best, max(time, rest(start, devices - d * t, later + d)))
        return best

    @cache
    def stage(start: int, done: int, d: int, t: int, y: int) -> float:
        nodes = [v for v in range(n) if (done & ~start) >> v & 1]
        best = math.inf
        for combination in itertools.product(
            *(problem.nodes[v].variants.get(t, ()) for v in nodes)
        ):
            chosen = dict(zip(nodes, combination, strict=True))
            held = sum(
                Fraction(c.moving_bytes) * y + Fraction(c.fixed_bytes) for c in chosen.values()
            )
            if held > problem.memory_bytes:
                continue
            moved = 0.0
            for edge in problem.edges:
                if edge.target in chosen and edge.source not in chosen:
                    moved += 2 * (edge.bytes + chosen[edge.target].sync_forward[edge.source]) / d
                if edge.source in chosen and edge.target not in chosen:
                    moved += 2 * (edge.bytes + chosen[edge.source].sync_backward[edge.target]) / d
            weights = sum(c.parameter_bytes for c in chosen.values())
            moved += 4 * (d - 1) / d * weights / problem.batch
            busy = sum(c.seconds for c in chosen.values()) / d
            best = min(best, moved / problem.bytes_per_second + busy)
        return best

    return rest(everything, problem.devices, 0)
