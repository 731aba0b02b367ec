"""The body of one forward: a line an op or call, in the words of the model's author."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from pdcompile.ir.graph import CHECK, Affine, Op, OpGraph, Ref, walk, written_buffers
from pdcompile.passes.codegen.block_calls import BlockCall, Pair, relative
from pdcompile.passes.codegen.block_classes import name_below
from pdcompile.passes.codegen.header import FileContext, gathered
from pdcompile.passes.codegen.pieces import (
    Loop,
    Piece,
    Region,
    Unpack,
    Variables,
    item_of,
    makes,
    pieces_of,
    reads,
    region_of,
    rereads,
    with_line,
)
from pdcompile.passes.codegen.source_text import Line, clean, value_text
from pdcompile.passes.form.expressions import (
    IN_PLACE,
    Scope,
    atom,
    expression,
    literal,
    quote,
    rough,
    subscript,
)
from pdcompile.passes.form.lifetimes import Statement, draws, nameless, operands, spans
from pdcompile.passes.form.module_tree import module_expression, tensor_expression
from pdcompile.passes.stages.naming import below, identifier, is_container


@dataclass(slots=True)
class Body:
    """Writes one body: of one mode, or of both where every pair has a twin.

    `arguments` are the names of the parameters: the call's inputs, then its tensors.
    `results` are the names of what is returned, taken where nothing alive has them.
    """

    context: FileContext
    call: BlockCall
    pairs: Sequence[Pair]
    graph: OpGraph
    wishes: Mapping[str, tuple[str, bool]]
    arguments: Sequence[str]
    results: Mapping[str, str] = field(default_factory=dict)
    variables: Variables = field(default_factory=Variables)
    shapes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # for comments
    size_name: str = "b"
    nameless: set[str] = field(default_factory=set)  # values that go into the next expression
    inlined: dict[str, str] = field(default_factory=dict)  # their expressions

    def lines(self) -> list[Line]:
        """The statements, without the return."""
        pieces = pieces_of(self.pairs, self.context.layout, self.graph, self.call.outputs)
        statements = [self._statement(piece) for piece in pieces]
        self.nameless = nameless(statements, self.wishes, self.call.outputs)
        self._name(pieces)
        used = any(
            walk((item.args, item.kwargs), Affine)
            for each in self.pairs
            for item in (each.item, each.twin) if isinstance(item, Op)
        )  # fmt: skip
        done = [size_line(self.size_name, self.call, self.arguments, self.graph)] if used else []
        # A caller opens the region that all ops of a block share; a stage opens its own.
        ambient = region_of(self.call) if self.call.path else Region()
        current, section = ambient, ""
        for piece in pieces:
            region = ambient if ambient != Region() else region_of(item_of(piece))
            heading = _section(self.context, self.call.path, item_of(piece))
            if heading != section:
                done += _heading(self.context, self.call.path, heading) if done or heading else []
                current = ambient
            section = heading
            if region != current and region != ambient:
                done.append(with_line(region))
            current = region
            inner = self._piece(piece)
            done += [line.deeper() for line in inner] if region != ambient else inner
        return done

    def returned(self) -> list[str]:
        """The variables of the results, in order."""
        return [self.variables.names[name] for name in self.call.outputs]

    def types(self, values: Sequence[str]) -> str:
        """Dtypes and shapes for a comment, equal ones in a row counted."""
        found = [(text, len(list(run))) for text, run in groupby(map(self._shape_of, values))]
        return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in found)

    # Names

    def _name(self, pieces: Sequence[Piece]) -> None:
        used = [(reads(piece), makes(piece), rereads(piece)) for piece in pieces]
        alive = _with_written(pieces, spans(used, self.call.inputs, self.call.outputs))
        taken = {*self.arguments, *self.results.values()}
        wished = {identifier(self.wishes[name][0]) for p in pieces for name in makes(p)}
        options = ("b", "batch_size", "batch", "num_samples")
        others = {*taken, *wished, *self.context.class_names}
        self.size_name = next(name for name in options if name not in others)
        extra = self.arguments[len(self.call.inputs) :]
        self.variables = Variables(avoid={self.size_name, *self.context.class_names, *extra})
        for value, name in zip(self.call.inputs, self.arguments, strict=False):
            self.variables.fix(value, name, alive[value])
        for value, name in self.results.items():
            if value not in self.variables.names and self.variables.free(name, True, alive[value]):
                self.variables.fix(value, name, alive[value])
        for piece in pieces:
            for value in makes(piece):
                if value in self.variables.names or value in self.nameless:
                    continue
                same = _in_place_on(piece)
                if same is not None and same in self.variables.names:
                    self.variables.fix(value, self.variables.names[same], alive[value])
                else:
                    self.variables.give(value, *self.wishes[value], alive[value])

    def _statement(self, piece: Piece) -> Statement:
        item = item_of(piece)
        place = _section(self.context, self.call.path, item), region_of(item)
        if isinstance(piece, Loop):
            return Statement(reads(piece), None, place, None)
        twin = None if isinstance(item, BlockCall) else piece.twin
        text = partial(self._rough, item, twin if isinstance(twin, Op) else None)
        if isinstance(item, BlockCall):
            return Statement(item.inputs, None, place, text)
        return Statement(operands(item), item, place, text, not isinstance(piece, Unpack))

    def _rough(self, item: Op | BlockCall, twin: Op | None, inner: Mapping[str, str]) -> str:
        """The expression of an item before its variables have their final names."""

        def value(name: str) -> str:
            return inner.get(name) or identifier(self.wishes[name][0])

        if isinstance(item, BlockCall):
            return f"{self._module(item.path)}({', '.join(map(value, item.inputs))})"
        scope = replace(self._scope(), value=value, device=lambda: "value.device")
        return rough(item, twin, scope)

    # Pieces

    def _piece(self, piece: Piece) -> list[Line]:
        if isinstance(piece, Loop):
            return self._loop(piece)
        if isinstance(piece, Unpack):
            return self._op(piece.op, piece.twin, piece.items)
        if isinstance(piece.item, BlockCall):
            return [self._call(piece.item)]
        return self._op(piece.item, piece.twin if isinstance(piece.twin, Op) else None)

    def _op(self, op: Op, twin: Op | None, items: Sequence[str] = ()) -> list[Line]:
        done = []
        if draws(op) or (twin is not None and draws(twin)):
            done.append(Line(f"draw({self._where(op)}, {op.draw})"))
        scope = self._scope(cloned=cloned_buffers(op, self.graph))
        name = self.variables.names.get(op.name, "")
        comment = self._shape_of(op.name)
        target = op.target.removeprefix("operator.") if op.target.startswith("operator.") else ""
        if target == "setitem" and len(op.args) == 3:
            other = (twin or op).args
            receiver = atom(literal(op.args[0], scope), dotted=True)
            index = subscript(op.args[1], other[1], scope)
            done.append(Line(f"{receiver}[{index}] = {literal(op.args[2], scope)}"))
            return done
        if target in IN_PLACE and len(op.args) == 2 and literal(op.args[0], scope) == name:
            value = literal(op.args[1], scope)
            done.append(Line(f"{name} {IN_PLACE[target]} {value}", comment))
            return done
        text = expression(op, twin, scope)
        if op.name in self.nameless:
            self.inlined[op.name] = text
            return done
        if op.target == CHECK:
            done.append(Line(text))
            return done
        if items:
            names = ", ".join(self.variables.names[item] for item in items)
            comment = self._shape_of(items[0])
            done.append(Line(f"{names} = {text}", f"{comment} each" if comment else ""))
        else:
            done.append(Line(f"{name} = {text}", comment))
        return done

    def _call(self, call: BlockCall) -> Line:
        arguments = [self._value(name) for name in call.inputs]
        arguments += [self._tensor(fqn) for fqn in call.tensors]
        text = f"{self._module(call.path)}({', '.join(arguments)})"
        if not call.outputs:
            return Line(text)
        names = ", ".join(self.variables.names[name] for name in call.outputs)
        comment = self.types(call.outputs)
        return Line(f"{names} = {text}", comment)

    def _loop(self, loop: Loop) -> list[Line]:
        first, last = loop.calls[0], loop.calls[-1]
        result = self.variables.names[last.outputs[0]]
        start = self.variables.names[first.inputs[loop.thread]]
        done = [] if result == start else [Line(f"{result} = {start}")]
        container = self.context.layout.root.find(loop.container)
        assert container is not None
        over = self._module(loop.container)
        over = over if container.is_list else f"{over}.values()"
        wish = identifier(self.context.class_names[loop.block].lower())
        taken = {*self.variables.spans, *self.context.class_names}
        item = next(n for n in (wish, f"{wish}_module", f"{wish}_item") if n not in taken)
        arguments = [
            result if i == loop.thread else self.variables.names[name]
            for i, name in enumerate(first.inputs)
        ]
        arguments += [self._tensor(fqn) for fqn in first.tensors]
        comment = self._shape_of(last.outputs[0])
        paths = gathered([call.path for call in loop.calls])
        done.append(Line(f"for {item} in {over}:", ", ".join(paths)))
        done.append(Line(f"{result} = {item}({', '.join(arguments)})", comment, 1))
        return done

    # Parts of expressions

    def _shape_of(self, name: str) -> str:
        return value_text(self.graph.values.get(name), self.shapes.get(name))

    def _scope(self, cloned: frozenset[str] = frozenset()) -> Scope:
        return Scope(
            value=self._value,
            tensor=lambda fqn: self._tensor(fqn) + (".clone()" if fqn in cloned else ""),
            size=self._size,
            device=self._device,
            module=self._module,
            function=self.context.imports.function,
        )

    def _value(self, name: str) -> str:
        return self.inlined.get(name) or self.variables.names[name]

    def _module(self, path: str) -> str:
        return module_expression(self.context.layout.root, self.call.path, path)

    def _named_tensor(self, name: str) -> str:
        return tensor_expression(self.context.layout.root, self.call.path, name)

    def _tensor(self, fqn: str) -> str:
        if fqn in self.call.tensors:
            return self.arguments[len(self.call.inputs) + self.call.tensors.index(fqn)]
        name = name_below(fqn, self.call.path, self.context.names)
        return self._named_tensor(name)

    def _size(self, size: Affine) -> str:
        text = self.size_name if size.scale == 1 else f"{size.scale} * {self.size_name}"
        text += f" // {size.over}" * (size.over > 1)
        if size.offset:
            return f"{text} {'+' if size.offset > 0 else '-'} {abs(size.offset)}"
        return text

    def _device(self) -> str:
        if self.arguments:
            return f"{self.arguments[0]}.device"
        for name in self.context.names:
            return f"{self._named_tensor(name)}.device"
        return "torch.get_default_device()"

    def _where(self, op: Op) -> str:
        path = op.module_path
        if op.region == "forward" and path == self.call.path:
            return "self"
        if not self.call.path or op.region == "loss":  # in a class for one module only
            return quote(path)
        return self._module(path)


def size_line(name: str, call: BlockCall, arguments: Sequence[str], graph: OpGraph) -> Line:
    """Reads the microbatch size off an argument."""
    for value, argument in zip(call.inputs, arguments, strict=False):
        for dim, size in enumerate(graph.values[value].shape):
            if isinstance(size, Affine):
                text = f"{argument}.shape[{dim}]"
                if size.offset:
                    text = f"{text} {'-' if size.offset > 0 else '+'} {abs(size.offset)}"
                if size.over != 1:
                    text = f"{atom(text)} * {size.over}"
                if size.scale != 1:
                    text = f"{atom(text)} // {size.scale}"
                return Line(f"{name} = {text}")
    return Line(f"{name} = {graph.batch_size}", "no argument tells the batch size")


def _section(context: FileContext, base: str, item: Op | BlockCall) -> str:
    """The module whose forward an item stands in, if that is not the body of `base`."""
    if isinstance(item, Op) and item.region == "loss":
        return ""
    scope = item.scope if isinstance(item, Op) else item.path.rpartition(".")[0]
    while scope and below(scope, base) and scope != base:
        node = context.layout.root.find(scope)
        name = context.layout.classes.get(scope, ("", ""))[0]
        if not is_container(name) and (node is None or node.leaf is None):
            return scope
        scope = scope.rpartition(".")[0]
    return ""


def _heading(context: FileContext, base: str, scope: str) -> list[Line]:
    if not scope:
        return [Line()]
    name, source = context.layout.classes.get(scope, ("", ""))
    about = [clean(name.rpartition(".")[2], 40)] if name else []
    if source:
        about.append(context.locations.short(source))
    if scope in context.layout.partial:
        about.append("a part of it")
    path = clean(relative(scope, base), 88)
    text = f"{path} ({', '.join(about)})" if about else path
    return [Line("", text if len(text) <= 82 else path)]


def _in_place_on(piece: Piece) -> str | None:
    """The value that ``x += y`` writes into: its result is the same object."""
    item = piece.item if isinstance(piece, Pair) else None
    if isinstance(item, Op) and item.target.removeprefix("operator.") in IN_PLACE and item.args:
        first = item.args[0]
        return first.name if isinstance(first, Ref) else None
    return None


def _with_written(
    pieces: Sequence[Piece], alive: dict[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Spans in which what ``x += y`` writes into lives as long as the result, which is x."""
    for piece in reversed(pieces):
        same = _in_place_on(piece)
        if same is not None and same in alive:
            ends = [alive[value][1] for value in makes(piece)]
            alive[same] = alive[same][0], max(alive[same][1], *ends)
    return alive


def cloned_buffers(op: Op, graph: OpGraph) -> frozenset[str]:
    """Buffers that an op has to read as a copy, by FQN.

    Autograd may keep what the op reads until the microbatch's backward, and in a pipeline the
    next microbatches' forwards, which write the buffer, come first.  Eager runs the backward
    before them.  Where the op writes itself, or makes a view that is written later, the buffer is
    what is meant, and one that copies it keeps nothing.
    """
    writes = op.mutates or op.buffers_written
    if not graph.training or not op.grad_enabled or writes or op.target == "clone":
        return frozenset()
    held = [fqn for fqn in op.attributes if graph.tensors[fqn].kind == "buffer"]  # often none
    read = written_buffers(graph.ops).intersection(held) if held else frozenset()
    return read if read and not _is_written_later(op, graph) else frozenset()


def _is_written_later(op: Op, graph: OpGraph) -> bool:
    """True if something writes into the op's result or a view of it."""
    written = {name for other in graph.ops for name in other.mutates}
    views = [op.name]
    for name in views:
        if name in written:
            return True
        value = graph.values[name]
        same = (n for n in value.consumers if graph.values[n].storage == value.storage)
        views.extend(name for name in same if name not in views)
    return False
