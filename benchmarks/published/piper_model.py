"""Piper's planning problem: its data, the reader of its files, and the price of a plan.

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

The JSON has ``maxDevices``, ``maxMemoryPerDevice`` (bytes), ``mbsInBatch``, ``bandwidth``
(bytes/s), ``nodes`` with ``TMPCs`` (lists of variants by tensor-parallel degree) and ``edges``
with ``communicationCost`` in bytes.

`evaluate` shares no code with the search.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.published.reading import MAX_DEVICES, Place, content, numbered, refuse_cycles
from benchmarks.published.solution import StageSolution
from pdcompile import jsonio
from pdcompile.errors import ConfigError, CostError, PlanError

MAX_BATCH = 2**40
LARGEST = 1e30  # sums and products with it stay finite

_KEYS = "maxDevices, maxMemoryPerDevice, mbsInBatch, bandwidth, nodes, edges"


@dataclass(frozen=True, slots=True)
class NodeVariant:
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
    variants: Mapping[int, tuple[NodeVariant, ...]]
    name: str = ""


@dataclass(frozen=True, slots=True)
class MenuEdge:
    source: int  # index into the nodes
    target: int
    bytes: float


@dataclass(frozen=True, slots=True)
class MenuProblem:
    """Problem as the file has it; the edges have no cycle, and no two the same ends."""

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
    data = jsonio.loads(content(path), where=where, error=CostError)
    given = {
        "maxDevices": _whole("devices", devices, MAX_DEVICES),
        "maxMemoryPerDevice": _positive("memory_bytes", memory_bytes),
        "mbsInBatch": _whole("batch", batch, MAX_BATCH),
        "bandwidth": _positive("bytes_per_second", bytes_per_second),
    }
    return parse(data, where=where, given=given)


def parse(data: Any, *, where: str, given: Mapping[str, Any] | None = None) -> MenuProblem:
    """Problem from parsed JSON; `where` is the file's name, `given` replaces top-level numbers."""
    top = Place(data, where, keys=_KEYS, largest=LARGEST)
    for key, value in (given or {}).items():
        if value is not None:
            top.data[key] = value
    places = top.nodes()
    names = [str(place.name("id")) for place in places]
    index = numbered(names, where)
    edges = _edges(top, index)
    refuse_cycles(names, [(edge.source, edge.target) for edge in edges], f"{where}: edges")
    sources: list[set[int]] = [set() for _ in names]
    targets: list[set[int]] = [set() for _ in names]
    for edge in edges:
        sources[edge.target].add(edge.source)
        targets[edge.source].add(edge.target)
    return MenuProblem(
        nodes=tuple(_node(place, index, sources[i], targets[i]) for i, place in enumerate(places)),
        edges=edges,
        devices=top.count("maxDevices", 1, MAX_DEVICES),
        memory_bytes=top.limit("maxMemoryPerDevice"),
        batch=top.count("mbsInBatch", 1, MAX_BATCH),
        bytes_per_second=top.limit("bandwidth"),
    )


def _node(place: Place, index: Mapping[str, int], sources: set[int], targets: set[int]) -> MenuNode:
    menus = place.inside("TMPCs")
    variants: dict[int, tuple[NodeVariant, ...]] = {}
    for key in menus.data:
        degree = int(key) if key.isascii() and key.isdigit() and len(key) < 9 else 0
        if not degree >= 1 or degree in variants:
            raise CostError(
                f"{key!r} is not a tensor-parallel degree, or is there twice",
                where=menus.where,
                remedy="use whole numbers of devices from 1 on as keys, each once",
            )
        items = [_variant(item, index, sources, targets) for item in menus.each(key, f"[{key!r}]")]
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
    place: Place, index: Mapping[str, int], sources: set[int], targets: set[int]
) -> NodeVariant:
    return NodeVariant(
        id=place.name("id"),
        seconds=place.number("timePerSample"),
        parameter_bytes=place.number("parameterSize"),
        moving_bytes=place.number("memoryUsageA"),
        fixed_bytes=place.number("memoryUsageB"),
        sync_forward=_sync(place.inside("syncTimeFw"), index, sources, "to"),
        sync_backward=_sync(place.inside("syncTimeBw"), index, targets, "from"),
    )


