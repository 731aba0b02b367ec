"""Cuts that no planner would choose, but that a correct compiler has to survive.

Only what may not be separated is joined; the rest is cut at random places, through modules, in
the model's own order or (shuffled) in a random topological one, so that branches interleave and
stages hold ops of many modules.
"""

from __future__ import annotations

import random
from itertools import pairwise

import networkx as nx

from pdcompile.eager.summation import summation_order
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.passes.coarsen.spans import Groups, close_cycles, join_spans
from pdcompile.passes.schedules import warmup
from pdcompile.plan import Plan
from tests.helpers.cuts import plan_of


def random_cut(
    capture: Capture,
    stages: int,
    batch_size: int,
    microbatches: int,
    seed: int,
    *,
    shuffled: bool,
) -> Plan | None:
    """A plan of that many stages; None where the model has fewer parts that may be cut."""
    rng = random.Random(seed)
    order, end = _ordered(capture.train, rng if shuffled else None)
    if end + 1 < stages:
        return None
    starts = [0, *sorted(rng.sample(range(1, end + 1), stages - 1)), len(order)]
    groups = [[name for part in order[low:high] for name in part] for low, high in pairwise(starts)]
    position = {op.name: i for i, op in enumerate(capture.train.ops)}
    return plan_of(
        capture,
        [sorted(group, key=position.__getitem__) for group in groups],
        schedule="1f1b",
        num_microbatches=microbatches,
        batch_size=batch_size,
        warmup=warmup("1f1b", stages, microbatches),
    )


def _ordered(graph: OpGraph, rng: random.Random | None) -> tuple[list[list[str]], int]:
    """Parts in topological order, a random one or the model's, and where the output's part is.

    It comes as late as possible: it and what follows belong to the last stage.
    """
    groups = Groups(len(graph.ops) + 1)
    join_spans(graph, groups)
    close_cycles(graph, groups)
    position = {op.name: i for i, op in enumerate(graph.ops)}
    arrows = nx.DiGraph()
    arrows.add_nodes_from(groups.find(i) for i in range(len(graph.ops) + 1))
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            if name in position and groups.find(position[name]) != groups.find(i):
                arrows.add_edge(groups.find(position[name]), groups.find(i))
    for first, second, _ in summation_order(graph):
        pair = groups.find(position[first]), groups.find(position[second])
        if pair[0] != pair[1]:
            arrows.add_edge(*pair)
    output = groups.find(len(graph.ops))
    waiting = {node: arrows.in_degree(node) for node in arrows}
    ready = sorted(node for node, count in waiting.items() if not count)
    order: list[int] = []
    while ready:
        choices = [node for node in ready if node != output] or ready
        node = rng.choice(choices) if rng is not None else min(choices)
        ready.remove(node)
        order.append(node)
        for later in arrows.successors(node):
            waiting[later] -= 1
            if not waiting[later]:
                ready.append(later)
    members = groups.members()
    names = [[graph.ops[i].name for i in members[n] if i < len(graph.ops)] for n in order]
    filled = [(part, n) for part, n in zip(names, order, strict=True) if part]
    end = next((i for i, (_, n) in enumerate(filled) if n == output), len(filled) - 1)
    return [part for part, _ in filled], end
