"""Decides when the values of a stage die; `costs` forecasts by it, and `codegen` obeys it.

A value that its author did not name goes into the expression that reads it, as in
``x = x + self.drop(self.proj(y))``, and dies with it (`nameless`).  Any other has a variable: it
lives until the variable is bound again or its function returns (`spans`, `Lifetimes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdcompile.ir.graph import CHECK, Op, OpGraph, Ref, TensorInfo, walk
from pdcompile.passes.form.expressions import IN_PLACE, Scope, rough
from pdcompile.passes.form.module_tree import (
    Node,
    ancestors,
    module_expression,
    skeleton,
    tensor_expression,
)
from pdcompile.passes.stages.naming import is_container, wishes

INLINE_COLUMNS = 52  # columns of an expression that goes into another one
STATEMENT_COLUMNS = 84  # columns of a statement's expression


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement, as far as it decides which values need variables.

    `reads`: values, in the order of evaluation.  `op`: what it computes, None for calls of
    blocks.  `place`: only statements of one place share an expression.  `text`: the expression,
    given those of the values that go into it; None for what takes variables only.  `waits`:
    whether the result may go into the next expression.
    """

    reads: Sequence[str]
    op: Op | None
    place: Hashable
    text: Callable[[Mapping[str, str]], str] | None
    waits: bool = True


def operands(op: Op) -> list[str]:
    """Values that an op reads, in the order of evaluation, as often as it reads them."""
    return [ref.name for ref in walk((op.args, op.kwargs), Ref)]


def nameless(
    statements: Sequence[Statement],
    wished: Mapping[str, tuple[str, bool]],
    outputs: Collection[str],
) -> set[str]:
    """Values without a variable: read once, by the next statement.

    The order of evaluation stays that of the ops: Python evaluates arguments from left to right,
    so that values wait on a stack and may be used from its top only.

    Args:
        wished: of every value the name that it would get, and whether it may be bound again.
        outputs: values that are returned.
    """
    readers = Counter(name for statement in statements for name in statement.reads)
    found: set[str] = set()
    stack = _Stack()
    where: Hashable = None
    for statement in statements:
        if statement.place != where:
            stack.waiting = []
        where = statement.place
        used = stack.take(statement)
        text = statement.text({name: stack.texts[name] for name in used}) if statement.text else ""
        if statement.text and used and len(text) > STATEMENT_COLUMNS:
            stack.waiting, used = [], []
            text = statement.text({})
        found.update(used)
        op = statement.op
        if (
            op is not None
            and statement.waits
            and readers[op.name] == 1
            and op.name not in outputs
            and not wished[op.name][1]
            and len(text) <= INLINE_COLUMNS
            and _may_wait(op)
        ):
            stack.push(op, text, used)
        else:
            stack.waiting = []
    return found


@dataclass(slots=True)
class _Stack:
    waiting: list[str] = field(default_factory=list)  # values, in order of evaluation
    texts: dict[str, str] = field(default_factory=dict)  # of those, and of what went into others
    random: set[str] = field(default_factory=set)  # values whose expression draws

    def push(self, op: Op, text: str, used: Sequence[str]) -> None:
        """Puts the op's result on the stack; `used`: what went into its expression."""
        self.texts[op.name] = text
        if op.draw is not None or self.random.intersection(used):
            self.random.add(op.name)
        self.waiting.append(op.name)

    def take(self, statement: Statement) -> list[str]:
        """Takes the values that go into the statement off the stack; [] where they have to be
        statements after all."""
        if statement.text is None:
            return []
        used = [name for name in statement.reads if name in self.waiting]
        start = len(self.waiting) - len(used)
        op = statement.op
        if used and self.waiting[start:] == used and (op is None or self._takes(op, used)):
            del self.waiting[start:]
            return used
        if used or op is None:
            self.waiting = []
        return []

    def _takes(self, op: Op, used: Sequence[str]) -> bool:
        if draws(op) and self.random.intersection(used):
            return False  # the op's own stream has begun by then
        word = op.target.removeprefix("operator.")
        written = word in {*IN_PLACE, "setitem"} and op.args[0] in [Ref(name) for name in used]
        return not written and (
            word != "setitem" or walk((op.args[0], op.args[1]), Ref) == [op.args[0]]
        )


def _may_wait(op: Op) -> bool:
    word = op.target.removeprefix("operator.")
    return (
        not op.variable
        and word not in {*IN_PLACE, "setitem"}
        and op.target != CHECK
        and not op.mutates
        and not draws(op)
    )


def draws(op: Op) -> bool:
    """True if a function needs `draw` before it; leaf modules are seeded by the runtime's hooks.

    Attention counts as a draw in every model, but without dropout it never looks at the stream.
    """
    if op.draw is None or op.kind in ("module", "opaque"):
        return False
    if op.target.endswith(".scaled_dot_product_attention"):
        place = 4  # of dropout_p
        dropout = op.args[place] if len(op.args) > place else dict(op.kwargs).get("dropout_p", 0.0)
        return dropout != 0.0
    return True


