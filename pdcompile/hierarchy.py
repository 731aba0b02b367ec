"""ProfileGraph and HierarchyProblem: PipeDream's planning problem, as its files state it.

The model of 'PipeDream: Generalized Pipeline Parallelism for DNN Training' (SOSP 2019, section
3.1): stages are convex parts of the graph, each on several replicas, inside levels of bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdcompile.errors import ConfigError

MAX_WORKERS = 65_536  # of all levels together


@dataclass(frozen=True, slots=True)
class ProfileNode:
    """One measured layer; times in seconds and sizes in bytes, both of a whole minibatch."""

    id: str
    description: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float  # of all its outputs
    parameter_bytes: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class ProfileGraph:
    """A profile without its inputs and unused tuple entries, nodes in the file's order."""

    nodes: tuple[ProfileNode, ...]
    edges: tuple[tuple[int, int], ...]  # indices into nodes; acyclic, none twice
    dropped: tuple[str, ...] = ()  # ids that carry no cost and take no part


@dataclass(frozen=True, slots=True)
class HierarchyProblem:
    """A profile, and the cluster that it is to be laid out on.

    Levels are (count, bytes per second), innermost first: level 0 joins `count` workers, level 1
    joins `count` such groups, and so on.  Idle workers are always allowed.
    """

    graph: ProfileGraph
    levels: tuple[tuple[int, float], ...]
    straight: bool = False  # no replication on any level
    fewer: bool = False  # among plans of equal objective, one with the fewest workers
    memory_bytes: float | None = None  # of one worker; None: no limit
    activation_compression: float | None = 1.0  # divides boundary terms; None: they are ignored

    def __post_init__(self) -> None:
        """Raises ConfigError: a level, the memory or the ratio is no usable number."""
        if not self.levels:
            raise ConfigError("a cluster needs at least one level", where="levels")
        workers = 1
        for k, (count, bandwidth) in enumerate(self.levels):
            where = f"levels[{k}]"
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"{count!r} is no count of components", where=where)
            if not 0 < bandwidth < math.inf:
                raise ConfigError(f"{bandwidth!r} bytes/s is no bandwidth", where=where)
            workers *= count
        if workers > MAX_WORKERS:
            raise ConfigError(
                f"{workers} workers are more than {MAX_WORKERS}",
                where="levels",
                remedy="plan for a smaller cluster",
            )
        if self.memory_bytes is not None and not 0 < self.memory_bytes < math.inf:
            raise ConfigError(f"{self.memory_bytes!r} bytes is no memory limit", where="memory")
        ratio = self.activation_compression
        if ratio is not None and not 0 < ratio < math.inf:
            raise ConfigError(
                f"{ratio!r} is no compression ratio",
                where="activation compression",
                remedy="give a positive number (1 = none), or none to ignore the boundaries",
            )

    @property
    def workers(self) -> int:
        return math.prod(count for count, _ in self.levels)
