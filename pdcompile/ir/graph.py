"""OpGraph: the model's computation as data.

Free of torch: shapes are tuples, dtypes and targets strings (`pdcompile.ir.targets` maps them
to torch and back), so that a graph can be printed, saved, diffed and planned anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pdcompile import jsonio
from pdcompile.ir import graph_json
from pdcompile.ir.graph_json import fingerprint as fingerprint
from pdcompile.ir.graph_text import format_graph
from pdcompile.ir.records import CHECK as CHECK
from pdcompile.ir.records import DTYPE_BYTES as DTYPE_BYTES
from pdcompile.ir.records import GRADIENT as GRADIENT
from pdcompile.ir.records import Affine as Affine
from pdcompile.ir.records import Argument as Argument
from pdcompile.ir.records import Attr as Attr
from pdcompile.ir.records import DictOf as DictOf
from pdcompile.ir.records import GraphInput as GraphInput
from pdcompile.ir.records import LeftOut as LeftOut
from pdcompile.ir.records import ListOf as ListOf
from pdcompile.ir.records import Op as Op
from pdcompile.ir.records import OpCost as OpCost
from pdcompile.ir.records import Ref as Ref
from pdcompile.ir.records import Size as Size
from pdcompile.ir.records import SizeRange as SizeRange
from pdcompile.ir.records import Slice as Slice
from pdcompile.ir.records import TensorInfo as TensorInfo
from pdcompile.ir.records import TorchLiteral as TorchLiteral
from pdcompile.ir.records import Value as Value
from pdcompile.ir.records import leaves as leaves
from pdcompile.ir.records import named_leaves as named_leaves
from pdcompile.ir.records import rewritten as rewritten
from pdcompile.ir.records import size_at as size_at
from pdcompile.ir.records import walk as walk
from pdcompile.ir.records import written_buffers as written_buffers
from pdcompile.parts.shard import Division


@dataclass(frozen=True)
class OpGraph:
    """One capture of a model in one mode (training or not), ops in topological order.

    `output` is the model's output with Refs for tensors; from `output_spec`
    `pdcompile.batch.unflatten_output` rebuilds the model's own container (never saved, never
    compared). `loss` is the value to differentiate; None for a graph without loss.
    `constants` are non-tensor leaves of the call, path to repr: a later call must pass equal.
    `classes` maps module paths to (qualified class name, "file.py:12"), `passed` to the values that
    a module is given at its first call, each with the parameter of its forward that takes it.
    `tensor_values` holds the tensors of kind "constant" (torch objects; not saved).
    `sizes` are the microbatch sizes that it may run at (known after a capture; not saved).
    `whole` is the graph that this one is a part of, with more outputs; None where it is all.
    `parts`: of that many parts of a stage this is the program of one.  `summed`: parameters that
    each of them has whole, with a share of the gradient, which are summed once an update.
    `origin` remembers the captured model and the other mode's graph (`captured_module.Origin`).
    """

    training: bool
    ops: tuple[Op, ...]
    values: dict[str, Value]
    inputs: tuple[GraphInput, ...]
    tensors: dict[str, TensorInfo]
    output: Argument
    loss: str | None
    batch_size: int  # microbatch size of the capture that concrete numbers belong to
    constants: tuple[tuple[str, str], ...] = ()
    classes: dict[str, tuple[str, str]] = field(default_factory=dict)
    passed: dict[str, dict[str, str]] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = ()  # intended differences that verify lists (batch norm, …)
    output_spec: Any = field(default=None, compare=False, repr=False)
    tensor_values: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    sizes: SizeRange = field(default=SizeRange(), compare=False, repr=False)
    origin: Any = field(default=None, compare=False, repr=False)
    whole: OpGraph | None = field(default=None, compare=False, repr=False)
    parts: int = field(default=1, compare=False, repr=False)
    summed: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def model(self) -> str:
        """The name of the model's class, "" where that is not known."""
        return self.classes.get("", ("", ""))[0].rpartition(".")[2]

    def __str__(self) -> str:
        return format_graph(self)

    def to_json(self) -> str:
        """Readable JSON without output_spec, tensor_values, sizes, origin, whole, parts, summed."""
        return jsonio.dumps(graph_json.to_record(self))

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "graph.json") -> OpGraph:
        """The graph that `to_json` wrote; raises PlanError for anything else."""
        data = jsonio.loads(text, where=where, remedy=graph_json.REMEDY)
        return graph_json.from_record(cls, data, where)

    @cached_property
    def checks(self) -> tuple[Op, ...]:
        """The ops that check values which the model's Python read (`ir.value_checks`)."""
        return tuple(op for op in self.ops if op.target == CHECK)

    def storage_of(self, name: str) -> int:
        """Equal for values that share memory, -1 where there is none."""
        return self.values[name].storage

    def written_inputs(self) -> dict[str, Op]:
        """Path of each input that forward writes, or a view of it, to the first op that does."""
        paths = {self.values[entry.name].storage: entry.path for entry in self.inputs}
        found: dict[str, Op] = {}
        for op in self.ops:
            for name in op.mutates:
                if path := paths.get(self.values[name].storage):
                    found.setdefault(path, op)
        return found

    def to_module(self, model: Any = None) -> Any:
        """See `ir.captured_module`; `model` may be left out while the captured one is alive."""
        from pdcompile.ir.captured_module import to_module

        return to_module(self, model)


@dataclass(frozen=True, slots=True)
class Capture:
    """The captures of both modes of a model, over the same parameters.

    `kept`: the file that it was read from, and of when that is; "" for a capture of the model that
    is here.  `division`: where it is the program of one part, what that has of the model.
    """

    train: OpGraph
    eval: OpGraph
    attributes: tuple[tuple[str, ...], ...] = ()  # that forward read: (module, name, name in it)
    numbers: tuple[str, ...] = ()  # tensors whose values forward made Python numbers of
    kept: str = field(default="", compare=False)
    division: Division = field(default_factory=Division)
