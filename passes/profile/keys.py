"""Structural keys: ops that do the same work on equal operands are measured once."""

from __future__ import annotations

import hashlib
from typing import Any

from pdcompile.ir.graph import (
    Affine,
    Attr,
    DictOf,
    ListOf,
    Op,
    Ref,
    Slice,
    TorchLiteral,
    size_at,
)
from pdcompile.passes.costs import Call, Index, Operand


def structural_key(call: Call, microbatch_size: int) -> str:
    """A short digest of what the op is and of the shape, dtype and layout of all it reads.

    Names of values, parameters and modules are not in it: the layers of a deep model share
    their keys.  Modules that are kept whole do not, since nothing is known of their insides.
    """
    op, index = call.op, call.index
    parts = [
        op.kind,
        op.target,
        op.module_path if op.kind == "opaque" else "",
        str(index.graph.training),
        str(op.grad_enabled),
        str(op.autocast),
        str(call.requires_grad),
        _describe(op.args, index, microbatch_size),
        _describe(op.kwargs, index, microbatch_size),
        _describe(op.constructor, index, microbatch_size),
        _held(op, index),
        ",".join(_operand(output) for output in call.outputs),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _held(op: Op, index: Index) -> str:
    names = (*op.parameters, *op.buffers_read, *op.buffers_written)
    held = [index.attribute(fqn) for fqn in dict.fromkeys(names)]
    return ",".join(_operand(operand) for operand in held if operand is not None)


def _operand(operand: Operand) -> str:
    layout = f"~{operand.stride_order}" if operand.stride_order else ""
    return f"{operand.dtype}{operand.shape}{'g' if operand.requires_grad else ''}{layout}"


def _describe(argument: Any, index: Index, b: int) -> str:
    """Only the kinds of arguments that a graph may hold are written out, never a repr of theirs."""
    match argument:
        case Ref(name):
            value = index.graph.values[name]
            kind = "tensor" if value.is_tensor else "container"
            return kind + "+".join(_operand(leaf) for leaf in index.leaves(name))
        case Attr(fqn):
            operand = index.attribute(fqn)
            return _operand(operand) if operand is not None else fqn
        case Affine():
            return str(size_at(argument, b))
        case TorchLiteral(kind, text):
            return f"{kind}:{text}"
        case ListOf(items):
            return "[" + ",".join(_describe(item, index, b) for item in items) + "]"
        case DictOf(items):
            return "{" + _describe(items, index, b) + "}"
        case Slice(start, stop, step):
            return ":".join(_describe(part, index, b) for part in (start, stop, step))
        case tuple():
            return "(" + ",".join(_describe(item, index, b) for item in argument) + ")"
        case None | bool() | int() | float() | complex() | str():
            return repr(argument)
    return type(argument).__name__
