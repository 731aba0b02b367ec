"""Small graphs written op by op, of which only names and places matter."""

from __future__ import annotations

import dataclasses

from pdcompile.ir.graph import (
    Affine,
    Argument,
    Attr,
    Capture,
    GraphInput,
    Op,
    OpGraph,
    Ref,
    TensorInfo,
    Value,
)

WIDTH = 8


def graph(
    ops: list[Op],
    *,
    inputs: tuple[str, ...] = ("x",),
    output: Argument = None,
    loss: str | None = None,
    parameters: tuple[str, ...] = (),
    dtypes: dict[str, str] | None = None,
    gradient: bool = True,
    training: bool = True,
) -> OpGraph:
    """Every value is float32 (b, 8) unless `dtypes` says otherwise."""
    dtypes = dtypes or {}
    values = {
        name: Value(name, (Affine(1), WIDTH), dtypes.get(name, "float32"), storage=i)
        for i, name in enumerate(inputs)
    }
    for i, op in enumerate(ops):
        dtype = dtypes.get(op.name, "float32")
        values[op.name] = Value(
            op.name,
            (Affine(1), WIDTH) if dtype != "container" else (),
            dtype,
            gradient,
            gradient and dtype == "float32",
            op.name,
            tuple(other.name for other in ops if op.name in other.inputs),
            100 + i,
        )
    return OpGraph(
        training=training,
        ops=tuple(ops),
        values=values,
        inputs=tuple(GraphInput(name, name, 0) for name in inputs),
        tensors={
            fqn: TensorInfo(fqn, "parameter", (WIDTH, WIDTH), "float32", True) for fqn in parameters
        },
        output=output if output is not None else Ref(ops[-1].name),
        loss=loss,
        batch_size=4,
    )


def op(name: str, *inputs: str, weight: str | None = None, **fields: object) -> Op:
    """A function of values, and of one parameter."""
    args: tuple[Argument, ...] = tuple(Ref(each) for each in inputs)
    if weight is not None:
        args = (*args, Attr(weight))
        fields["parameters"] = (weight,)
    defaults = {"kind": "function", "target": "torch.add", "args": args}
    return Op(name, **{**defaults, **fields})  # type: ignore[arg-type]


def both(train: OpGraph, evaluation: OpGraph | None = None) -> Capture:
    return Capture(train, dataclasses.replace(evaluation or train, training=False))


def chain(length: int) -> OpGraph:
    """x → a0 → a1 → …"""
    return graph([op(f"a{i}", f"a{i - 1}" if i else "x") for i in range(length)])
