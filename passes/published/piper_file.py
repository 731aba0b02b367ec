"""MenuProblem: stages that choose from a menu, as in Piper's inputs.

The model of 'Piper: Multidimensional Planner for DNN Parallelization' (NeurIPS 2021).  A stage is
a convex set S of nodes with a data-parallel degree d, a tensor-parallel degree t, and one variant
for every node out of the node's list for t.  With K devices, N microbatches in a batch and links
of B bytes/s:

- the stage takes d·t devices, Σ d·t ≤ K, and d divides N
- bytes per sample = (Σ over edges entering S of 2·(c + sync_forward) + Σ over edges leaving S of
  2·(c + sync_backward)) / d + Σ over S of 4·(d − 1)/d·parameter_bytes/N, where the sync terms are
  those of the variant chosen for the end that lies in S
- seconds per sample = bytes/B + Σ seconds / d
- memory = Σ (moving_bytes·y + fixed_bytes) ≤ limit, y = ⌈(Σ of d over this and later stages)/d⌉
- the objective is the largest stage's seconds per sample

Its JSON has ``maxDevices``, ``maxMemoryPerDevice`` (bytes), ``mbsInBatch``, ``bandwidth``
(bytes/s), ``nodes`` with ``TMPCs`` (lists of variants by tensor-parallel degree) and ``edges``
with ``communicationCost`` in bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdcompile import jsonio
from pdcompile.errors import ConfigError, CostError

MAX_DEVICES = 65_536
MAX_BATCH = 2**40
LARGEST = 1e30  # sums and products with it stay finite

_KEYS = "maxDevices, maxMemoryPerDevice, mbsInBatch, bandwidth, nodes, edges"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a node on `t` devices.

    `seconds` per sample; `moving_bytes` are held once for every microbatch in flight,
    `fixed_bytes` once.  `sync_forward` (by index of the source) and `sync_backward` (by index of
    the target) are bytes added to an edge where it is cut.
    """

    id: int | str
    seconds: float
    parameter_bytes: float = 0.0
    moving_bytes: float = 0.0
    fixed_bytes: float = 0.0
    sync_forward: Mapping[int, float] = field(default_factory=dict)
    sync_backward: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MenuNode:
    """`variants` by tensor-parallel degree; a degree that is not there is not allowed."""

    id: int | str
    variants: Mapping[int, tuple[Variant, ...]]
    name: str = ""


@dataclass(frozen=True, slots=True)
class MenuEdge:
    source: int  # index into the nodes
    target: int
    bytes: float


@dataclass(frozen=True, slots=True)
class MenuProblem:
    """As the file has it; the edges have no cycle, and no two the same ends."""

    nodes: tuple[MenuNode, ...]
    edges: tuple[MenuEdge, ...]
    devices: int
    memory_bytes: float  # of one device; inf: unlimited
    batch: int  # microbatches in a batch; data-parallel degrees divide it
    bytes_per_second: float


def read(
    path: str | os.PathLike[str],
    *,
    devices: int | None = None,
    memory_bytes: float | None = None,
    batch: int | None = None,
    bytes_per_second: float | None = None,
) -> MenuProblem:
    """The problem as the file has it; an argument that is given replaces the file's figure.

    Raises:
        CostError: the file cannot be read, or holds a missing or repeated id, a number that is
            negative or not finite, an edge without its sync times, a cycle, …; names the place.
        ConfigError: one of the arguments is out of range.
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
    given = {
        "maxDevices": _whole("devices", devices, MAX_DEVICES),
        "maxMemoryPerDevice": _positive("memory_bytes", memory_bytes),
        "mbsInBatch": _whole("batch", batch, MAX_BATCH),
        "bandwidth": _positive("bytes_per_second", bytes_per_second),
    }
    return parse(data, where=where, given=given)


def parse(data: Any, *, where: str, given: Mapping[str, Any] | None = None) -> MenuProblem:
    """From parsed JSON; `where` is the file's name, `given` replaces top-level numbers."""
    top = _Place(data, where)
    for key, value in (given or {}).items():
        if value is not None:
            top.data[key] = value
    places = [_Place(item, f"{where}: nodes[{i}]") for i, item in enumerate(top.items("nodes"))]
    if not places:
        raise CostError("there is no node", where=f"{where}: nodes", remedy="add the graph's nodes")
    index: dict[str, int] = {}
    for i, place in enumerate(places):
        name = str(place.name("id"))
        if name in index:
            raise CostError(
                f"id {name} appears twice",
                where=f"{where}: nodes[{index[name]}] and nodes[{i}]",
                remedy="give every node its own id",
            )
        index[name] = i
    edges = _edges(top, index)
    order = _refuse_cycles([str(place.data["id"]) for place in places], edges, where)
    sources: list[set[int]] = [set() for _ in order]
    targets: list[set[int]] = [set() for _ in order]
    for edge in edges:
        sources[edge.target].add(edge.source)
        targets[edge.source].add(edge.target)
    return MenuProblem(
        nodes=tuple(_node(place, index, sources[i], targets[i]) for i, place in enumerate(places)),
        edges=edges,
        devices=top.count("maxDevices", MAX_DEVICES),
        memory_bytes=top.limit("maxMemoryPerDevice"),
        batch=top.count("mbsInBatch", MAX_BATCH),
        bytes_per_second=top.limit("bandwidth"),
    )


