"""Arguments and results of one stage in one mode, in order and with names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pdcompile.errors import PlanError
from pdcompile.ir.graph import Affine, GraphInput, Op, OpGraph, Ref, Size, walk
from pdcompile.ir.records import UNSHARD
from pdcompile.ir.stage_interface import OpaqueCall, Place, Port, Signature
from pdcompile.passes.stages.naming import unique, wishes
from pdcompile.plan import Edge


@dataclass(frozen=True)
class Mode:
    """One graph with its ops on stages."""

    graph: OpGraph
    stage_of: Mapping[str, int]
    last: int  # stage
    edges: tuple[Edge, ...]

    def ops(self, stage: int, region: str = "forward") -> list[Op]:
        """Ops of a stage, in order: those of the model, or of the loss."""
        return [op for op in self._ops[stage] if op.region == region]

    @cached_property
    def inputs(self) -> dict[str, GraphInput]:
        return {item.name: item for item in self.graph.inputs}

    @cached_property
    def wishes(self) -> dict[str, tuple[str, bool]]:
        return wishes(self.graph)

    @cached_property
    def _ops(self) -> list[list[Op]]:
        found: list[list[Op]] = [[] for _ in range(self.last + 1)]
        for op in self.graph.ops:
            found[self.stage_of[op.name]].append(op)
        return found

    @cached_property
    def images(self) -> set[str]:
        """Results of convolutions, and what is made of them while it has their form and layout."""
        found, values = set[str](), self.graph.values
        for op in self.graph.ops:
            made = "conv" in op.target.rpartition(".")[2].lower() or found.intersection(op.inputs)
            if made and len(values[op.name].shape) == 4 and not values[op.name].stride_order:
                found.add(op.name)
        return found

    @cached_property
    def position(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.graph.ops)}


def signature(mode: Mode, k: int) -> Signature:
    """Arguments and results of stage k.  Raises PlanError for a loss that looks into the model."""
    ops = mode.ops(k)
    results = [edge.value for edge in mode.edges if edge.source == k]
    if k == mode.last:
        results = list(dict.fromkeys(ref.name for ref in walk(mode.graph.output, Ref)))
    received = _received(mode, ops, results)
    inputs = _name_inputs(mode, received)
    outputs = _name_outputs(mode, ops, results, inputs)
    loss_inputs = _loss_inputs(mode, k, results)
    loss_names = _name_inputs(mode, loss_inputs)
    written = {name for op in ops for name in op.mutates}
    storages = {mode.graph.values[name].storage for name in written} - {-1}
    draws: dict[str, tuple[int, ...]] = {}
    for op in ops:
        if op.draw is not None and op.kind in ("module", "opaque"):
            draws[op.module_path] = (*draws.get(op.module_path, ()), op.draw)

    def mutated(value: str) -> bool:
        return value in written or mode.graph.values[value].storage in storages

    return Signature(
        inputs=tuple(_port(mode, v, inputs[v], mutated(v)) for v in received),
        outputs=tuple(_port(mode, v, outputs[v], False, passed_on=k < mode.last) for v in results),
        loss_inputs=tuple(_port(mode, v, loss_names[v], False) for v in loss_inputs),
        loss=mode.graph.loss if k == mode.last else None,
        draws=draws,
        opaque_calls=_expectations(mode.graph, ops),
        unshards=any(op.target == UNSHARD for op in ops),
        any_layout=_any_layout(mode, ops, received, results),
    )


def _any_layout(mode: Mode, ops: list[Op], received: list[str], results: list[str]) -> bool:
    """True if no op views, draws or is not torch's, so that none depends on how an image lies."""
    values = mode.graph.values
    made = [*received, *(op.name for op in ops if not op.mutates)]
    memory = [values[name].storage for name in made if values[name].storage >= 0]
    torchs = re.compile(r"torch\.(?!ops\.)|operator\.|math\.").match  # no library's own operator
    own = [op for op in ops if op.opaque or (op.kind == "function" and not torchs(op.target))]
    depends = own or any(op.draw is not None for op in ops)
    depends = depends or any(values[name].stride_order for name in results)
    return not depends and len(set(memory)) == len(memory)


