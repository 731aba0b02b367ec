"""One stage as a Python file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdcompile.ir.graph import Capture, Op, OpGraph
from pdcompile.ir.stage_interface import Port, StageInterface
from pdcompile.passes.codegen.blocks import divide
from pdcompile.passes.codegen.body import Body, Place
from pdcompile.passes.codegen.classes import Constructors, ties
from pdcompile.passes.codegen.header import (
    Route,
    class_lines,
    docstring,
    gathered,
)
from pdcompile.passes.codegen.imports import Imports
from pdcompile.passes.codegen.layout import Block, Layout
from pdcompile.passes.codegen.pairs import Pair, pair
from pdcompile.passes.codegen.returns import fits, twins, wider
from pdcompile.passes.codegen.safety import check
from pdcompile.passes.codegen.skeleton import prune, skeleton
from pdcompile.passes.codegen.text import WIDTH, Line, Locations, render, value_text
from pdcompile.passes.codegen.tree import Call
from pdcompile.passes.stages.held_tensors import all_tensors
from pdcompile.passes.stages.naming import identifier, unique

DRAW = '''\
def draw(where, index):
    """Called before every random op; pdcompile seeds the generator here, by itself nothing."""
'''


KEPT_WHOLE = '''\
class KeptWhole(nn.Module):
    """Stands for a module of the model that runs as it is; pdcompile puts the model's own here.

    By hand: ``stage.path.to.it = model.path.to.it``, where `model` is the original.
    """

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, *args, **kwargs):
        raise NotImplementedError(f"put the model's own {self.name} in this place")
'''


KEPT_SHORT = 'class KeptWhole(nn.Module):\n    """See above."""\n'


@dataclass(frozen=True, slots=True)
class Wishes:
    """Names that readers expect, in both modes (`pdcompile.passes.stages.naming.wishes`)."""

    train: Mapping[str, tuple[str, bool]]
    eval: Mapping[str, tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class StageOps:
    """The ops of one stage in both modes, those of the loss apart."""

    train: list[Op]
    eval: list[Op]
    train_loss: list[Op]
    eval_loss: list[Op]


def stage_file(
    capture: Capture,
    interface: StageInterface,
    route: Route,
    ops: StageOps,
    names: Mapping[str, str],
    wishes: Wishes,
) -> str:
    """The text of ``stage_k.py``.

    Args:
        route: where values come from and go to.
        names: every tensor name on the stage, mapped to its canonical FQN.

    Raises SourceError for what cannot be written as source.
    """
    classes = {**capture.eval.classes, **capture.train.classes}
    every = [*ops.train, *ops.eval, *ops.train_loss, *ops.eval_loss]
    tensors = all_tensors(capture)
    wanted = tuple({p.value for p in s.outputs} for s in (interface.train, interface.eval))

    def divided(training: Collection[str]) -> Layout:
        root = skeleton(names, tensors, every, classes)
        layout = divide(capture, ops.train, ops.eval, (training, wanted[1]), names, root)
        prune(root)
        return layout

    twin = twins(ops.train, ops.eval, interface)
    layout = divided({twin[name] for name in wanted[1]} if twin else wanted[0])
    if twin and not fits(layout.train, layout.eval, interface, twin):
        twin, layout = None, divided(wanted[0])
    writer = _Writer(capture, interface, route, names, wishes, layout, classes, Imports(), [], twin)
    return writer.write(ops)


@dataclass(slots=True)
class _Writer:
    capture: Capture
    interface: StageInterface
    route: Route
    names: Mapping[str, str]
    wishes: Wishes
    layout: Layout
    classes: Mapping[str, tuple[str, str]]
    imports: Imports
    class_names: list[str]
    twin: dict[str, str] | None  # where evaluation returns more (`twins`)
    locations: Locations = field(default_factory=Locations)
    shapes: Sequence[Mapping[str, tuple[Any, ...]]] = ({}, {})  # in comments of the body written

    def write(self, ops: StageOps) -> str:
        self._name_classes()
        place = Place(
            self.layout, self.names, self.class_names, self.imports, self.classes, self.locations
        )
        parts = [self._block(block, place) for block in self.layout.blocks]
        parts.append(self._stage(place, ops))
        body = "\n\n".join(render(part) for part in parts)
        draws = f"{DRAW}\n\n" if "draw(" in body else ""
        kept = f"{KEPT_WHOLE}\n\n" if self.imports.kept else ""
        header = docstring(
            self.capture, self.interface, self.route, self.layout, self.imports, self.locations
        )
        imports = "\n".join(self.imports.lines(torch_used="torch." in body))
        text = f"{header}\n{imports}\n\n\n{draws}{kept}{body}"
        every = (*ops.train, *ops.eval, *ops.train_loss, *ops.eval_loss)
        targets = {op.target for op in every if op.kind == "function"}
        # What is fixed text needs no second look, and may do what generated text may not.
        check(
            text.replace(KEPT_WHOLE, KEPT_SHORT),
            self.imports,
            targets,
            f"stage_{self.interface.index}.py",
        )
        return text

    def _name_classes(self) -> None:
        taken = {f"Stage{self.interface.index}", "torch", "nn", "F", "KeptWhole", "i", "_"}
        for mode in (self.interface.train, self.interface.eval):
            taken.update(port.name for port in (*mode.inputs, *mode.outputs, *mode.loss_inputs))
        for block in self.layout.blocks:
            full = self.classes.get(block.path, ("", ""))[0]
            wish = identifier(full.rpartition(".")[2], "Block") if full else "Block"
            name, count = wish, 1
            while name in taken or unique(name, ()) != name:
                count += 1
                name = f"{wish}{count}"
            taken.add(name)
            self.class_names.append(name)

    # Classes

    def _block(self, block: Block, place: Place) -> list[Line]:
        source = self.classes.get(block.path, ("", ""))[1]
        name = self.class_names[block.index]
        node = replace(block.node, block=None)
        members = [p for p, index in self.layout.block_of.items() if index == block.index]
        comment = self.locations.short(source) if source else ""
        lines = class_lines(name, comment, gathered(members))
        arguments = self._arguments(block)
        self.shapes = block.shapes
        forward = self._forward(block.train, block.eval, place, arguments)
        text = "\n".join(line.code for line in forward)
        kept = [name for name in block.arguments if re.search(rf"\bself\.{name}\b", text)]
        owned = ", ".join(f"self.{name}" for name in kept)
        stored = [Line(f"{owned} = {', '.join(kept)}")] if kept else []
        lines += self._init(stored + self._constructors().lines(node), block.arguments)
        signature = ", ".join(["self", *arguments])
        lines.append(Line(f"def forward({signature}):", self._types(block), 1))
        self.shapes = ({}, {})
        return lines + forward

    def _stage(self, place: Place, ops: StageOps) -> list[Line]:
        train, evaluation = self.interface.train, self.interface.eval
        name = f"Stage{self.interface.index}"
        constructor = self._constructors().lines(self.layout.root)
        # The docstring of the file says what it holds.
        lines = [Line(f"class {name}(nn.Module):")]
        lines += self._init(constructor + ties(self.layout.root, self.names))
        names = [port.name for port in train.inputs]
        same = len(train.inputs) == len(evaluation.inputs)
        given = ", ".join(["self", *(names if same else ["*inputs"])])
        lines.append(Line(f"def forward({given}):", depth=1))
        returned = wider(evaluation.outputs, self.twin) if self.twin else train.outputs
        calls = (
            _root_call(self.layout.train, train.inputs, returned),
            _root_call(self.layout.eval, evaluation.inputs, evaluation.outputs),
        )
        pairs = pair(*calls)
        if pairs is not None:
            fewer = [port.value for port in train.outputs] if self.twin else None
            lines += self._one(calls, pairs, place, names, returned, fewer)
        else:
            for mode, call, signature in zip(
                ("train", "eval"), calls, (train, evaluation), strict=True
            ):
                depth = 2
                if mode == "train":
                    lines.append(Line("if self.training:", depth=2))
                    depth = 3
                own = names if same else [port.name for port in signature.inputs]
                if not same and own:
                    comma = "," if len(own) == 1 else ""
                    lines.append(Line(f"{', '.join(own)}{comma} = inputs", depth=depth))
                lines += self._alone(mode, call, place, own, signature.outputs, depth)
        if train.loss_inputs or ops.train_loss:
            lines += self._loss(place, ops)
        return lines

    def _loss(self, place: Place, ops: StageOps) -> list[Line]:
        train, evaluation = self.interface.train, self.interface.eval
        assert train.loss is not None
        names = [port.name for port in train.loss_inputs]
        calls = [
            Call("", tuple(part), tuple(p.value for p in s.loss_inputs), (), (s.loss or "",))
            for part, s in ((ops.train_loss, train), (ops.eval_loss, evaluation))
        ]
        lines = [Line(), Line(f"def loss({', '.join(['self', *names])}):", depth=1)]
        pairs = pair(calls[0], calls[1])
        if pairs is not None:
            body = self._body("train", calls[0], pairs, place, names, (), calls[1])
            return lines + _finished(body, 2)
        for mode, call, depth in (("train", calls[0], 3), ("eval", calls[1], 2)):
            if mode == "train":
                lines.append(Line("if self.training:", depth=2))
            body = self._body(mode, call, [Pair(item) for item in call.items], place, names, ())
            lines += _finished(body, depth)
        return lines

    def _init(self, statements: list[Line], arguments: Sequence[str] = ()) -> list[Line]:
        if not statements and not arguments:
            return []
        return [
            Line(f"def __init__({', '.join(['self', *arguments])}):", depth=1),
            Line("super().__init__()", depth=2),
            *(line.deeper(2) for line in statements),
            Line(),
        ]

    def _constructors(self) -> Constructors:
        return Constructors(self.class_names, self.imports)

    # Bodies

    def _arguments(self, block: Block) -> list[str]:
        call = block.train or block.eval
        assert call is not None
        wishes = self.wishes.train if block.train is not None else self.wishes.eval
        names: list[str] = []
        for value in call.inputs:
            names.append(unique(wishes[value][0], [*names, *self.class_names]))
        for fqn in call.tensors:
            wish = identifier(fqn.rpartition(".")[2])
            names.append(unique(wish, [*names, *self.class_names]))
        return names

    def _types(self, block: Block) -> str:
        call, graph = (
            (block.train, self.capture.train)
            if block.train is not None
            else (block.eval, self.capture.eval)
        )
        assert call is not None
        shapes = self.shapes[block.train is None]
        return ", ".join(
            value_text(graph.values.get(name), shapes.get(name)) for name in call.inputs
        )

    def _forward(
        self, train: Call | None, evaluation: Call | None, place: Place, arguments: Sequence[str]
    ) -> list[Line]:
        if train is None or evaluation is None:
            call = train or evaluation
            assert call is not None
            return self._alone("train" if train is not None else "eval", call, place, arguments)
        pairs = pair(train, evaluation)
        if pairs is not None:
            return self._one((train, evaluation), pairs, place, arguments)
        return [
            Line("if self.training:", depth=2),
            *self._alone("train", train, place, arguments, depth=3),
            *self._alone("eval", evaluation, place, arguments),
        ]

    def _one(
        self,
        calls: tuple[Call, Call],
        pairs: Sequence[Pair],
        place: Place,
        arguments: Sequence[str],
        ports: Sequence[Port] | None = None,
        fewer: Sequence[str] | None = None,
    ) -> list[Line]:
        body = self._body("train", calls[0], pairs, place, arguments, ports or (), calls[1])
        return _finished(body, 2, ports is not None, fewer)

    def _alone(
        self,
        mode: str,
        call: Call,
        place: Place,
        arguments: Sequence[str],
        ports: Sequence[Port] | None = None,
        depth: int = 2,
    ) -> list[Line]:
        pairs = [Pair(item) for item in call.items]
        body = self._body(mode, call, pairs, place, arguments, ports or ())
        return _finished(body, depth, ports is not None)

    def _body(
        self,
        mode: str,
        call: Call,
        pairs: Sequence[Pair],
        place: Place,
        arguments: Sequence[str],
        ports: Sequence[Port],
        twin: Call | None = None,
    ) -> Body:
        graph: OpGraph = self.capture.train if mode == "train" else self.capture.eval
        match: dict[str, str] = {}
        if twin is not None:
            match.update(zip(twin.inputs, call.inputs, strict=True))
            for ours, theirs in zip(call.items, twin.items, strict=True):
                match.update(zip(theirs.outputs, ours.outputs, strict=True))
        return Body(
            place=place,
            call=call,
            pairs=pairs,
            graph=graph,
            wishes=self.wishes.train if mode == "train" else self.wishes.eval,
            arguments=arguments,
            results={p.value: p.name for p in ports if p.value not in call.inputs},
            match=match,
            path_known=not call.path,
            shapes=self.shapes[mode != "train"],
        )


def _root_call(call: Call, inputs: Sequence[Port], outputs: Sequence[Port]) -> Call:
    return replace(
        call,
        inputs=tuple(port.value for port in inputs),
        outputs=tuple(port.value for port in outputs),
    )


def _finished(
    body: Body, depth: int, as_tuple: bool = False, fewer: Sequence[str] | None = None
) -> list[Line]:
    """The lines of a body at their depth, and the return; `fewer`: values, if training differs."""
    lines = body.lines()
    start = next((i for i, line in enumerate(lines) if line.code or line.comment), len(lines))
    lines = lines[start:]
    names = body.returned()
    if as_tuple:  # the results keep the names that the docstring has
        if fewer is not None:
            lines.append(Line("if self.training:"))
            lines.append(Line(f"return {_tuple([body.variables.names[v] for v in fewer])}", "", 1))
        lines.append(Line(f"return {_tuple(names)}"))
        return [line.deeper(depth) for line in lines]
    comment, last = "", lines[-1] if lines else Line()
    if names and last.depth == 0 and last.code.startswith(f"{names[-1]} = "):  # and no loop
        expression = last.code.removeprefix(f"{names[-1]} = ")
        whole = f"return {', '.join([*names[:-1], expression])}"
        if len(names) == 1 or (len(whole) + 4 * depth <= WIDTH and names[-1] not in names[:-1]):
            names, comment = [*names[:-1], expression], body.types(body.call.outputs)
            lines.pop()
    lines.append(Line(f"return {', '.join(names)}".rstrip(), comment))
    return [line.deeper(depth) for line in lines]


def _tuple(names: Sequence[str]) -> str:
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"
