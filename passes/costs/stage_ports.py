"""Values that a stage of a cut takes and gives, and bytes of one microbatch on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdcompile.ir.graph import OpGraph, Ref, walk
from pdcompile.passes.stages.boundaries import tied


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of one microbatch on one stage.

    `saved_bytes`: alive when the forward has returned, results among it, without parameters, what
    was received and the caller's inputs.  `workspace_bytes`: how far forward and backward exceed
    that, beside gradients of parameters that have memory already.  `first_peak_bytes`: the peak of
    both together for a minibatch's first microbatch, gradients of parameters among it; known of a
    stage that was `rehearsed` with a whole backward.  `split_bytes`: alive between the two parts
    of a split backward, with the gradients that the second part needs; 0 where that is not known.
    `split_workspace_bytes`: how far the second part exceeds that; then `workspace_bytes` is that
    of the first.  `split_freed_bytes`: results that are alive there only for somebody else.
    `forward_workspace_bytes`: how far the forward alone exceeds `saved_bytes`.
    `whole_workspace_bytes`: `workspace_bytes` of a backward in one piece, where others are in two.
    All of this is with the results held until the end.  Where nobody needs them after the forward,
    `loose_bytes` fewer are held then, and a whole backward's peaks are `freed_bytes` lower.
    """

    saved_bytes: int
    workspace_bytes: int
    first_peak_bytes: int | None = None
    rehearsed: bool = False
    split_bytes: int = 0
    split_workspace_bytes: int = 0
    split_freed_bytes: int = 0
    whole_workspace_bytes: int = 0
    forward_workspace_bytes: int = 0
    loose_bytes: int = 0
    freed_bytes: int = 0

    @property
    def first_workspace_bytes(self) -> int:
        """Bytes by which the first microbatch exceeds what is saved; 0 where that is not known."""
        return max(0, (self.first_peak_bytes or 0) - self.saved_bytes)


@dataclass(slots=True)
class Ports:
    """Names of the values that a stage takes and gives, by their part in its backward.

    `received`: values of earlier stages; `entered`: received values whose gradients go back;
    `chained`: entered values that bring the sum of later readers' gradients; `results`: values
    that leave the stage or the model; `roots`: results that get a gradient from outside.
    `copies`: tied parameters that an earlier stage owns, whose gradients it gets.
    """

    received: list[str] = field(default_factory=list)
    entered: list[str] = field(default_factory=list)
    chained: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)


def ports_of(
    graph: OpGraph, stage_of: Sequence[int], num_stages: int, *, keeps_outputs: bool = True
) -> list[Ports]:
    """The ports of each stage; ops of the loss are on the last one."""
    position = {op.name: i for i, op in enumerate(graph.ops)}
    returned = {ref.name for ref in walk(graph.output, Ref)} | {graph.loss}
    last = num_stages - 1
    ports = [Ports() for _ in range(num_stages)]
    for i, op in enumerate(graph.ops):
        value = graph.values[op.name]
        home = stage_of[i]
        readers = {stage_of[position[name]] for name in value.consumers if name in position}
        readers.discard(home)
        targets = readers | ({last} if op.name in returned and home != last else set())
        if targets or op.name == graph.loss or (op.name in returned and keeps_outputs):
            ports[home].results.append(op.name)
        for target in targets:
            ports[target].received.append(op.name)
        # Only stages that compute with a value send a gradient for it.
        for target in sorted(readers) if value.needs_gradient else ():
            ports[target].entered.append(op.name)
            if target != max(readers):
                ports[target].chained.append(op.name)
        if readers and value.needs_gradient:
            ports[home].roots.append(op.name)
    for one in tied(graph, {op.name: stage for op, stage in zip(graph.ops, stage_of, strict=True)}):
        for later in one.stages[1:]:
            ports[later].copies.append(one.fqn)
    return ports