def _sync(
    place: Place, index: Mapping[str, int], ends: set[int], direction: str
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


def _edges(top: Place, index: dict[str, int]) -> tuple[MenuEdge, ...]:
    found: dict[tuple[int, int], MenuEdge] = {}
    for place in top.each("edges"):
        pair = place.ends(index, str)
        if pair in found:
            raise CostError(
                f"the edge from {place.data['sourceId']!r} to {place.data['destId']!r} is there "
                "twice",
                where=place.where,
                remedy="keep one edge between two nodes, with the bytes of both",
            )
        found[pair] = MenuEdge(*pair, place.number("communicationCost"))
    return tuple(found.values())


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


SLACK = 1e-9  # of the memory limit, where the file has fractions of bytes


@dataclass(frozen=True, slots=True)
class PiperCost:
    """Per stage, in pipeline order; `objective` is the largest of `seconds`."""

    objective: float
    seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    in_flight: tuple[int, ...]


def evaluate(problem: MenuProblem, stages: Sequence[StageSolution]) -> PiperCost:
    """The exact objective of Piper's model (see `piper_model`) for stages in pipeline order.

    Every stage has its data-parallel degree in `replicas`, and ``"tensor_parallel"`` and
    ``"variants"`` (variant id by node id, as text) in its details.

    Raises:
        PlanError: a node is missing, there twice or unknown, an edge points backwards, a degree
            or variant is not on the menu, or devices or memory do not suffice.
    """
    stage_of = _stage_of(problem, stages)
    devices = sum(stage.replicas * _degree(stage) for stage in stages)
    if devices > problem.devices:
        raise PlanError(f"the plan takes {devices} devices, there are {problem.devices}")

    seconds, memory, in_flight = [], [], []
    later = 0
    for s in reversed(range(len(stages))):
        d, t = stages[s].replicas, _degree(stages[s])
        if d < 1 or problem.batch % d:
            raise PlanError(f"{d} replicas do not divide the batch of {problem.batch}")
        chosen = {
            v: _chosen(problem, v, t, stages[s].details["variants"])
            for v, at in stage_of.items()
            if at == s
        }
        later += d
        y = -(-later // d)
        held = math.fsum(c.moving_bytes * y + c.fixed_bytes for c in chosen.values())
        if held > allowed(problem):
            raise PlanError(
                f"{held:.0f} bytes exceed the limit of {problem.memory_bytes:.0f}",
                where=f"stages[{s}]",
            )
        cut = [
            2 * (edge.bytes + chosen[edge.target].sync_forward.get(edge.source, 0.0))
            for edge in problem.edges
            if edge.target in chosen and edge.source not in chosen
        ] + [
            2 * (edge.bytes + chosen[edge.source].sync_backward.get(edge.target, 0.0))
            for edge in problem.edges
            if edge.source in chosen and edge.target not in chosen
        ]
        weights = math.fsum(c.parameter_bytes for c in chosen.values())
        moved = math.fsum(cut) / d + 4 * (d - 1) / d * weights / problem.batch
        busy = math.fsum(c.seconds for c in chosen.values()) / d
        seconds.append(moved / problem.bytes_per_second + busy)
        memory.append(held)
        in_flight.append(y)
    return PiperCost(
        max(seconds), tuple(seconds[::-1]), tuple(memory[::-1]), tuple(in_flight[::-1])
    )


def _stage_of(problem: MenuProblem, stages: Sequence[StageSolution]) -> dict[int, int]:
    index = {node.id: i for i, node in enumerate(problem.nodes)}
    stage_of: dict[int, int] = {}
    for s, stage in enumerate(stages):
        for name in stage.members:
            if name not in index or index[name] in stage_of:
                raise PlanError(f"node {name!r} is unknown or in two stages", where=f"stages[{s}]")
            stage_of[index[name]] = s
        if not stage.members:
            raise PlanError("the stage is empty", where=f"stages[{s}]")
    if len(stage_of) < len(problem.nodes):
        raise PlanError(f"{len(problem.nodes) - len(stage_of)} nodes are in no stage")
    if any(stage_of[edge.source] > stage_of[edge.target] for edge in problem.edges):
        raise PlanError("an edge points to an earlier stage")
    return stage_of


def allowed(problem: MenuProblem) -> float:
    """The limit on one device's bytes, with room for rounding where there are fractions."""
    whole = all(
        variant.moving_bytes.is_integer() and variant.fixed_bytes.is_integer()
        for node in problem.nodes
        for variants in node.variants.values()
        for variant in variants
    )
    return problem.memory_bytes if whole else problem.memory_bytes * (1 + SLACK)


def _degree(stage: StageSolution) -> int:
    return int(stage.details["tensor_parallel"])


def _chosen(problem: MenuProblem, v: int, degree: int, names: Mapping[str, object]) -> NodeVariant:
    node = problem.nodes[v]
    for variant in node.variants.get(degree, ()):
        if variant.id == names.get(str(node.id)):
            return variant
    raise PlanError(
        f"node {node.id!r} has no variant {names.get(str(node.id))!r} on {degree} devices"
    )
