"""What a finished pipeline costs, from the nodes and edges of the file alone.

Shares nothing with the solvers: no groups, no pins, no integers.  Sums are exact (math.fsum) and
rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdcompile.passes.published.placement_file import PlacementProblem

SLACK = 1e-12  # of the memory limit: sums of fractions err, each order of summing in its own way


@dataclass(frozen=True, slots=True)
class Device:
    """One stage of the pipeline: its device's class and its nodes, as indices."""

    kind: int
    nodes: tuple[int, ...]


def device_loads(problem: PlacementProblem, devices: Sequence[Device]) -> list[float]:
    """The load of every device, as the paper defines it.

    A class with transfers pays the cost of every value that it produces and somebody else uses,
    once, and of every value that it uses and somebody else produces, once.
    """
    device_of = {v: d for d, device in enumerate(devices) for v in device.nodes}
    users: dict[int, set[int]] = {}
    cost: dict[int, float] = {}
    for edge in problem.edges:
        users.setdefault(edge.source, set()).add(device_of[edge.target])
        cost[edge.source] = edge.cost
    parts = [[problem.nodes[v].seconds[device.kind] for v in device.nodes] for device in devices]
    for source, using in users.items():
        home = device_of[source]
        away = using - {home}
        for d in away | {home} if away else ():
            if problem.classes[devices[d].kind].transfers:
                parts[d].append(cost[source])
    return [math.fsum(part) for part in parts]


def memories(problem: PlacementProblem, devices: Sequence[Device]) -> list[float]:
    """The summed sizes of every device's nodes, in the file's unit."""
    return [math.fsum(problem.nodes[v].size for v in device.nodes) for device in devices]


def allowed(problem: PlacementProblem) -> list[float]:
    """What a device of each class may hold: its limit, down to a whole number where all sizes are
    whole, and with room for rounding where their sums are not exact."""
    sizes = [node.size for node in problem.nodes]
    if math.fsum(sizes) < 2**53 and all(size.is_integer() for size in sizes):
        return [
            float(math.floor(kind.memory)) if math.isfinite(kind.memory) else kind.memory
            for kind in problem.classes
        ]
    return [kind.memory * (1 + SLACK) for kind in problem.classes]


def violations(problem: PlacementProblem, devices: Sequence[Device]) -> list[str]:
    """Everything that keeps the devices from being a contiguous pipeline; empty when it is one."""
    nodes = problem.nodes
    placed = [v for device in devices for v in device.nodes]
    if sorted(placed) != list(range(len(nodes))):
        return ["not every node is on exactly one device"]
    found = []
    for c, kind in enumerate(problem.classes):
        used = sum(device.kind == c for device in devices)
        if used > kind.count:
            found.append(f"{used} devices of class {kind.name!r}, of which there are {kind.count}")
    stage = {v: d for d, device in enumerate(devices) for v in device.nodes}
    home: dict[int | str, int] = {}
    forward_colors = {node.color for node in nodes if not node.backward}
    for v, node in enumerate(nodes):
        if node.color is not None and home.setdefault(node.color, stage[v]) != stage[v]:
            found.append(f"colour {node.color!r} is on more than one device")
        if math.isinf(nodes[v].seconds[devices[stage[v]].kind]):
            name = problem.classes[devices[stage[v]].kind].name
            found.append(f"node {node.id!r} does not run on class {name!r}")
    for edge in problem.edges:
        a, b = nodes[edge.source], nodes[edge.target]
        first, second = stage[edge.source], stage[edge.target]
        if not a.backward and not b.backward and first > second:
            found.append(f"edge {a.id!r} -> {b.id!r} runs against the pipeline")
        paired = all(x.color is not None and x.color in forward_colors for x in (a, b))
        if a.backward and b.backward and not paired and first < second:
            found.append(f"backward edge {a.id!r} -> {b.id!r} runs along the pipeline")
    for device, held in zip(devices, memories(problem, devices), strict=True):
        kind = problem.classes[device.kind]
        if held > allowed(problem)[device.kind]:
            found.append(f"a device of class {kind.name!r} holds {held:g} of {kind.memory:g}")
    return found
