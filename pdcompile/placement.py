"""PlacementProblem and LoadProblem: the largest load of a pipeline of unlike devices.

The model of 'Efficient Algorithms for Device Placement of DNN Graph Operators' (NeurIPS 2020):
every node goes on one device; a device that pays for transfers pays each value that crosses its
border once, out or in; the objective is the largest load.
"""

from __future__ import annotations

from dataclasses import dataclass


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
