"""The program of one part: a graph with local sizes, and conversions between layouts as ops.

`write` takes what `lay_out` chose.  Every op reads its operands in the layouts that it wants, and a
value that is had in another one is converted right before; a sum over parts right where it is
made.  A conversion stands in the module, at the source line, of the op that it is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from pdcompile.eager.autocast import DTYPES
from pdcompile.ir.graph import (
    Argument,
    Attr,
    Op,
    OpGraph,
    Ref,
    Size,
    TorchLiteral,
    Value,
    rewritten,
    walk,
)
from pdcompile.ir.records import PARTS
from pdcompile.parts.shard import Shard
from pdcompile.passes.costs.costed_op import plain_name
from pdcompile.passes.costs.flops import is_product
from pdcompile.passes.parts.axes import Way
from pdcompile.passes.parts.calls import Call, Operand, operands
from pdcompile.passes.parts.families import AT_REST
from pdcompile.passes.parts.layout import SPREAD, SUM, WHOLE, Conversion, Layout, conversion
from pdcompile.passes.parts.layouts import Layouts
from pdcompile.passes.parts.local import Kwargs, as_function, local_op
from pdcompile.passes.trace.assemble import with_consumers


@dataclass(frozen=True)
class Program:
    """Program that one part computes.

    Attributes:
        shards: tensors of the model of which each part has a slice, by FQN.
        summed: parameters that are whole on all parts, each with a share of the gradient.
        belongs: each op that was added, and the op of the model that it is for.
        notes: ops that are computed in another way than the model does.
    """

    graph: OpGraph
    parts: int
    shards: Mapping[str, Shard]
    summed: frozenset[str]
    belongs: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"one of {self.parts} parts"]
        lines += [f"  a slice of {shard}" for shard in self.shards.values()]
        lines += [f"  its gradient is summed: {fqn}" for fqn in sorted(self.summed)]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join([*lines, str(self.graph)])


def write(layouts: Layouts) -> Program:
    """The program of one part."""
    return _Writer(layouts).write()


class _Form(NamedTuple):
    """A value or tensor of the model in one layout: what an op is given for it."""

    given: Ref | Attr
    layout: Layout


class _Layouts:
    """The values that were written so far, each in the layouts that it was needed in."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts, self.graph, self.parts = layouts, layouts.graph, layouts.parts
        self.ops: list[Op] = []
        self.values = {entry.name: self.graph.values[entry.name] for entry in self.graph.inputs}
        self.made = {name: _Form(Ref(name), WHOLE) for name in self.values}
        #: (value or FQN, layout, scope that it was converted for) -> in that layout
        self.forms: dict[tuple[str, Layout, str], _Form] = {}
        self.roots: dict[int, str] = {}  # storage -> the op that made it
        self.belongs: dict[str, str] = {}
        self.notes: list[str] = []
        self._current = ""
        self.calls = _calls_of_scopes(self.graph)
        self.wanted = _wanted(layouts)
        self.leaving = layouts.shown
        self.gathered: set[str] = set()  # values that are split, and whole under their own names
        self.storages = count(1 + max((v.storage for v in self.graph.values.values()), default=0))

    def _given(self, operand: Operand, want: Layout, op: Op) -> _Form:
        """A value or tensor in the layout that an op wants, converted for its scope."""
        name, value = operand.name, self._whole(operand)
        if not value.is_tensor:
            return _Form(Ref(name), WHOLE)
        form = self.made[name] if not operand.of_model else _Form(
            Attr(name), self.layouts.tensor(name))  # fmt: skip
        found = conversion(form.layout, want)
        if operand.of_model and want == SPREAD and found and found.name == "gather":
            kwargs = [one for one in found.kwargs if one[0] != "spread"]
            if cast := self._cast(operand, op):
                value = replace(value, dtype=cast)
                kwargs.append(("dtype", TorchLiteral("dtype", cast)))
            found = Conversion("unshard", found.args, tuple(kwargs))
        if found is None or (found.name == "spread" and not value.requires_grad):
            return form
        if name in self.gathered and want == WHOLE:
            return _Form(Ref(name), WHOLE)
        stage = self.layouts.stage_of.get(op.name, 0)
        key = name, want, f"{op.scope}#{self.calls[op.name]}#{op.region}#{stage}"
        if operand.of_model and form.layout.kind == "S" and self.layouts.family == AT_REST:
            key = name, want, op.name  # is had whole for one op at a time
        if key not in self.forms:
            wish = f"{'_' * name[0].isdigit()}{name.replace('.', '_')}_{found.name}"
            new = self._convert(found, form.given, op, self._fresh(wish), value, want)
            self.forms[key] = _Form(Ref(new), want)
        return self.forms[key]

    def _cast(self, operand: Operand, op: Op) -> str:
        """The dtype that autocast casts a weight to for an op, which is then gathered in fewer
        bytes; "" where it casts none: of products it casts all factors."""
        own, made = self.graph.tensors[operand.name].dtype, self.graph.values[op.name].dtype
        casts = own == "float32" and made in DTYPES and is_product(op)
        return made if casts else ""

    def _whole(self, operand: Operand) -> Value:
        """Return the operand as it stands in the model."""
        if not operand.of_model:
            return self.graph.values[operand.name]
        info = self.graph.tensors[operand.name]
        return Value("", info.shape, info.dtype, info.requires_grad, info.requires_grad)

    def _of_sum(self, name: str) -> Layout:
        """The layout that a sum over parts gets at once: none where shares are read, or else the
        one that all want, or whole."""
        wants = self.wanted.get(name, set())
        if SUM in wants:
            return SUM
        (one, *others) = wants or {WHOLE}
        return one if not others and one.kind == "S" and name not in self.leaving else WHOLE

    def _done(self, name: str, layout: Layout) -> None:
        """Notes the layout of a value; makes whole at once what is read whole and never split, or
        by the caller."""
        self.made[name] = _Form(Ref(name), layout)
        wants, found = self.wanted.get(name, set()), conversion(layout, WHOLE)
        split = any(want.kind in "SP" for want in wants)
        if found is None or not (name in self.leaving or (WHOLE in wants and not split)):
            return
        op, share = self.ops.pop(), self._fresh(f"{name}_share")
        self._record(replace(op, name=share, variable=""), self.values.pop(name), None)
        self._convert(found, Ref(share), op, name, self.graph.values[name], WHOLE)
        self.made[name] = _Form(Ref(share), layout) if split else _Form(Ref(name), WHOLE)
        self.gathered.add(name)

    def _convert(
        self, found: Conversion, given: Ref | Attr, op: Op, name: str, like: Value, layout: Layout
    ) -> str:
        """Adds a conversion for an op, of a value like this one; gives its name."""
        target = f"{PARTS}.{found.name}"
        made = self._function(op, name, target, given, *found.args, kwargs=found.kwargs)
        same = found.name == "spread" and isinstance(given, Ref)
        storage = self.values[given.name].storage if same and isinstance(given, Ref) else None
        like = replace(like, stride_order=like.stride_order if same else ())
        self._record(made, like, layout.local(like.shape, self.parts), storage)
        return name

    def _function(self, op: Op, name: str, target: str, *args: Argument, kwargs: Kwargs = ()) -> Op:
        """An op that belongs to another: in the module whose forward calls it, at its line."""
        return Op(
            name, "function", target, args, kwargs, module_path=op.scope,
            module_call=self.calls[op.name], source=op.source, region=op.region,
            variable=op.variable if name == op.name else "", grad_enabled=op.grad_enabled,
            aside=op.aside, enables_grad=op.enables_grad, autocast=op.autocast,
        )  # fmt: skip

    def _record(
        self, op: Op, like: Value, shape: tuple[Size, ...] | None, storage: int | None = None
    ) -> None:
        """Notes an op and its value; without a shape it is that of `like`, storage too."""
        if shape is None:
            shape, storage = like.shape, like.storage
        storage = next(self.storages) if storage is None else storage
        self.ops.append(op)
        self.roots.setdefault(storage, op.name)
        self.values[op.name] = replace(
            like, name=op.name, producer=op.name, shape=shape, storage=storage
        )
        if op.name not in self.graph.values:
            self.belongs[op.name] = self._current

    def _fresh(self, wish: str) -> str:
        names = (wish if i == 0 else f"{wish}_{i}" for i in count())
        return next(n for n in names if n not in self.values and n not in self.graph.values)


