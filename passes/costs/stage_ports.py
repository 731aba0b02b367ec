"""Values that a stage of a cut takes and gives, and bytes of one microbatch on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pdcompile.ir.graph import OpGraph
from pdcompile.ir.stage_wiring import Wiring, wire
from pdcompile.passes.stages.boundaries import edges, tied
from pdcompile.passes.stages.signatures import Mode, signature


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of one microbatch on one stage.

    `saved_bytes`: alive when the forward has returned, results among it, without parameters, what
    was received and the caller's inputs.  `workspace_bytes`: how far forward and backward exceed
    that, beside gradients of parameters that have memory already.  `first_peak_bytes`: the peak of
    both together for a minibatch's first microbatch, gradients of parameters among it; known of a
    stage that was `rehearsed` with a whole backward.  `split_bytes`: alive between the two parts
    of a split backward, with the gradients that the second part needs; 0 where that is not known.
    `split_workspace_bytes`: how far the second part exceeds that, and
    `split_first_workspace_bytes` the first what is saved.  `split_freed_bytes`: results that are
    alive there only for somebody else.  `forward_workspace_bytes`: how far the forward alone
    exceeds what is saved.  All of this is with the results held until the end.  Where nobody needs
    them after the forward, `loose_bytes` fewer are held then, and a whole backward's peaks are
    `freed_bytes` lower.
    """

    saved_bytes: int
    workspace_bytes: int
    first_peak_bytes: int | None = None
    rehearsed: bool = False
    split_bytes: int = 0
    split_workspace_bytes: int = 0
    split_freed_bytes: int = 0
    split_first_workspace_bytes: int = 0
    forward_workspace_bytes: int = 0
    loose_bytes: int = 0
    freed_bytes: int = 0

    @property
    def first_workspace_bytes(self) -> int:
        """Bytes by which the first microbatch exceeds what is saved; 0 where that is not known."""
        return max(0, (self.first_peak_bytes or 0) - self.saved_bytes)

    def with_parts(self, split: Resident) -> Resident:
        """These bytes of a whole backward, with those of the same stage's split one."""
        parts = [name for name in self.__slots__ if name.startswith("split_")]
        return replace(self, **{name: getattr(split, name) for name in parts})


class Ports(NamedTuple):
    """Values that a stage takes and gives.

    `copies`: tied parameters that an earlier stage owns, whose gradients it gets; `keeps_outputs`:
    what the last stage makes for the caller outlives its forward.
    """

    wiring: Wiring
    copies: tuple[str, ...] = ()
    keeps_outputs: bool = True

    @property
    def given(self) -> set[str]:
        """Names of the values that go out, and of the loss."""
        return {self.wiring.signature.loss or "", *(one.value for one, _ in self.wiring.outputs)}


def ports_of(
    graph: OpGraph, stage_of: Sequence[int], num_stages: int, *, keeps_outputs: bool = True
) -> list[Ports]:
    """The ports of each stage; ops of the loss are on the last one."""
    placed = {op.name: stage for op, stage in zip(graph.ops, stage_of, strict=True)}
    crossing = edges(graph, placed, num_stages, graph.batch_size)
    mode = Mode(graph, placed, num_stages - 1, crossing)
    shared = tied(graph, placed)
    return [
        Ports(
            wire(k, num_stages, signature(mode, k), mode.edges, training=True),
            tuple(one.fqn for one in shared if k in one.stages[1:]),
            keeps_outputs,
        )
        for k in range(num_stages)
    ]
