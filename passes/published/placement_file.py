"""PlacementProblem and LoadProblem: the largest load of a pipeline of unlike devices.

The model of 'Efficient Algorithms for Device Placement of DNN Graph Operators' (NeurIPS 2020):
every node goes on one device; a device that pays for transfers pays each value that crosses its
border once, out or in; the objective is the largest load.

Its JSON has ``maxFPGAs`` accelerators of memory ``maxSizePerFPGA``, ``maxCPUs`` CPUs, ``nodes``
with a latency on either kind, and ``edges`` whose cost is the time to move their source's output.
Times and sizes are in the file's own units.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcompile import jsonio
from pdcompile.errors import CostError

MAX_DEVICES = 65_536
LARGEST = 1e100  # sums and products with it stay finite
SMALLEST = 1e-100  # a positive number below it has nothing to say beside any other
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
    """As the file has it.  Answers are contiguous: a pipeline of differences of down-closed sets
    of forward nodes, backward nodes with their forward partners (or mirrored)."""

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
    try:
        text = Path(path).read_bytes()
    except OSError as wrong:
        reason = (wrong.strerror or "unreadable").lower()
        raise CostError(
            f"the file cannot be read: {reason}", where=where, remedy="check the path"
        ) from wrong
    data = jsonio.loads(text, where=where, error=CostError)
    return parse(data, where=where)


def parse(data: Any, *, where: str) -> PlacementProblem:
    """From parsed JSON; `where` is the file's name.  Raises as `read` does."""
    top = _Place(data, where + ":", "")
    accelerators = top.count("maxFPGAs")
    cpus = top.count("maxCPUs")
    limit = math.inf if top.data.get("maxSizePerFPGA", 0) is None else top.number("maxSizePerFPGA")
    nodes = tuple(
        _node(_Place(item, where + ":", f"nodes[{i}]"), cpus)
        for i, item in enumerate(top.items("nodes"))
    )
    if not nodes:
        raise CostError("there is no node", where=f"{where}: nodes", remedy="add the graph's nodes")
    index: dict[int | str, int] = {}
    for i, node in enumerate(nodes):
        if node.id in index:
            raise CostError(
                f"id {node.id!r} appears twice",
                where=f"{where}: nodes[{index[node.id]}] and nodes[{i}]",
                remedy="give every node its own id",
            )
        index[node.id] = i
    edges = _edges(top, where, index)
    _refuse_cycles(nodes, edges, where)
    classes = (
        DeviceClass("accelerator", accelerators, limit),
        DeviceClass("cpu", cpus, transfers=False),
    )
    return PlacementProblem(nodes, edges, classes)


def _node(place: _Place, cpus: int) -> PlacementNode:
    supported = place.flag("supportedOnFpga", True)
    accelerator = place.number("fpgaLatency") if supported else math.inf
    cpu = place.number("cpuLatency") if cpus or "cpuLatency" in place.data else math.inf
    color = place.data.get("colorClass")
    return PlacementNode(
        id=place.name("id"),
        seconds=(accelerator, cpu),
        size=place.number("size", 0.0),
        color=None if color is None else place.name("colorClass"),
        backward=place.flag("isBackwardNode", False),
    )


def _edges(top: _Place, where: str, index: Mapping[int | str, int]) -> tuple[PlacementEdge, ...]:
    found: dict[tuple[int, int], PlacementEdge] = {}
    first: dict[int, tuple[int, float]] = {}  # source -> (entry of its first edge, cost)
    for i, item in enumerate(top.items("edges")):
        place = _Place(item, where + ":", f"edges[{i}]")
        ends = []
        for key in ("sourceId", "destId"):
            name = place.name(key)
            if name not in index:
                raise place.wrong(key, f"there is no node with id {name!r}", "add it to nodes")
            ends.append(index[name])
        source, target = ends
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


def _refuse_cycles(
    nodes: tuple[PlacementNode, ...], edges: tuple[PlacementEdge, ...], where: str
) -> None:
    after: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)
    for edge in edges:
        after[edge.source].append(edge.target)
        waiting[edge.target] += 1
    ready = [v for v, count in enumerate(waiting) if not count]
    for v in ready:
        for u in after[v]:
            waiting[u] -= 1
            if not waiting[u]:
                ready.append(u)
    if len(ready) == len(nodes):
        return
    before: list[int] = [-1] * len(nodes)
    left = {v for v, count in enumerate(waiting) if count}
    for v in left:
        for u in after[v]:
            if u in left:
                before[u] = v
    # Every node that is left has a predecessor that is left: walking back ends in a circle.
    seen: dict[int, None] = {}
    v = min(left)
    while v not in seen:
        seen[v] = None
        v = before[v]
    walk = list(seen)
    circle = [v, *reversed(walk[walk.index(v) :])]
    names = [repr(nodes[u].id) for u in circle]
    text = " -> ".join(names if len(names) <= 12 else [*names[:6], "…", *names[-5:]])
    raise CostError(
        f"the edges form a cycle: {text}",
        where=f"{where}: edges",
        remedy="remove one of these edges; a graph of operators has no cycles",
    )


class _Place:
    """An object of the file, with its place for error messages."""

    def __init__(self, data: Any, where: str, path: str) -> None:
        self.where = f"{where} {path}" if path else where.rstrip(":")
        self.path = path
        if not isinstance(data, dict):
            remedy = f"write an object with {_KEYS}" if not path else "write an object"
            raise CostError(f"{_short(data)} is not an object", where=self.where, remedy=remedy)
        self.data: dict[str, Any] = data

    def wrong(self, key: str, message: str, remedy: str) -> CostError:
        joint = "." if self.path else ": "
        return CostError(message, where=f"{self.where}{joint}{key}", remedy=remedy)

    def get(self, key: str) -> Any:
        if key not in self.data:
            raise CostError(
                f"key {key!r} is missing", where=self.where, remedy=f"add {key!r} to it"
            )
        return self.data[key]

    def items(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, f"{_short(value)} is not a list", "write a list of objects")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = default if default is not None and key not in self.data else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"{_short(value)} is not a number", "write a number")
        value = float(value)
        if not 0 <= value <= LARGEST:  # also refuses NaN
            raise self.wrong(
                key,
                f"{value:g} is not between 0 and {LARGEST:g}",
                "write what was measured, in one unit everywhere",
            )
        return value if value >= SMALLEST else 0.0

    def count(self, key: str) -> int:
        value = self.get(key)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not 0 <= value <= MAX_DEVICES:
            raise self.wrong(
                key,
                f"{_short(value)} is not a number of devices",
                f"write a whole number from 0 to {MAX_DEVICES}",
            )
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if value not in (0, 1) or isinstance(value, float):
            raise self.wrong(key, f"{_short(value)} is neither 0 nor 1", "write true or false")
        return bool(value)

    def name(self, key: str) -> int | str:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self.wrong(key, f"{_short(value)} is no name", "write a whole number or a text")
        return value


def _short(data: Any) -> str:
    text = "null" if data is None else repr(data)
    return text if len(text) <= 60 else text[:57] + "..."
