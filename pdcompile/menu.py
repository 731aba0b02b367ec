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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
