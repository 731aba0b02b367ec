"""Evaluates values that may be read while recording, on real tensors.

A value that depends on constants alone is the same in every call.  One that depends on inputs is
computed for given inputs, and has to be checked at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pdcompile.ir.execution import Lookup, run_op
from pdcompile.ir.graph import Op, Ref, walk, written_buffers
from pdcompile.ir.value_checks import is_pure, needed_ops
from pdcompile.passes.trace.real_shapes import MAX_BYTES
from pdcompile.passes.trace.tape.fake_tensors import FakeTensors
from pdcompile.releases.torch_internals import no_dispatch_modes

_BY_SHAPE = frozenset(
    ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "new_tensor")
)


def read(
    func: Callable[..., Any], args: Any, kwargs: Any, ops: Sequence[Op], fakes: FakeTensors
) -> tuple[Any] | None:
    """(the result of a call that reads values,) when all its tensors are constants; else None."""

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = fakes.name(value)
        found = evaluate(name.name, ops, fakes) if isinstance(name, Ref) else None
        if found is None:
            raise LookupError
        return found

    try:
        arguments, named = [real(a) for a in args], {k: real(v) for k, v in kwargs.items()}
    except LookupError:
        return None
    with no_dispatch_modes():
        return (func(*arguments, **named),)


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
    """Whether a tensor is a table of integers that training does not change."""
    tensor, info = fakes.table.objects.get(fqn), fakes.table.tensors.get(fqn)
    if tensor is None or info is None or info.kind == "parameter" or tensor.is_meta:
        return False
    if tensor.is_floating_point() or tensor.is_complex() or fqn in fakes.rewritten:
        return False
    fakes.findings.constants.add(fqn)
    return True