def _node(
    place: _Place, index: Mapping[str, int], sources: set[int], targets: set[int]
) -> MenuNode:
    menus = place.inside("TMPCs")
    variants: dict[int, tuple[Variant, ...]] = {}
    for key in menus.data:
        degree = int(key) if key.isascii() and key.isdigit() and len(key) < 9 else 0
        if not degree >= 1 or degree in variants:
            raise CostError(
                f"{key!r} is no tensor-parallel degree, or is there twice",
                where=menus.where,
                remedy="use whole numbers of devices from 1 on as keys, each once",
            )
        items = [
            _variant(_Place(item, f"{menus.where}[{key!r}][{i}]"), index, sources, targets)
            for i, item in enumerate(menus.items(key))
        ]
        if len({variant.id for variant in items}) < len(items):
            raise CostError(
                "two variants have the same id",
                where=f"{menus.where}[{key!r}]",
                remedy="give every variant of one degree its own id",
            )
        if items:
            variants[degree] = tuple(items)
    if not variants:
        raise CostError(
            f"node {place.data['id']!r} has no variant",
            where=menus.where,
            remedy="list at least one variant for one tensor-parallel degree",
        )
    return MenuNode(place.name("id"), variants, str(place.data.get("name", "")))


def _variant(
    place: _Place, index: Mapping[str, int], sources: set[int], targets: set[int]
) -> Variant:
    return Variant(
        id=place.name("id"),
        seconds=place.number("timePerSample"),
        parameter_bytes=place.number("parameterSize"),
        moving_bytes=place.number("memoryUsageA"),
        fixed_bytes=place.number("memoryUsageB"),
        sync_forward=_sync(place.inside("syncTimeFw"), index, sources, "to"),
        sync_backward=_sync(place.inside("syncTimeBw"), index, targets, "from"),
    )


def _sync(
    place: _Place, index: Mapping[str, int], ends: set[int], direction: str
) -> dict[int, float]:
    found = {}
    for key in place.data:
        if index.get(key, -1) not in ends:
            raise CostError(
                f"there is no edge between this node and node {key!r} on that side",
                where=place.where,
                remedy="add the edge, or remove the entry",
            )
        found[index[key]] = place.number(key)
    if len(found) < len(ends):
        names = {i: key for key, i in index.items()}
        missing = ", ".join(names[i] for i in sorted(ends - found.keys()))
        raise CostError(
            f"no entry for the edge with node {missing}",
            where=place.where,
            remedy=f"add an entry (bytes, may be 0) for every edge {direction} this node",
        )
    return found


def _edges(top: _Place, index: Mapping[str, int]) -> tuple[MenuEdge, ...]:
    found: dict[tuple[int, int], MenuEdge] = {}
    for i, item in enumerate(top.items("edges")):
        place = _Place(item, f"{top.where}: edges[{i}]")
        ends = []
        for key in ("sourceId", "destId"):
            name = str(place.name(key))
            if name not in index:
                raise place.wrong(key, f"there is no node with id {name}", "add it to nodes")
            ends.append(index[name])
        pair = (ends[0], ends[1])
        if pair in found:
            raise CostError(
                f"the edge from {place.data['sourceId']!r} to {place.data['destId']!r} is there "
                "twice",
                where=place.where,
                remedy="keep one edge between two nodes, with the bytes of both",
            )
        found[pair] = MenuEdge(*pair, place.number("communicationCost"))
    return tuple(found.values())


