"""Device placement: the problem, the reader of its files, and the load of every device.

The model of 'Efficient Algorithms for Device Placement of DNN Graph Operators' (NeurIPS 2020):
every node goes on one device; a device that pays for transfers pays each value that crosses its
border once, out or in; the objective is the largest load.

The JSON has ``maxFPGAs`` accelerators of memory ``maxSizePerFPGA``, ``maxCPUs`` CPUs, ``nodes``
with a latency on either kind, and ``edges`` whose cost is the time to move their source's output.
Times and sizes are in the file's own units.

`device_loads` and `violations` share nothing with the search: no groups, no pins, no integers.
Sums are exact (math.fsum) and rounded once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.published.reading import MAX_DEVICES, Place, content, numbered, refuse_cycles
from pdcompile import jsonio
from pdcompile.errors import CostError

LARGEST = 1e100  # sums and products with it stay finite
SAME_COST = 1e-9  # relative; what printing a float and reading it again may change

_KEYS = "nodes, edges, maxFPGAs, maxSizePerFPGA, maxCPUs"


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """`count` equal devices.  `transfers`: values that cross their border cost them time."""

    name: str
    count: int
    memory: float = float("inf")  # limit of the summed node sizes on one device
    transfers: bool = True


@dataclass(frozen=True, slots=True)
class PlacementNode:
    """One node of the file.  `seconds` has an entry for each device class, inf: unsupported."""

    id: int | str
    seconds: tuple[float, ...]
    size: float = 0.0
    color: int | str | None = None  # nodes of one colour share a device
    backward: bool = False


@dataclass(frozen=True, slots=True)
class PlacementEdge:
    """`cost` seconds to move the source's output; equal on all edges of one source."""

    source: int  # index into the nodes
    target: int
    cost: float


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """Problem as the file has it.

    Answers are contiguous: a pipeline of differences of down-closed sets of forward nodes,
    backward nodes with their forward partners (or mirrored).
    """

    nodes: tuple[PlacementNode, ...]
    edges: tuple[PlacementEdge, ...]
    classes: tuple[DeviceClass, ...]


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """The same after grouping: what has to share a device is one group.

    Groups are in topological order of `arcs`, which are acyclic and transitively reduced, and
    say that stage(a) ≤ stage(b).  A value is a set of pins: a device of a class with transfers
    pays `costs[e]` when it holds some of `pins[e]` but not all.  No two values have equal pins,
    every value has at least two and a positive cost.  A pipeline has up to Σ count stages, each
    of one class, each class at most `count` times; stages may stay empty.
    """

    seconds: tuple[tuple[float, ...], ...]  # [group][class]
    sizes: tuple[float, ...]
    arcs: tuple[tuple[int, int], ...]
    pins: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    classes: tuple[DeviceClass, ...]
    members: tuple[tuple[int, ...], ...]  # [group] -> indices of nodes of the PlacementProblem


def read(path: str | os.PathLike[str]) -> PlacementProblem:
    """The problem as the file has it; nodes in the file's order, edges without repetition.

    ``size``, ``colorClass``, ``supportedOnFpga`` and ``isBackwardNode`` may be left out (0, none,
    yes, no); keys that are not named here are passed over.

    Raises:
        CostError: the file cannot be read, or holds a missing id, a repeated one, a number that is
            negative or not finite, edges of one source with unequal costs, a cycle, …; names the
            place inside the file.
    """
    where = str(path)
    return parse(jsonio.loads(content(path), where=where, error=CostError), where=where)


def parse(data: Any, *, where: str) -> PlacementProblem:
    """Problem from parsed JSON; `where` is the file's name.  Raises as `read` does."""
    top = Place(data, where, keys=_KEYS, largest=LARGEST)
    accelerators = top.count("maxFPGAs", 0, MAX_DEVICES)
    cpus = top.count("maxCPUs", 0, MAX_DEVICES)
    limit = math.inf if top.data.get("maxSizePerFPGA", 0) is None else top.number("maxSizePerFPGA")
    nodes = tuple(_node(place, cpus) for place in top.nodes())
    edges = _edges(top, numbered((node.id for node in nodes), where))
    arcs = [(edge.source, edge.target) for edge in edges]
    refuse_cycles([repr(node.id) for node in nodes], arcs, f"{where}: edges")
    classes = (
        DeviceClass("accelerator", accelerators, limit),
        DeviceClass("cpu", cpus, transfers=False),
    )
    return PlacementProblem(nodes, edges, classes)


def _node(place: Place, cpus: int) -> PlacementNode:
    supported = place.flag("supportedOnFpga", True)
    accelerator = place.number("fpgaLatency") if supported else math.inf
    cpu = place.number("cpuLatency") if cpus or "cpuLatency" in place.data else math.inf
    color = place.data.get("colorClass")
    return PlacementNode(
        id=place.name("id", empty=True),
        seconds=(accelerator, cpu),
        size=place.number("size", 0.0),
        color=None if color is None else place.name("colorClass", empty=True),
        backward=place.flag("isBackwardNode", False),
    )


def _edges(top: Place, index: dict[int | str, int]) -> tuple[PlacementEdge, ...]:
    found: dict[tuple[int, int], PlacementEdge] = {}
    first: dict[int, tuple[int, float]] = {}  # source -> (entry of its first edge, cost)
    for i, place in enumerate(top.each("edges")):
        source, target = place.ends(index)
        cost = place.number("cost")
        entry, known = first.setdefault(source, (i, cost))
        if abs(known - cost) > SAME_COST * max(known, cost):
            raise place.wrong(
                "cost",
                f"{cost:g} differs from {known:g} on edges[{entry}], which has the same source "
                f"{place.data['sourceId']!r}",
                "write one cost, that of moving the source's output, on all edges of one source",
            )
        found.setdefault((source, target), PlacementEdge(source, target, known))
    return tuple(found.values())


SLACK = 1e-12  # of the memory limit: sums of fractions err, each order of summing in its own way


@dataclass(frozen=True, slots=True)
class PlacedDevice:
    """One stage of the pipeline: its device's class and its nodes, as indices."""

    kind: int
    nodes: tuple[int, ...]


def device_loads(problem: PlacementProblem, devices: Sequence[PlacedDevice]) -> list[float]:
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


def memories(problem: PlacementProblem, devices: Sequence[PlacedDevice]) -> list[float]:
    """The summed sizes of every device's nodes, in the file's unit."""
    return [math.fsum(problem.nodes[v].size for v in device.nodes) for device in devices]


def allowed(problem: PlacementProblem) -> list[float]:
    """Most that a device of each class may hold: its limit, a whole number where all sizes are
    whole, and with room for rounding where their sums are not exact."""
    sizes = [node.size for node in problem.nodes]
    if math.fsum(sizes) < 2**53 and all(size.is_integer() for size in sizes):
        return [
            float(math.floor(kind.memory)) if math.isfinite(kind.memory) else kind.memory
            for kind in problem.classes
        ]
    return [kind.memory * (1 + SLACK) for kind in problem.classes]


def violations(problem: PlacementProblem, devices: Sequence[PlacedDevice]) -> list[str]:
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