def _received(mode: Mode, ops: list[Op], results: list[str]) -> list[str]:
    """Values of earlier stages in the order of production, then leaves of the call."""
    made = {op.name for op in ops}
    used = [name for op in ops for name in op.inputs]
    needed = {name for name in (*used, *results) if name not in made}
    received = sorted(needed - mode.inputs.keys(), key=mode.position.__getitem__)
    received += [name for name in mode.inputs if name in needed]
    return [*received, *_size_carrier(mode.graph, ops, received)]


def _size_carrier(graph: OpGraph, ops: list[Op], received: list[str]) -> list[str]:
    """One input that has the microbatch size, if ops need it and nothing received has it."""

    def tells(name: str) -> bool:
        return any(isinstance(size, Affine) for size in graph.values[name].shape)

    if not any(walk((op.args, op.kwargs), Affine) for op in ops):
        return []
    if any(tells(name) for name in received):
        return []
    return [item.name for item in graph.inputs if tells(item.name)][:1]


def _loss_inputs(mode: Mode, k: int, results: list[str]) -> list[str]:
    """Outputs of the model that the loss reads, then target leaves."""
    ops = mode.ops(k, "loss")
    made = {op.name for op in ops}
    used = {name for op in ops for name in op.inputs} - made
    found = [name for name in results if name in used]
    found += [name for name in mode.inputs if name in used and name not in found]
    if strange := used - set(found):
        raise PlanError(
            f"the loss reads {sorted(strange)}, which the model does not return",
            where=ops[0].source,
            remedy="return from forward what loss_fn reads; it may write into clones of that alone",
        )
    return found


def _name_inputs(mode: Mode, values: list[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for value in values:
        named[value] = unique(mode.wishes[value][0], named.values())
    return named


def _name_outputs(
    mode: Mode, ops: list[Op], values: list[str], inputs: Mapping[str, str]
) -> dict[str, str]:
    """A result may take the name of an argument that is not read after the result is made."""
    position = {op.name: i for i, op in enumerate(ops)}
    last_use = {name: i for i, op in enumerate(ops) for name in op.inputs}
    named = {value: inputs[value] for value in values if value in inputs}
    for value in values:
        if value not in named:
            made = position[value]
            alive = [name for v, name in inputs.items() if last_use.get(v, -1) > made]
            named[value] = unique(mode.wishes[value][0], [*named.values(), *alive])
    return named


def _port(mode: Mode, value: str, name: str, mutated: bool, *, passed_on: bool = True) -> Port:
    info = mode.graph.values[value]
    source = mode.inputs.get(value)
    affine = (i for i, size in enumerate(info.shape) if isinstance(size, Affine))
    return Port(
        name=name,
        value=value,
        path=source.path if source else None,
        shape=info.shape,
        dtype=info.dtype,
        requires_grad=info.requires_grad,
        needs_gradient=info.needs_gradient,
        batch_dim=source.batch_dim if source else next(affine, None),
        mutated=mutated,
        stride_order=info.stride_order,
        image=passed_on and value in mode.images,
    )


def _expectations(graph: OpGraph, ops: list[Op]) -> dict[str, tuple[OpaqueCall, ...]]:
    """Tensors that the calls of each opaque module among `ops` take and give, in order."""
    found: dict[str, tuple[OpaqueCall, ...]] = {}
    for op in ops:
        if not op.opaque:
            continue
        given_at: list[tuple[int | str, Any]] = [*enumerate(op.args), *op.kwargs]
        takes = tuple(
            ((key,), graph.values[given.name].shape)
            for key, given in given_at
            if isinstance(given, Ref) and graph.values[given.name].is_tensor
        )
        expected = OpaqueCall(takes, tuple(_gives(graph, op.name, ())), op.returns, op.rebinds)
        found[op.module_path] = (*found.get(op.module_path, ()), expected)
    return found


def _gives(
    graph: OpGraph, name: str, place: Place
) -> Iterator[tuple[Place, tuple[Size, ...], str]]:
    value = graph.values[name]
    if value.is_tensor:
        yield place, value.shape, value.dtype
        return
    readers = [op for op in graph.ops if op.name in value.consumers]
    for part in readers:
        if part.target == "operator.getitem" and isinstance(part.args[1], int | str):
            yield from _gives(graph, part.name, (*place, part.args[1]))
