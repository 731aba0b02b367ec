"""Wiring: one stage in one mode, its arguments and results joined to the edges of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdcompile.ir.stage_interface import Port, Signature
from pdcompile.plan import Edge
from pdcompile.schedule import Kind


@dataclass(frozen=True, slots=True)
class Wiring:
    """The edges along which a stage's inputs come and its outputs go.

    `inputs` and `outputs` pair each port with the index of its edge (None: a leaf of the call,
    or an output that no other stage needs).  `fan_out`: how many stages get the value of an edge
    that leaves.  `differentiable` edges have a gradient; `chained`
    ones of them bring this stage the sum of later consumers.
    """

    signature: Signature
    training: bool
    is_last: bool
    inputs: tuple[tuple[Port, int | None], ...]
    outputs: tuple[tuple[Port, int | None], ...]
    ports: dict[int, Port]
    fan_out: dict[int, int]
    differentiable: frozenset[int]
    chained: frozenset[int]

    @property
    def kind(self) -> Kind:
        return Kind.VALUE if self.training else Kind.EVAL_VALUE

    def paths(self, with_loss: bool) -> tuple[str, ...]:
        """Leaves of the call that the stage reads, or that also the loss does."""
        ports = [port for port, _ in self.inputs]
        ports += self.signature.loss_inputs if with_loss else ()
        return tuple(dict.fromkeys(port.path for port in ports if port.path is not None))


def wire(
    stage: int, num_stages: int, signature: Signature, edges: Sequence[Edge], training: bool
) -> Wiring:
    """Join a stage's signature to the edges that enter and leave it."""
    entering = {edge.value: n for n, edge in enumerate(edges) if stage in edge.targets}
    leaving = {edge.value: n for n, edge in enumerate(edges) if edge.source == stage}
    inputs = tuple(
        (port, None if port.path is not None else entering[port.value]) for port in signature.inputs
    )
    outputs = tuple((port, leaving.get(port.value)) for port in signature.outputs)
    here = {*entering.values(), *leaving.values()}
    return Wiring(
        signature=signature,
        training=training,
        is_last=stage == num_stages - 1,
        inputs=inputs,
        outputs=outputs,
        ports={edge: port for port, edge in (*inputs, *outputs) if edge is not None},
        fan_out={n: len(edges[n].targets) for n in leaving.values()},
        differentiable=frozenset(n for n in here if edges[n].gradient and training),
        chained=frozenset(
            n
            for n in entering.values()
            if training and edges[n].gradient and stage != edges[n].targets[-1]
        ),
    )
