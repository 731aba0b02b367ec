"""Evaluates values that may be read while recording, on real tensors.

A value that depends on constants alone is the same in every call.  One that depends on inputs is
computed for the integers of the example, and has to be checked at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.ir.execution import Lookup, run_op
from pdcompile.ir.graph import CHECK, GraphInput, Op, OpGraph, Ref, walk, written_buffers
from pdcompile.ir.opaque import tensors_among
from pdcompile.ir.value_checks import is_pure, needed_ops
from pdcompile.passes.trace.real_shapes import MAX_BYTES, called
from pdcompile.passes.trace.tape.fake_tensors import FakeTensors
from pdcompile.releases.torch_internals import NoTorchFunction, no_dispatch_modes

MAX_WRITTEN = 2_048  # numbers of one input that a source file repeats
MAX_SAMPLES = 64  # of the example, on each of which a value must be the same


def example_calls(
    flat: FlatCall, layout: BatchLayout, inputs: tuple[GraphInput, ...], call: FlatCall
) -> Iterator[Mapping[str, Tensor]]:
    """Integers and bools of the inputs in the shapes of one recorded call, by name.

    First those of the call itself, then every sample repeated to its size, then the minibatch in
    pieces of its size.

    Args:
        flat: the example minibatch.
        layout: which dims of it count samples.
        inputs: the graph's inputs.
        call: the recorded call, the example resized.
    """
    known: dict[str, tuple[Tensor, Tensor, int | None]] = {
        entry.name: (call.leaves[entry.path], flat.leaves[entry.path], entry.batch_dim)
        for entry in inputs
        if not (call.leaves[entry.path].is_meta or _continuous(call.leaves[entry.path]))
    }
    yield {name: leaf for name, (leaf, _, _) in known.items()}
    rows = {leaf.shape[dim] for leaf, _, dim in known.values() if dim is not None}
    total = layout.size
    if len(rows) != 1 or not layout.splits:
        return
    size = rows.pop()
    pieces = [[i] * size for i in range(total)][:MAX_SAMPLES]
    starts = range(0, total, size)
    pieces += [[min(s + i, total - 1) for i in range(size)] for s in starts][:MAX_SAMPLES]
    for piece in pieces:
        with no_dispatch_modes():
            index = torch.tensor(piece)
            given = {
                name: leaf if dim is None else whole.index_select(dim, index.to(whole.device))
                for name, (leaf, whole, dim) in known.items()
            }
        yield given


def _continuous(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def demanded(graph: OpGraph, call: FlatCall) -> dict[str, Any]:
    """Integers of the example, by path, as nested lists: of inputs whose values may make the model
    fail, because they are checked, or given to an opaque module (as lengths may be)."""
    wanted: set[str] = set()
    for i, op in enumerate(graph.ops):
        wanted.update(op.inputs if op.opaque else ())
        if op.target == CHECK:
            before = needed_ops(graph.ops[:i], op.inputs, graph.storage_of)
            wanted |= before[1]
    found = {}
    for entry in graph.inputs:
        leaf = call.leaves[entry.path]
        small = leaf.numel() <= MAX_WRITTEN and not leaf.is_meta
        if entry.name in wanted and small and not _continuous(leaf):
            found[entry.path] = leaf.tolist()
    return found


def shuffled(flat: FlatCall) -> FlatCall:
    """The same call with the numbers of each tensor in another order."""

    def mixed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        order = torch.randperm(leaf.numel(), generator=torch.Generator().manual_seed(0))
        numbers = leaf.detach().reshape(-1)[order.to(leaf.device)].reshape(leaf.shape)
        made = torch.empty_like(leaf, requires_grad=False).copy_(numbers)
        return made.requires_grad_(leaf.requires_grad)

    return FlatCall({path: mixed(leaf) for path, leaf in flat.leaves.items()}, flat.spec)


_BY_SHAPE = frozenset(
    ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "new_tensor")
)


def read(
    func: Callable[..., Any], args: Any, kwargs: Any, ops: Sequence[Op], fakes: FakeTensors
) -> tuple[Any] | None:
    """(the result of a call that reads values,) when all its tensors are constants; else None."""

    reals: dict[int, Any] = {}
    for tensor in tensors_among((args, kwargs)):
        name = fakes.name(tensor)
        reals[id(tensor)] = evaluate(name.name, ops, fakes) if isinstance(name, Ref) else None
        if reals[id(tensor)] is None:
            return None
    with no_dispatch_modes():
        return (called(func, args, kwargs, reals),)


def evaluate(
    name: str,
    ops: Sequence[Op],
    fakes: FakeTensors,
    given: Mapping[str, Tensor] | None = None,
) -> Tensor | None:
    """The real tensor for a value, or None when it does not depend on constants alone.

    Only creation functions and ops on their results qualify: no parameters, no draws.  With
    `given`, the tensors of some graph inputs by name, these qualify too, and buffers of integers
    and bools that nothing writes; values written in place are read after the writes.
    """
    needed = _needed(name, ops, fakes, given)
    if needed is None:
        return None
    env: dict[str, Any] = {}
    held: dict[str, Tensor] = {}
    with no_dispatch_modes():
        for path, tensor in (given or {}).items():
            env[path] = tensor.detach().clone()
        for op in needed:
            for pattern in set(op.inputs) - set(env):
                fake = fakes.objects[pattern]
                env[pattern] = torch.empty(fake.shape, dtype=fake.dtype, device=fakes.home)
            for fqn in op.attributes:
                held[fqn] = fakes.table.objects[fqn].detach()
            lookup = Lookup(torch.nn.Module(), b=0, device=fakes.home, constants=held)
            env[op.name] = run_op(op, env, lookup)
    found = env[name]
    return found if isinstance(found, Tensor) else None


def _needed(
    name: str, ops: Sequence[Op], fakes: FakeTensors, given: Mapping[str, Tensor] | None
) -> list[Op] | None:
    """The ops that make a value, in order; None where one of them does not qualify."""
    found, leaves = needed_ops(ops, (name,), fakes.storage_of, _read_by)
    rewritten = written_buffers(ops)
    if not leaves <= set(given or {}) or any(rewritten.intersection(op.attributes) for op in found):
        return None
    if not all(_qualifies(op, fakes, with_inputs=given is not None) for op in found):
        return None
    # The limit is far above masks of long inputs: a model is recorded with many more samples than
    # will run, and a value that is known with few of them has to be known with those too.
    made = [fakes.objects[op.name] for op in found if op.name in fakes.objects]
    with NoTorchFunction():  # or the sizes would count as read by the model
        size = sum(fake.numel() * fake.element_size() for fake in made)
    return found if size <= MAX_BYTES else None


def _read_by(op: Op) -> tuple[str, ...]:
    """The inputs whose values an op reads; ``ones_like`` reads the shape of its first one only."""
    if op.target.rpartition(".")[2] not in _BY_SHAPE or not isinstance(op.args[0], Ref):
        return op.inputs
    return tuple(ref.name for ref in walk((op.args[1:], op.kwargs), Ref))


def _qualifies(op: Op, fakes: FakeTensors, *, with_inputs: bool) -> bool:
    if not with_inputs:
        return is_pure(op) and not op.attributes and not op.mutates
    return is_pure(op) and all(_plain_buffer(fqn, fakes) for fqn in op.attributes)


def _plain_buffer(fqn: str, fakes: FakeTensors) -> bool:
    """True if a tensor is a table of integers that training does not change."""
    tensor, info = fakes.table.objects.get(fqn), fakes.table.tensors.get(fqn)
    if tensor is None or info is None or info.kind == "parameter" or tensor.is_meta:
        return False
    if tensor.is_floating_point() or tensor.is_complex() or fqn in fakes.rewritten:
        return False
    fakes.findings.constants.add(fqn)
    return True
