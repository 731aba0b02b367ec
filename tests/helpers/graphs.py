"""Hand-made OpGraphs: a builder, a few shapes that everybody needs, and random graphs.

Nothing here imports torch.  The builder keeps the bookkeeping of `OpGraph` (consumers, which
values require and need gradients, storages) so that a test states only what it is about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from pdcompile.ir.graph import (
    Affine,
    Argument,
    GraphInput,
    Op,
    OpCost,
    OpGraph,
    Ref,
    Size,
    TensorInfo,
    Value,
    walk,
)

B = Affine(1)


class GraphBuilder:
    """Collects ops in order; `build` fills in consumers and gradient flags."""

    def __init__(self, *, batch_size: int = 4, training: bool = True) -> None:
        self.batch_size = batch_size
        self.training = training
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self.inputs: list[GraphInput] = []
        self.tensors: dict[str, TensorInfo] = {}
        self._calls: dict[tuple[str, str], int] = {}
        self._storages = 0

    def input(
        self, name: str, shape: Sequence[Size] = (B, 8), dtype: str = "float32", path: str = ""
    ) -> Ref:
        """A tensor that the caller passes in; split along dim 0 when that is an Affine."""
        batched = bool(shape) and isinstance(shape[0], Affine)
        self.inputs.append(GraphInput(name, path or name, 0 if batched else None))
        self.values[name] = Value(name, tuple(shape), dtype, storage=self._storage())
        return Ref(name)

    def parameter(
        self,
        fqn: str,
        shape: Sequence[int] = (8, 8),
        *,
        trainable: bool = True,
        aliases: tuple[str, ...] = (),
    ) -> str:
        self.tensors[fqn] = TensorInfo(
            fqn, "parameter", tuple(shape), "float32", requires_grad=trainable, aliases=aliases
        )
        return fqn

    def buffer(self, fqn: str, shape: Sequence[int] = (8,)) -> str:
        self.tensors[fqn] = TensorInfo(fqn, "buffer", tuple(shape), "float32")
        return fqn

    def op(
        self,
        name: str,
        target: str = "torch.relu",
        args: tuple[Argument, ...] = (),
        *,
        kind: Any = "function",
        shape: Sequence[Size] = (B, 8),
        dtype: str = "float32",
        module: str = "",
        view_of: Ref | None = None,
        seconds: tuple[float, float] | None = None,
        saved: int = 0,
        **fields: Any,
    ) -> Ref:
        """Append one op and return the Ref of its value.

        `view_of` (or `mutates`) gives the value an existing storage; `seconds` (forward,
        backward) sets its cost by hand; further keywords are fields of `Op`.
        """
        call = (module, target)
        index = self._calls.get(call, 0)
        self._calls[call] = index + 1
        mutated = fields.get("mutates", ())
        base = view_of.name if view_of else (mutated[0] if mutated else None)
        storage = self.values[base].storage if base else self._storage()
        op = Op(name, kind, target, args, module_path=module, call_index=index, **fields)
        if seconds is not None:
            cost = OpCost(*seconds, saved_bytes=saved, microbatch_size=self.batch_size)
            op = dataclasses.replace(op, cost=cost)
        self.ops.append(op)
        self.values[name] = Value(name, tuple(shape), dtype, producer=name, storage=storage)
        return Ref(name)

    def build(self, output: Argument, *, loss: Ref | None = None) -> OpGraph:
        consumers: dict[str, list[str]] = {name: [] for name in self.values}
        requires: set[str] = set()
        for op in self.ops:
            for name in op.inputs:
                consumers[name].append(op.name)
            trainable = any(self.tensors[fqn].requires_grad for fqn in op.parameters)
            if op.grad_enabled and (trainable or requires.intersection(op.inputs)):
                requires.add(op.name)
        needs = {loss.name} if loss else set()
        for op in reversed(self.ops):
            if op.name in needs:
                needs.update(requires.intersection(op.inputs))
        values = {
            name: dataclasses.replace(
                value,
                consumers=tuple(consumers[name]),
                requires_grad=name in requires and value.dtype.startswith(("float", "container")),
                needs_gradient=name in needs and name in requires,
            )
            for name, value in self.values.items()
        }
        return OpGraph(
            training=self.training,
            ops=tuple(self.ops),
            values=values,
            inputs=tuple(self.inputs),
            tensors=dict(self.tensors),
            output=output,
            loss=loss.name if loss else None,
            batch_size=self.batch_size,
        )

    def _storage(self) -> int:
        self._storages += 1
        return self._storages


def chain(length: int = 4, width: int = 8, *, costs: bool = True) -> OpGraph:
    """x → linear → … → linear → mean: one layer and one parameter an op, the loss inside."""
    g = GraphBuilder()
    value = g.input("x", (B, width))
    for i in range(length):
        value = g.op(
            f"linear_{i}",
            "torch.nn.Linear",
            (value,),
            kind="module",
            module=f"layers.{i}",
            shape=(B, width),
            parameters=(g.parameter(f"layers.{i}.weight", (width, width)),),
            seconds=(1.0, 2.0) if costs else None,
            saved=width * 16,
        )
    loss = g.op("loss", "torch.mean", (value,), shape=(), seconds=(0.1, 0.1) if costs else None)
    return g.build(loss, loss=loss)


def residual(blocks: int = 3, width: int = 8) -> OpGraph:
    """Blocks of linear → gelu → linear → add around a skip, a tied head, an outside loss."""
    g = GraphBuilder()
    ids, target = g.input("ids", (B,), "int64"), g.input("target", (B,), "int64")
    embedding = g.parameter("wte.weight", (32, width), aliases=("head.weight",))
    x = g.op(
        "wte", "torch.nn.Embedding", (ids,), kind="module", module="wte", parameters=(embedding,),
        shape=(B, width), seconds=(0.5, 0.5),
    )  # fmt: skip
    for i in range(blocks):
        at = f"h.{i}"
        up, down = g.parameter(f"{at}.up.weight"), g.parameter(f"{at}.down.weight")
        y = g.op(
            f"up_{i}", "torch.nn.Linear", (x,), kind="module", module=f"{at}.up",
            parameters=(up,), shape=(B, 4 * width), seconds=(1.0, 2.0), saved=64,
        )  # fmt: skip
        y = g.op(
            f"gelu_{i}", "torch.nn.functional.gelu", (y,), module=at, shape=(B, 4 * width),
            seconds=(0.2, 0.3), saved=256,
        )  # fmt: skip
        y = g.op(
            f"down_{i}", "torch.nn.Linear", (y,), kind="module", module=f"{at}.down",
            parameters=(down,), shape=(B, width), seconds=(1.0, 2.0), saved=256,
        )  # fmt: skip
        x = g.op(f"add_{i}", "operator.add", (x, y), module=at, seconds=(0.1, 0.0))
    logits = g.op(
        "head", "torch.nn.Linear", (x,), kind="module", module="head", parameters=(embedding,),
        shape=(B, 32), seconds=(1.0, 2.0), saved=64,
    )  # fmt: skip
    loss = g.op(
        "cross_entropy", "torch.nn.functional.cross_entropy", (logits, target), module="loss_fn",
        shape=(), region="loss", seconds=(0.3, 0.3), saved=512,
    )  # fmt: skip
    return g.build(logits, loss=loss)


def check(graph: OpGraph) -> None:
    """Raise AssertionError unless the graph keeps the rules of `OpGraph`."""
    seen = {given.name for given in graph.inputs}
    for op in graph.ops:
        assert op.name.isidentifier()
        assert op.name not in seen, f"{op.name} is defined twice"
        assert seen.issuperset(op.inputs), f"{op.name} reads a later value"
        assert all(fqn in graph.tensors for fqn in op.parameters)
        for name in op.inputs:
            assert op.name in graph.values[name].consumers
        seen.add(op.name)
    assert set(graph.values) == seen
    assert all(ref.name in seen for ref in walk(graph.output, Ref))


@st.composite
def random_graphs(draw: st.DrawFn, max_ops: int = 12) -> OpGraph:
    """Graphs with views, containers, in-place ops, written buffers, constants and tied weights."""
    g = GraphBuilder()
    pool = [g.input("x"), g.input("mask")]
    tied, state = g.parameter("tied.weight"), g.buffer("norm.running_mean")
    for i in range(draw(st.integers(1, max_ops))):
        kind = draw(st.sampled_from(("linear", "add", "view", "split", "relu_", "norm", "arange")))
        first, second = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        seconds = (draw(st.floats(0, 10)), draw(st.floats(0, 10)))
        match kind:
            case "linear":
                weight = draw(st.sampled_from((tied, g.parameter(f"fc{i}.weight"))))
                out = g.op(
                    f"linear_{i}", "torch.nn.functional.linear", (first,), module=f"fc{i}",
                    parameters=(weight,), seconds=seconds, saved=128,
                )  # fmt: skip
            case "add":
                out = g.op(f"add_{i}", "operator.add", (first, second), seconds=seconds)
            case "view":
                out = g.op(
                    f"view_{i}", "view", (first, -1, 8), kind="method", view_of=first,
                    seconds=(0.0, 0.0),
                )  # fmt: skip
            case "split":
                parts = g.op(
                    f"split_{i}", "torch.split", (first, 4, 1), dtype="container", shape=(),
                    view_of=first, seconds=(0.0, 0.0),
                )  # fmt: skip
                for k in range(2):
                    out = g.op(
                        f"part_{i}_{k}", "operator.getitem", (parts, k), view_of=first,
                        shape=(B, 4), seconds=(0.0, 0.0),
                    )  # fmt: skip
                    pool.append(out)
            case "relu_":
                out = g.op(
                    f"relu_{i}", "relu_", (first,), kind="method", mutates=(first.name,),
                    seconds=seconds,
                )  # fmt: skip
            case "norm":
                out = g.op(
                    f"norm_{i}", "torch.nn.BatchNorm1d", (first,), kind="module", module="norm",
                    module_call=i, buffers_read=(state,), buffers_written=(state,),
                    seconds=seconds, saved=64,
                )  # fmt: skip
            case _:
                out = g.op(f"arange_{i}", "torch.arange", (8,), shape=(8,), seconds=(1e-6, 0.0))
        pool.append(out)
    loss = g.op("loss", "torch.mean", (pool[-1],), shape=(), seconds=(0.1, 0.1))
    outputs = draw(st.lists(st.sampled_from(pool), max_size=2))
    return g.build((*outputs, loss), loss=loss)