def spans(
    items: Sequence[tuple[Sequence[str], Sequence[str], Sequence[str]]],
    inputs: Iterable[str],
    outputs: Iterable[str],
) -> dict[str, tuple[int, int]]:
    """The span in which each value of one function is needed: (position made, last read).

    Items are (values read, values made, values read after what is made has got its name).
    """
    made: dict[str, int] = dict.fromkeys(inputs, -1)
    read: dict[str, int] = {}
    for position, (reads, makes, rereads) in enumerate(items):
        read.update(dict.fromkeys(reads, position))
        read.update(dict.fromkeys(rereads, position + 1))
        for name in makes:
            made.setdefault(name, position)
    read.update(dict.fromkeys(outputs, len(items)))
    return {name: (start, max(read.get(name, start), start + 1)) for name, start in made.items()}


@dataclass(frozen=True, slots=True)
class Step:
    """An op of a stage, and the values that are released once it has run.

    Autograd may still keep them.
    """

    op: Op
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Decides when the values of any stage of one training graph die; made once a graph.

    A module whose ops all lie on the stage is a function of its own, whose variables die when it
    returns; those of modules that are cut, and of containers, lie in the caller's forward.

    `wished`: the name that each value gets, and whether it may be bound again; `calls`: how many
    ops run inside each module; `tensors`: parameters and buffers by every name; `containers`: paths
    of modules that only hold others, which generated code has no function for.
    """

    wished: Mapping[str, tuple[str, bool]]
    calls: Mapping[str, int]
    tensors: Mapping[str, TensorInfo]
    containers: Collection[str] = ()

    @classmethod
    def of(cls, graph: OpGraph) -> Lifetimes:
        infos = graph.tensors.values()
        return cls(
            wishes(graph),
            Counter(path for op in graph.ops for path in _modules(op)),
            {name: info for info in infos for name in (info.fqn, *info.aliases)},
            {path for path, (name, _) in graph.classes.items() if is_container(name)},
        )

    def steps(self, ops: Sequence[Op], kept: Collection[str]) -> tuple[Step, ...]:
        """The ops of one stage, in order, with the ends of values; `kept` ones leave the stage."""
        here = Counter(path for op in ops for path in _modules(op))
        whole = {path for path, count in here.items() if count == self.calls[path]}
        whole.difference_update(self.containers)
        scopes = [tuple(path for path in _modules(op) if path in whole) for op in ops]
        ends = _ends(scopes)
        last = {name: i for i, op in enumerate(ops) for name in op.inputs}
        passed = self._nameless(ops, scopes, kept)
        bound: dict[tuple[str, int, str], list[int]] = {}  # scope, its end, variable -> ops
        place: list[tuple[str, int]] = []
        for i, op in enumerate(ops):
            used = last.get(op.name, i)
            running = (path for path in scopes[i] if used <= ends[i][path])
            scope = next(running, "")  # the innermost that still runs at the last use
            place.append((scope, ends[i][scope]))
            bound.setdefault((*place[i], op.variable or op.name), []).append(i)
        found: list[list[str]] = [[] for _ in ops]
        for i, op in enumerate(ops):
            used = last.get(op.name, i)
            if op.name in passed:
                found[used].append(op.name)
            elif op.name not in kept:
                again = bound[(*place[i], op.variable or op.name)]
                rebound = next((j for j in again if j > i and j >= used), len(ops))
                found[min(max(place[i][1], used), rebound)].append(op.name)
        return tuple(Step(op, tuple(names)) for op, names in zip(ops, found, strict=True))

    def _nameless(
        self, ops: Sequence[Op], scopes: Sequence[tuple[str, ...]], kept: Collection[str]
    ) -> set[str]:
        root = self._tree(ops)

        def text(op: Op, base: str, inner: Mapping[str, str]) -> str:
            scope = Scope(
                value=lambda name: inner.get(name) or self.wished[name][0],
                tensor=lambda fqn: tensor_expression(root, base, fqn),
                size=str,
                device=lambda: "value.device",
                module=lambda path: module_expression(root, base, path),
                function=lambda target: "F." + target.rpartition(".")[2],
            )
            return rough(op, None, scope)

        statements = [
            Statement(operands(op), op, own, partial(text, op, own[0] if own else ""))
            for op, own in zip(ops, scopes, strict=True)
        ]
        return nameless(statements, self.wished, kept)

    def _tree(self, ops: Sequence[Op]) -> Node:
        """The modules of the stage, in the order in which they run."""
        read = {op.name: (*op.attributes, *op.parameters, *op.buffers_read) for op in ops}
        order: dict[str, None] = {}
        for op in ops:
            paths = [op.module_path, *(name.rpartition(".")[0] for name in read[op.name])]
            order.update(dict.fromkeys(paths))
        names = {name: self.tensors[name].fqn for found in read.values() for name in found}
        return skeleton(names, {info.fqn: info for info in self.tensors.values()}, ops, order)


def _modules(op: Op) -> tuple[str, ...]:
    """Paths of the modules whose forward calls the op, innermost first, the root left out."""
    return ancestors(op.scope)[::-1]


def _ends(scopes: Sequence[tuple[str, ...]]) -> list[dict[str, int]]:
    """The last op of the call of each scope, for each op."""
    ends: list[dict[str, int]] = [{} for _ in scopes]
    for i in reversed(range(len(scopes))):
        after = ends[i + 1] if i + 1 < len(scopes) else {}
        ends[i] = {path: after.get(path, i) for path in scopes[i]}
        ends[i][""] = len(scopes) - 1
    return ends