class _Writer(_Layouts):
    """Writes the ops of a graph, one after the other."""

    def write(self) -> Program:
        graph, layouts = self.graph, self.layouts
        for op in graph.ops:
            self._op(op, layouts.ops[op.name])
        ops = tuple(_counted(self.ops))
        names = [entry.name for entry in graph.inputs] + [op.name for op in ops]
        values = with_consumers(ops, {name: self.values[name] for name in names})
        tensors = dict(graph.tensors)
        for fqn, shard in layouts.shards.items():
            tensors[fqn] = replace(tensors[fqn], shape=shard.local_shape(tensors[fqn].shape))
        written = replace(graph, ops=ops, values=values, tensors=tensors, origin=None, whole=None,
                          parts=self.parts, summed=layouts.summed)  # fmt: skip
        if layouts.of_samples:
            sizes = replace(graph.sizes, multiple=self.parts)
            size = -(-graph.batch_size // self.parts) * self.parts
            written = replace(written, batch_size=size, sizes=sizes)
        return Program(
            written, self.parts, layouts.shards, layouts.summed, self.belongs, tuple(self.notes)
        )

    def _op(self, op: Op, plan: Way) -> None:
        read, self._current = operands(op), op.name
        drops_out = _drops_out(Call(op, self.graph)) if plan.axis else ""
        forms = [self._given(one, want, op) for one, want in zip(read, plan.operands, strict=True)]
        local = local_op(self.graph, op, plan, self.parts)
        if op.kind == "module" and local.target.startswith(
            PARTS
        ):  # a function of parts, for a module
            op = replace(op, variable=op.variable or op.module_path.rpartition(".")[2])
            local = replace(local, variable=op.variable)
        if drops_out == "dropout":
            self._dropout(local, forms[0].given, plan.result)
            return
        if drops_out:
            local = self._attention(local, plan.result)
        made = _renamed(local, read, forms)
        one = self.graph.values[op.name].is_tensor  # items of a container have a layout each
        if plan.result == SUM and one and (plan.after or self._of_sum(op.name)) != SUM:
            self._sum(op, made, plan, [forms[i].given for i in plan.added])
        else:
            self._add(op, made, plan.result)

    def _sum(self, op: Op, made: Op, plan: Way, added: Sequence[Ref | Attr]) -> None:
        """Adds an op of which each part has a share of a sum, the sum, and what is added to it."""
        value, layout = self.graph.values[op.name], plan.after or self._of_sum(op.name)
        found = conversion(SUM, layout)
        assert found is not None
        share = self._fresh(f"{op.name}_part")
        self._record(replace(made, name=share, variable=""), value, value.shape)
        name = self._fresh(f"{op.name}_{found.name}") if added else op.name
        self._convert(found, Ref(share), op, name, value, layout)
        for i, one in enumerate(added, 1):
            if plain_name(op).startswith("conv"):  # one number a channel
                one = self._by_channel(op, one, value)
            new = op.name if i == len(added) else self._fresh(f"{op.name}_added")
            plus = self._function(op, new, "operator.add", Ref(name), one)
            self._record(plus, value, layout.local(value.shape, self.parts))
            name = new
        self._done(op.name, layout)

    def _by_channel(self, op: Op, bias: Ref | Attr, value: Value) -> Ref:
        ones = (1,) * (len(value.shape) - 2)
        name, shape = self._fresh(f"{op.name}_bias"), (value.shape[1], *ones)
        view = self._function(op, name, "view", bias, -1, *ones)
        self._record(replace(view, kind="method"), value, shape)
        return Ref(name)

    def _attention(self, op: Op, layout: Layout) -> Op:
        """Attention that drops out, with its share of what is drawn for the whole."""
        self.notes.append(f"{op.name} ({op.source}) drops out: attention is written out")
        inner = layout.dim < len(self.graph.values[op.name].shape) - 1
        own = conversion(WHOLE, layout) if inner else None
        split = () if own is None else (("split", layout.dim), *own.kwargs)
        target = f"{PARTS}.scaled_dot_product_attention"
        return replace(op, target=target, kwargs=(*op.kwargs, *split))

    def _dropout(self, op: Op, given: Ref | Attr, layout: Layout) -> None:
        """Drops out of a split value its share of what is dropped of ones, drawn for the whole."""
        value, named = self.graph.values[op.name], (f"{op.name}_ones", f"{op.name}_mask")
        like = replace(value, requires_grad=False, needs_gradient=False)
        order = value.stride_order or tuple(range(len(value.shape)))
        laid, back = tuple(value.shape[dim] for dim in order), map(order.index, range(len(order)))
        ones, mask = map(self._fresh, named)
        kind = [("dtype", TorchLiteral("dtype", value.dtype)),
                ("device", TorchLiteral("device", "self"))]  # fmt: skip
        made = self._function(op, ones, "torch.ones", laid, kwargs=tuple(kind))
        self._record(made, replace(like, stride_order=()), laid)
        if value.stride_order:  # numbers are drawn in the order in which they lie
            own, ones = Ref(ones), self._fresh(f"{op.name}_laid")
            made = replace(self._function(op, ones, "permute", own, *back), kind="method")
            self._record(made, like, value.shape, self.values[own.name].storage)
        args = rewritten(op.args, lambda one: Ref(ones) if isinstance(one, Ref) else one)
        self._record(replace(op, name=mask, args=args, variable=""), like, value.shape)
        found = conversion(WHOLE, layout)
        assert found is not None
        share = self._convert(found, Ref(mask), op, self._fresh(f"{op.name}_own"), like, layout)
        made = self._function(op, op.name, "operator.mul", given, Ref(share))
        self._record(made, value, layout.local(value.shape, self.parts))
        self._done(op.name, layout)

    def _add(self, op: Op, made: Op, layout: Layout) -> None:
        """Adds an op of the model, whose result has this layout."""
        value = self.graph.values[op.name]
        storage = value.storage
        for old, new in zip(walk(op.args, Ref), walk(made.args, Ref), strict=False):
            if self.graph.values[old.name].storage == storage >= 0 and not op.mutates:
                storage = self.values[new.name].storage  # a view of what is read now
        shape = layout.local(value.shape, self.parts) if value.is_tensor else value.shape
        if made.target == "view" and self._lies_otherwise(made, storage):
            made = replace(made, target="reshape")
        self._record(made, value, shape, storage)
        self._done(op.name, layout)

    def _lies_otherwise(self, op: Op, storage: int) -> bool:
        """True if what an op reads may lie in memory otherwise than in the model: conversions give
        contiguous values, and ops go by how their operands lie."""
        root = self.roots.get(storage, "")
        if root in op.inputs or root not in self.values:
            return False
        converted = root in self.belongs or root not in self.graph.values
        return converted or self.values[root].stride_order != ()


def _renamed(op: Op, read: Sequence[Operand], forms: Sequence[_Form]) -> Op:
    """The op of one part with its operands as they are given; a few may be left out of it."""
    own = [one for one in zip(read, forms, strict=True) if one[0].of_model]
    converted = {one.name for one, form in own if isinstance(form.given, Ref)}
    if op.kind == "module" and converted:
        op = as_function(op)
    waiting = iter(zip(read, forms, strict=True))

    def change(part: Any) -> Any:
        if not isinstance(part, Ref | Attr):
            return part
        name = part.name if isinstance(part, Ref) else part.fqn
        return next(form.given for one, form in waiting if one.name == name)

    args = rewritten(op.args, change)
    left = tuple(fqn for fqn in op.parameters if fqn not in converted)
    return replace(op, args=args, kwargs=rewritten(op.kwargs, change), parameters=left)


def _drops_out(call: Call) -> str:
    """The name of an op that drops out some of its values; "" where it does not.

    In evaluation too, where its module says how much: so one body serves both modes.
    """
    share = (1, "p", 0.5) if call.name == "dropout" else (4, "dropout_p", 0.0)
    return call.name if call.op.draw is not None and call.argument(*share) != 0 else ""


def _calls_of_scopes(graph: OpGraph) -> dict[str, int]:
    """Number of the call, for each op, of the module in whose forward it is."""
    found: dict[str, int] = {}
    nearest: dict[str, int] = {}
    for op in reversed(graph.ops):
        scope = op.scope
        if scope == op.module_path:
            nearest[scope] = op.module_call
        found[op.name] = nearest.get(scope, 0)
    return found


def _wanted(layouts: Layouts) -> dict[str, set[Layout]]:
    """The layouts in which each value is read."""
    found: dict[str, set[Layout]] = {}
    for op in layouts.graph.ops:
        for one, want in zip(operands(op), layouts.ops[op.name].operands, strict=True):
            if not one.of_model:
                found.setdefault(one.name, set()).add(want)
    return found


def _counted(ops: Sequence[Op]) -> Iterator[Op]:
    """The ops with the number of earlier calls of the same target in the same module."""
    seen: Counter[tuple[str, str]] = Counter()
    for op in ops:
        key = op.module_path, op.target
        yield replace(op, call_index=seen[key])
        seen[key] += 1
