"""Ops as the cost rules see them: with a plain name, operands by role, and sizes as numbers.

A linear layer may appear as ``torch.nn.functional.linear``, as ``torch._C._nn.linear`` or as a
``torch.nn.Linear`` module.  The rules know one name for all of them (`linear`) and ask for
operands by role, so that each formula is written once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pdcompile.ir.graph import (
    DTYPE_BYTES,
    Affine,
    Attr,
    Op,
    OpGraph,
    Ref,
    TensorInfo,
    TorchLiteral,
    Value,
    rewritten,
    size_at,
)

if TYPE_CHECKING:
    from torch import Tensor

_OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "imatmul": "matmul",
              "ipow": "pow", "ifloordiv": "floordivide", "truediv": "div", "radd": "add",
              "rmul": "mul", "rsub": "sub", "rtruediv": "div", "rpow": "pow", "rmatmul": "matmul",
              "iand": "and", "ior": "or", "divide": "div", "multiply": "mul", "subtract": "sub",
              "rdiv": "div", "invert": "bitwisenot", "meancrossentropy": "crossentropy",
              "vocabularycrossentropy": "crossentropy", "owngroupedmm": "groupedmm",
              "vocabularyembedding": "embedding"}  # fmt: skip
_MODULES = {"crossentropyloss": "crossentropy", "bceloss": "binarycrossentropy",
            "bcewithlogitsloss": "binarycrossentropywithlogits", "zeropad2d": "pad"}  # fmt: skip


def words(text: str) -> frozenset[str]:
    """The names in a text, for tables of ops that stay readable."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an op reads or makes.

    `name` is the value's name, or the FQN of a tensor of the model (`of_model`), which never
    counts as saved.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    of_model: bool = False
    storage: int = -1
    stride_order: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES.get(self.dtype, 4)


@dataclass(frozen=True)
class GraphIndex:
    """The tensors of one graph and the items of its containers, looked up by the rules."""

    graph: OpGraph
    b: int
    tensors: dict[str, TensorInfo] = field(default_factory=dict)  # by every name, aliases too
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)  # container -> its tensors

    @staticmethod
    def of(graph: OpGraph, b: int) -> GraphIndex:
        tensors = dict(graph.tensors)
        for info in graph.tensors.values():
            for alias in info.aliases:
                tensors.setdefault(alias, info)
        parts: dict[str, list[str]] = {}
        for op in graph.ops:
            for name in op.inputs:
                if not graph.values[name].is_tensor and op.target.endswith("getitem"):
                    parts.setdefault(name, []).append(op.name)
        return GraphIndex(graph, b, tensors, {k: tuple(v) for k, v in parts.items()})

    def value(self, value: Value) -> Operand:
        shape = tuple(size_at(size, self.b) for size in value.shape)
        return Operand(
            value.name, shape, value.dtype, value.requires_grad,
            storage=value.storage, stride_order=value.stride_order,
        )  # fmt: skip

    def attribute(self, fqn: str) -> Operand:
        info = self.tensors[fqn]
        trainable = info.requires_grad and info.kind == "parameter"
        return Operand(info.fqn, info.shape, info.dtype, trainable, of_model=True)

    def leaves(self, name: str) -> tuple[Operand, ...]:
        """The tensors that a value consists of: itself, or the items of a container."""
        value = self.graph.values[name]
        if value.is_tensor:
            return (self.value(value),)
        return tuple(leaf for part in self.parts.get(name, ()) for leaf in self.leaves(part))


