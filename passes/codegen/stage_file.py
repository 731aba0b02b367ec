"""One stage as a Python file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdcompile.ir.records import FROM_PARTS, PARTS
from pdcompile.ir.stage_interface import Port, StageInterface
from pdcompile.passes.codegen.block_calls import (
    BlockCall,
    Pair,
    pair,
    wider_ports,
    wider_twins,
)
from pdcompile.passes.codegen.block_classes import Block, CodeLayout, divide
from pdcompile.passes.codegen.body import Body
from pdcompile.passes.codegen.constructors import Constructors, ties
from pdcompile.passes.codegen.header import (
    FileContext,
    class_lines,
    docstring,
    gathered,
)
from pdcompile.passes.codegen.safety import check
from pdcompile.passes.codegen.source_text import WIDTH, Line, render, value_text
from pdcompile.passes.form.module_tree import prune
from pdcompile.passes.stages.boundaries import Staged
from pdcompile.passes.stages.naming import identifier, unique
from pdcompile.passes.stages.signatures import Mode

DRAW = '''\
def draw(where, index):
    """Called before every random op: pdcompile seeds the generator here. Alone it does nothing."""
'''

OPAQUE = '''\
class OpaqueModule(nn.Module):
    """Stands for a module of the model that runs as it is; pdcompile puts the model's own here.

    By hand: ``stage.path.to.it = model.path.to.it``, where `model` is the original.
    """

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, *args, **kwargs):
        raise NotImplementedError(f"put the model's own {self.name} in this place")
'''

OPAQUE_SHORT = 'class OpaqueModule(nn.Module):\n    """See above."""\n'


def layout_of(on_stages: Staged, k: int) -> tuple[CodeLayout, dict[str, str] | None]:
    """Divides the code of stage k into classes; also gives, where evaluation returns more than
    training from the same body, the twins of its values (`wider_twins`)."""
    train, evaluation = on_stages.train, on_stages.eval
    interface = on_stages.interfaces[k]
    ops = tuple([*mode.ops(k), *mode.ops(k, "loss")] for mode in (train, evaluation))
    returned = {port.value for port in interface.eval.outputs}

    def divided(training: Collection[str]) -> CodeLayout:
        names = on_stages.names[k]
        layout = divide(on_stages.capture, (ops[0], ops[1]), (training, returned), names)
        prune(layout.root)
        return layout

    twin = wider_twins(train.ops(k), evaluation.ops(k), interface)
    if twin:
        layout = divided({twin[name] for name in returned})
        returned_alike = wider_ports(interface.eval.outputs, twin)
        one = _root_call(layout.train, interface.train.inputs, returned_alike)
        other = _root_call(layout.eval, interface.eval.inputs, interface.eval.outputs)
        if pair(one, other) is not None:
            return layout, twin
    return divided({port.value for port in interface.train.outputs}), None


def stage_file(on_stages: Staged, k: int, parts: int = 1) -> str:
    """The text of ``stage_k.py``.  Raises SourceError for what cannot be written as source."""
    interface = on_stages.interfaces[k]
    layout, twin = layout_of(on_stages, k)
    context = FileContext(layout, on_stages.names[k])
    text = _Writer(interface, (on_stages.train, on_stages.eval), context, twin).write()
    draws = f"{DRAW}\n\n" if "draw(" in text else ""
    opaque = f"{OPAQUE}\n\n" if context.imports.opaque else ""
    header = docstring(on_stages, interface, context, parts)
    imports = "\n".join(context.imports.lines(torch_used="torch." in text))
    text = f"{header}\n{imports}\n\n\n{draws}{opaque}{text}"
    targets = {
        op.target
        for mode in (on_stages.train, on_stages.eval)
        for op in (*mode.ops(k), *mode.ops(k, "loss"))
        if op.kind == "function"
    }
    # What is fixed text needs no second look, and may do what generated text may not.
    fixed = text.replace(OPAQUE, OPAQUE_SHORT)
    check(fixed, context.imports, targets, f"stage_{k}.py")
    return text


@dataclass(slots=True)
class _Writer:
    """Writes the classes of one stage."""

    interface: StageInterface
    modes: tuple[Mode, Mode]  # training, evaluation
    context: FileContext
    twin: dict[str, str] | None  # where evaluation returns more (`wider_twins`)
    shapes: Sequence[Mapping[str, tuple[Any, ...]]] = ({}, {})  # in comments of the body written

    def write(self) -> str:
        self._name_classes()
        parts = [self._block(block) for block in self.context.layout.blocks]
        return "\n\n".join(render(part) for part in [*parts, self._stage()])

    def _name_classes(self) -> None:
        taken = {f"Stage{self.interface.index}", "torch", "nn", "F", "OpaqueModule", "i", "_"}
        for mode in (self.interface.train, self.interface.eval):
            taken.update(port.name for port in (*mode.inputs, *mode.outputs, *mode.loss_inputs))
        k = self.interface.index
        ops = [op for m in self.modes for op in (*m.ops(k), *m.ops(k, "loss"))]
        used = {op.target for op in ops} & FROM_PARTS
        conversions = sorted(target.removeprefix(f"{PARTS}.") for target in used)
        taken.update(conversions)
        for block in self.context.layout.blocks:
            full = self.context.layout.classes.get(block.path, ("", ""))[0]
            wish = identifier(full.rpartition(".")[2], "Block") if full else "Block"
            name, count = wish, 1
            while name in taken or unique(name, ()) != name:
                count += 1
                name = f"{wish}{count}"
            taken.add(name)
            self.context.class_names.append(name)
        self.context.class_names += conversions  # no variable may have their names either

    # Classes

    def _block(self, block: Block) -> list[Line]:
        context = self.context
        source = context.layout.classes.get(block.path, ("", ""))[1]
        comment = context.locations.short(source) if source else ""
        lines = class_lines(
            context.class_names[block.index], comment, gathered(context.layout.members(block))
        )
        calls = (block.train, block.eval)
        k = 0 if block.train is not None else 1
        call, mode = calls[k], self.modes[k]
        assert call is not None
        arguments: list[str] = []
        passed = mode.graph.passed.get(call.path, {})
        wished = [identifier(passed.get(v) or mode.wishes[v][0]) for v in call.inputs]
        for wish in (*wished, *(identifier(fqn.rpartition(".")[2]) for fqn in call.tensors)):
            arguments.append(unique(wish, [*arguments, *context.class_names]))
        self.shapes = block.shapes
        types = ", ".join(
            value_text(mode.graph.values.get(name), self.shapes[k].get(name))
            for name in call.inputs
        )
        forward = self._forward(calls, (arguments, arguments))
        self.shapes = ({}, {})
        text = "\n".join(line.code for line in forward)
        kept = [name for name in block.arguments if re.search(rf"\bself\.{name}\b", text)]
        owned = ", ".join(f"self.{name}" for name in kept)
        stored = [Line(f"{owned} = {', '.join(kept)}")] if kept else []
        node = replace(block.node, block=None)
        lines += _init(stored + self._constructors().lines(node), block.arguments)
        lines.append(Line(f"def forward({', '.join(['self', *arguments])}):", types, 1))
        return lines + forward

    def _stage(self) -> list[Line]:
        train, evaluation = self.interface.train, self.interface.eval
        layout, k = self.context.layout, self.interface.index
        # The docstring of the file says what it holds.
        lines = [Line(f"class Stage{k}(nn.Module):")]
        constructor = self._constructors().lines(layout.root)
        lines += _init(constructor + ties(layout.root, self.context.names))
        names = [port.name for port in train.inputs]
        same = len(train.inputs) == len(evaluation.inputs)
        given = ", ".join(["self", *(names if same else ["*inputs"])])
        lines.append(Line(f"def forward({given}):", depth=1))
        returned = wider_ports(evaluation.outputs, self.twin) if self.twin else train.outputs
        calls = (
            _root_call(layout.train, train.inputs, returned),
            _root_call(layout.eval, evaluation.inputs, evaluation.outputs),
        )
        others = names if same else [port.name for port in evaluation.inputs]
        fewer = [port.value for port in train.outputs] if self.twin else None
        lines += self._forward(calls, (names, others), (returned, evaluation.outputs), fewer)
        if not train.loss_inputs and not self.modes[0].ops(k, "loss"):
            return lines
        names = [port.name for port in train.loss_inputs]
        lines += [Line(), Line(f"def loss({', '.join(['self', *names])}):", depth=1)]
        # A call that gives no target, to predict, has no loss.
        losses = tuple(
            None if own.loss is None else BlockCall(
                "", tuple(mode.ops(k, "loss")), tuple(p.value for p in own.loss_inputs), (),
                (own.loss,),
            )
            for mode, own in zip(self.modes, (train, evaluation), strict=True)
        )  # fmt: skip
        return lines + self._forward(losses, (names, names))

    def _constructors(self) -> Constructors:
        return Constructors(self.context.class_names, self.context.imports)

    # Bodies

    def _forward(
        self,
        calls: Sequence[BlockCall | None],
        arguments: tuple[Sequence[str], Sequence[str]],
        ports: Sequence[Sequence[Port]] | None = None,
        fewer: Sequence[str] | None = None,
    ) -> list[Line]:
        """One body where training and evaluation agree, else one for each mode there is.

        Args:
            arguments: their names in each mode; where these are not equally many, they are
                taken out of ``inputs``.
            ports: what a stage returns; None for blocks and losses.
            fewer: values that training returns, if these are not all that evaluation does.
        """
        train, evaluation = calls
        pairs = pair(train, evaluation) if train is not None and evaluation is not None else None
        if train is not None and pairs is not None:
            body = self._body(0, train, pairs, arguments[0], ports)
            return _finished(body, 2, ports is not None, fewer)
        lines = []
        for k, call in enumerate(calls):
            if call is None:
                continue
            branches = k == 0 and evaluation is not None
            if branches:
                lines.append(Line("if self.training:", depth=2))
            own = arguments[k]
            if own and len(own) != len(arguments[1 - k]):
                comma = "," if len(own) == 1 else ""
                lines.append(Line(f"{', '.join(own)}{comma} = inputs", depth=2 + branches))
            body = self._body(k, call, [Pair(item) for item in call.items], own, ports)
            lines += _finished(body, 2 + branches, ports is not None)
        return lines

    def _body(
        self,
        k: int,
        call: BlockCall,
        pairs: Sequence[Pair],
        arguments: Sequence[str],
        ports: Sequence[Sequence[Port]] | None,
    ) -> Body:
        returned = ports[k] if ports is not None else ()
        return Body(
            context=self.context,
            call=call,
            pairs=pairs,
            graph=self.modes[k].graph,
            wishes=self.modes[k].wishes,
            arguments=arguments,
            results={p.value: p.name for p in returned if p.value not in call.inputs},
            shapes=self.shapes[k],
        )


def _init(statements: list[Line], arguments: Sequence[str] = ()) -> list[Line]:
    if not statements and not arguments:
        return []
    return [
        Line(f"def __init__({', '.join(['self', *arguments])}):", depth=1),
        Line("super().__init__()", depth=2),
        *(line.deeper(2) for line in statements),
        Line(),
    ]


def _root_call(call: BlockCall, inputs: Sequence[Port], outputs: Sequence[Port]) -> BlockCall:
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
        statement = f"return {', '.join([*names[:-1], expression])}"
        if len(names) == 1 or (len(statement) + 4 * depth <= WIDTH and names[-1] not in names[:-1]):
            names, comment = [*names[:-1], expression], body.types(body.call.outputs)
            lines.pop()
    lines.append(Line(f"return {', '.join(names)}".rstrip(), comment))
    return [line.deeper(depth) for line in lines]


def _tuple(names: Sequence[str]) -> str:
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"