def _refuse_cycles(names: list[str], edges: tuple[MenuEdge, ...], where: str) -> list[int]:
    after: list[list[int]] = [[] for _ in names]
    before: list[list[int]] = [[] for _ in names]
    waiting = [0] * len(names)
    for edge in edges:
        after[edge.source].append(edge.target)
        before[edge.target].append(edge.source)
        waiting[edge.target] += 1
    order = [v for v, count in enumerate(waiting) if not count]
    for v in order:
        for u in after[v]:
            waiting[u] -= 1
            if not waiting[u]:
                order.append(u)
    if len(order) == len(names):
        return order
    # Every node that is left has a predecessor that is left: walking back ends in a circle.
    walk: dict[int, None] = {}
    v = next(v for v, count in enumerate(waiting) if count)
    while v not in walk:
        walk[v] = None
        v = next(u for u in before[v] if waiting[u])
    path = list(walk)
    circle = [names[u] for u in [v, *reversed(path[path.index(v) :])]]
    text = " -> ".join(circle if len(circle) <= 12 else [*circle[:6], "…", *circle[-5:]])
    raise CostError(
        f"the edges form a cycle: {text}",
        where=f"{where}: edges",
        remedy="remove one of these edges; a graph of operators has no cycles",
    )


class _Place:
    """An object of the file, with its place for error messages."""

    def __init__(self, data: Any, where: str) -> None:
        self.where = where
        if not isinstance(data, dict):
            remedy = "write an object" + ("" if ": " in where else f" with {_KEYS}")
            raise CostError(f"{_short(data)} is not an object", where=where, remedy=remedy)
        self.data: dict[str, Any] = dict(data)

    def wrong(self, key: str, message: str, remedy: str) -> CostError:
        return CostError(message, where=f"{self._child(key)}", remedy=remedy)

    def get(self, key: str) -> Any:
        if key not in self.data:
            raise CostError(f"key {key!r} is missing", where=self.where, remedy=f"add {key!r}")
        return self.data[key]

    def inside(self, key: str) -> _Place:
        return _Place(self.get(key), self._child(key))

    def items(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, f"{_short(value)} is not a list", "write a list of objects")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"{_short(value)} is not a number", "write a number")
        if not 0 <= value <= LARGEST:  # also refuses NaN
            raise self.wrong(
                key, f"{_short(value)} is not between 0 and {LARGEST:g}", "write what was measured"
            )
        return float(value)

    def limit(self, key: str) -> float:
        """A positive number; null or infinity: unlimited."""
        value = self.get(key)
        if value is None or value == math.inf:
            return math.inf
        if not self.number(key):
            raise self.wrong(key, "0 is no limit", "write a positive number, or null for none")
        return float(value)

    def count(self, key: str, most: int) -> int:
        value = self.get(key)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not 1 <= value <= most:
            raise self.wrong(
                key,
                f"{_short(value)} is not a whole number from 1 to {most}",
                "write how many there are",
            )
        return int(value)

    def name(self, key: str) -> int | str:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise self.wrong(key, f"{_short(value)} is no name", "write a whole number or a text")
        return value

    def _child(self, key: str) -> str:
        return f"{self.where}.{key}" if ": " in self.where else f"{self.where}: {key}"


def _short(data: Any) -> str:
    text = "null" if data is None else repr(data)
    return text if len(text) <= 60 else text[:57] + "..."


def _whole(what: str, value: int | None, most: int) -> int | None:
    whole = value is None or (isinstance(value, int) and not isinstance(value, bool))
    if not whole or (value is not None and not 1 <= value <= most):
        raise ConfigError(
            f"{what} = {value!r} is not a whole number from 1 to {most}",
            remedy="leave it out for the file's own figure",
        )
    return value


def _positive(what: str, value: float | None) -> float | None:
    number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if not number or (value is not None and not (0 < value <= LARGEST or value == math.inf)):
        raise ConfigError(
            f"{what} = {value!r} is not a positive number",
            remedy="leave it out for the file's own figure",
        )
    return value
