"""PartitionProblem and Partition: the planner's mathematics, free of torch.

Everything is per microbatch.  Seconds are for a device of speed 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pdcompile.schedule.registry import DEFAULT


@dataclass(frozen=True, slots=True)
class Item:
    """Unit that may not be cut: one or more ops that stay together.

    parameter_bytes counts parameters owned by this item's ops, each parameter once: a tied
    parameter is a `SharedParameter`, and not counted here.
    """

    name: str
    ops: tuple[str, ...]
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0  # largest transient of one of its ops
    trained_sizes: tuple[int, ...] = ()  # bytes of each parameter in trainable_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """One value and the items that consume it: sent once to each consuming stage.

    The producer's stage is never after a consumer's.
    """

    value: str
    producer: int  # item index
    consumers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int = 0  # its gradient; 0 when none flows


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several items read: each stage that holds one of them holds a copy."""

    fqn: str
    bytes: int
    trainable: bool
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageLimits:
    """Limits of position s of the pipeline."""

    speed: float = 1.0
    memory_bytes: int | None = None
    bytes_per_second: float = float("inf")  # of the link to the next position
    full_duplex: bool = True  # that link
    latency_seconds: float = 0.0  # of each message on the link to the next position


@dataclass(frozen=True, slots=True)
class Holding:
    """Factors of the bytes that a rank of a stage needs at least, by its schedule.

    bytes = (trainable·versions + frozen) / readers + updated·(gradient_buffers + optimizer_factor)
            + saved·what a microbatch keeps + received·what comes in + returned·its gradients
            + workspace

    A stage updates what it trains, without copies of shared parameters that an earlier stage
    holds too.  What comes on top at one moment (sends in flight, temporaries of the optimizer's
    step) is in the ledger of the schedule alone.
    """

    versions: int = 1
    gradient_buffers: int = 1  # minibatches whose gradients are held
    optimizer_factor: float = 2.0  # optimizer state bytes per trainable parameter byte
    saved: int = 1  # microbatches whose activations are held
    received: int = 1  # receive slots of each value
    returned: int = 0  # receive slots of each gradient
    readers: int = 1  # ranks that have its weights together

    @property
    def updated(self) -> float:
        """Bytes beside weights, for each byte that the stage updates."""
        return self.gradient_buffers + self.optimizer_factor


# Parts of a certificate's scope, which "; " separates: "among all plans with ...".
ANY_CUT = "cuts between any two ops"
BY_RULE = "microbatches by rule"  # in a scope: nobody chose how many, and no others were compared
ONE_GROUP = "in one group: "
#: the text of the wish that coarsening adds: what makes the loss or output is pinned
OUTPUT_WISH = "the loss or output on the last stage"


@dataclass(frozen=True, slots=True)
class Wish:
    """Wish of a person, in their words, and the entries of the problem that it became.

    Only there to name constraints: an entry holds because it is in the problem's own field, and
    one that several wishes list is theirs together.
    """

    text: str
    pins: tuple[tuple[int, int], ...] = ()
    together: tuple[tuple[int, ...], ...] = ()
    apart: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """Assign items (in topological order) to `len(stages)` stages, monotone along traffic.

    Each stage holds one or more.
    `objective`: ``bottleneck`` minimises max_s load_s (no flush); ``flush`` minimises the
    schedule's makespan for `num_microbatches` (the bottleneck is the first-order term and the
    simulator decides among candidates).
    `together` are groups of item indices on one stage; `pins` (item, stage); `apart` are pairs
    of items that may not share a stage.
    `wishes` name the constraints that a person gave.
    `scope` says what coarsening kept together and why: the certificate holds inside it.
    """

    items: tuple[Item, ...]
    traffic: tuple[Traffic, ...]
    stages: tuple[StageLimits, ...]
    shared: tuple[SharedParameter, ...] = ()
    order: tuple[tuple[int, int], ...] = ()  # further precedence pairs without traffic
    together: tuple[tuple[int, ...], ...] = ()
    pins: tuple[tuple[int, int], ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    schedule: str = DEFAULT  # whose order this is, and whose microbatches and bytes the next ones
    in_flight: tuple[int, ...] = ()  # by stage; empty: one
    holdings: tuple[Holding, ...] = ()  # by stage; empty: the usual one
    num_microbatches: int = 1
    objective: Literal["bottleneck", "flush"] = "bottleneck"
    scope: str = ANY_CUT
    wishes: tuple[Wish, ...] = ()

    def holding(self, stage: int) -> Holding:
        """Factors of the bytes that a rank of a stage holds."""
        return self.holdings[stage] if self.holdings else Holding()

    def with_memory(self, limits: Mapping[int, int | None]) -> PartitionProblem:
        """The problem with other memory limits (bytes; None: no limit) on these stages."""
        stages = tuple(
            replace(stage, memory_bytes=limits.get(s, stage.memory_bytes))
            for s, stage in enumerate(self.stages)
        )
        return replace(self, stages=stages)

    def without_memory_limits(self) -> PartitionProblem:
        return self.with_memory(dict.fromkeys(range(len(self.stages))))


@dataclass(frozen=True, slots=True)
class Partition:
    """An answer: the stage of each item, and what the independent evaluator says of it."""

    stage_of: tuple[int, ...]
    objective: float  # seconds
    loads: tuple[float, ...]  # seconds per stage
    memory_bytes: tuple[int, ...]