@dataclass(frozen=True)
class CostedOp:
    """One op of the indexed graph."""

    op: Op
    index: GraphIndex

    @cached_property
    def name(self) -> str:
        """The plain name: lower case, no underscores, no namespace, in-place forms folded."""
        return plain_name(self.op)

    @property
    def in_place(self) -> bool:
        return bool(self.op.mutates)

    @cached_property
    def outputs(self) -> tuple[Operand, ...]:
        return self.index.leaves(self.op.name)

    @cached_property
    def inputs(self) -> tuple[Operand, ...]:
        """Tensors among the arguments, and those of the leaf module, each once, in order."""
        found = [operand for name in self.op.inputs for operand in self.index.leaves(name)]
        fqns = (*self.op.attributes, *self.op.parameters, *self.op.buffers_read)
        for fqn in dict.fromkeys(fqns):
            operand = self.index.attribute(fqn)
            if operand.name not in {other.name for other in found}:
                found.append(operand)
        return tuple(found)

    @property
    def output_bytes(self) -> int:
        """Bytes of the results, 0 where they lie in memory that was there before."""
        return 0 if self.is_view or self.in_place else sum(one.bytes for one in self.outputs)

    @property
    def requires_grad(self) -> bool:
        """True if autograd records this op: it runs under grad mode and a result requires grad."""
        return self.op.grad_enabled and any(output.requires_grad for output in self.outputs)

    @property
    def differentiated(self) -> bool:
        """True if a backward runs: recorded, and (where there is a loss) the loss needs it."""
        if not self.requires_grad:
            return False
        if self.index.graph.loss is None:
            return True
        values = self.index.graph.values
        return any(values[output.name].needs_gradient for output in self.outputs)

    @property
    def workspace_bytes(self) -> int:
        """The largest transient: gradients of results and inputs while the backward runs."""
        if not self.differentiated or self.is_view:
            return 0
        return sum(one.bytes for one in (*self.inputs, *self.outputs) if one.requires_grad)

    def tensor(self, position: int, keyword: str) -> Operand | None:
        """The tensor argument at a position or keyword; of a module also its own tensor."""
        argument = self.argument(position, keyword)
        if isinstance(argument, Ref):
            value = self.index.graph.values[argument.name]
            return self.index.value(value) if value.is_tensor else None
        if isinstance(argument, Attr):
            return self.index.attribute(argument.fqn)
        if self.op.kind == "module" and argument is None:
            name = f"{self.op.module_path}.{keyword}"
            return self.index.attribute(name) if name in self.index.tensors else None
        return None

    def argument(self, position: int, keyword: str, default: Any = None) -> Any:
        """An argument as it stands in the graph; of a module, its constructor's after that."""
        if 0 <= position < len(self.op.args):
            return self.op.args[position]
        for name, argument in (*self.op.kwargs, *self.op.constructor):
            if name == keyword:
                return argument
        return default

    @cached_property
    def first(self) -> Operand:
        """The first tensor read, or the output of an op that reads none."""
        operands = self.inputs or self.outputs
        return operands[0] if operands else Operand("", (), "float32", False)

    @cached_property
    def out(self) -> Operand:
        """The (first) tensor made; the input where a container is made and never taken apart."""
        return self.outputs[0] if self.outputs else self.first

    @cached_property
    def is_view(self) -> bool:
        """True if the op moves no data: its results share storage with something it reads.

        Decided by name where storages are unknown (−1).
        """
        if self.in_place or self.op.opaque:
            return False
        values = [self.index.graph.values[name] for name in self.op.inputs[:1]]
        if self.name == "getitem" and values and not values[0].is_tensor:
            return True
        known = [output.storage for output in self.outputs]
        if known and all(storage >= 0 for storage in known):
            read = {operand.storage for operand in self.inputs if not operand.of_model}
            if all(storage in read for storage in known):
                return True
            # A view of a parameter has a storage of its own in the graph.
            return self.name in VIEWS and not read and any(o.of_model for o in self.inputs)
        return self.name in VIEWS


def costed_ops(graph: OpGraph, b: int) -> list[CostedOp]:
    """The ops of a graph at microbatch size b, in order."""
    index = GraphIndex.of(graph, b)
    return [CostedOp(op, index) for op in graph.ops]


VIEWS = words(
    "view viewas t mt h mh transpose permute squeeze unsqueeze expand expandas broadcastto flatten "
    "unflatten narrow select split chunk unbind tensorsplit vsplit hsplit dsplit detach diagonal "
    "movedim moveaxis swapaxes swapdims real imag unfold asstrided data aliascopy identity "
    "splitwithsizes ravel reshape reshapeas requiresgrad registerhook retaingrad size dim numel "
    "shape ndim dtype device"
)  # fmt: skip


def plain_name(op: Op) -> str:
    """``torch.nn.functional.layer_norm``, ``torch.nn.LayerNorm`` → ``layernorm``."""
    last = op.target.rsplit(".", 1)[-1]
    if last in ("apply", "default", "__call__") and "." in op.target:
        last = op.target.rsplit(".", 2)[-2]
    word = last.replace("_", "").lower()
    if op.kind in ("module", "opaque"):
        return _MODULES.get(word, word)
    return _OPERATORS.get(word, word)


def structural_key(call: CostedOp) -> str:
    """A short digest of what the op is and of the shape, dtype and layout of all it reads.

    Names of values, parameters and modules are not in it: the layers of a deep model share
    their keys.  Opaque modules have keys of their own: what they compute is unknown.
    """
    op, index = call.op, call.index

    def value(name: str) -> str:
        kind = "tensor" if index.graph.values[name].is_tensor else "container"
        return kind + "+".join(_operand(leaf) for leaf in index.leaves(name))

    def leaf(part: Any) -> Any:
        match part:
            case Ref(name):
                return value(name)
            case Attr(fqn):
                return _operand(index.attribute(fqn))
            case Affine():
                return part.at(index.b)
            case TorchLiteral() | None | bool() | int() | float() | complex() | str():
                return part
        return type(part).__name__  # whose repr may be of the user

    held = dict.fromkeys((*op.parameters, *op.buffers_read, *op.buffers_written))
    parts = [
        op.kind,
        op.target,
        op.module_path if op.kind == "opaque" else "",
        str(index.graph.training),
        str(op.grad_enabled),
        str(op.autocast),
        str(call.requires_grad),
        repr(rewritten((op.args, op.kwargs, op.constructor), leaf)),
        ",".join(_operand(index.attribute(fqn)) for fqn in held),
        ",".join(_operand(output) for output in call.outputs),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _operand(operand: Operand) -> str:
    layout = f"~{operand.stride_order}" if operand.stride_order else ""
    return f"{operand.dtype}{operand.shape}{'g' if operand.requires_grad else ''}{layout}"


def laid_out(
    shape: Sequence[int], stride_order: Sequence[int], make: Callable[[list[int]], Tensor]
) -> Tensor:
    """A tensor of a recorded shape and layout; `make` builds a contiguous one of any shape."""
    order = list(stride_order or range(len(shape)))
    made = make([shape[dim] for dim in order])
    return made.permute([order.index(dim) for dim in range(len(order))])
