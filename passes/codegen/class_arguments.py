"""One class for blocks that differ in numbers only: ``Conv1D(768, 2304)``, ``Conv1D(768, 768)``.

The numbers of a block (sizes of tensors, arguments of constructors and ops) are read off in a
fixed order.  Those that differ between the instances of a class become arguments of its
constructor, equal ones the same argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from pdcompile.ir.graph import Op, OpGraph, rewritten
from pdcompile.passes.codegen.block_calls import BlockCall
from pdcompile.passes.form.expressions import Named
from pdcompile.passes.form.module_tree import TAKEN, Node
from pdcompile.passes.stages.naming import identifier, unique

LETTERS = "nmpqrsuvwyz"

Number: TypeAlias = int | float
Column: TypeAlias = tuple[tuple[str, str], ...]  # the numbers of all instances at one place
Change: TypeAlias = Callable[[Any, str], Any]  # (number, what it is called) -> what to put there


def in_argument(value: Any, change: Change, hint: str) -> Any:
    """The argument with every number in it changed, in order of appearance."""
    return rewritten(value, lambda part: change(part, hint) if type(part) in (int, float) else part)


def in_call(call: BlockCall | None, change: Change) -> BlockCall | None:
    """The call with the numbers of its own ops changed."""
    if call is None:
        return None
    items = tuple(in_op(item, change) if isinstance(item, Op) else item for item in call.items)
    return replace(call, items=items)


def in_op(op: Op, change: Change) -> Op:
    """The op with the numbers among its arguments changed."""
    word = identifier(op.target.rpartition(".")[2])
    return replace(
        op,
        args=in_argument(op.args, change, word),
        kwargs=tuple((key, in_argument(each, change, identifier(key))) for key, each in op.kwargs),
    )


def in_node(node: Node, change: Change, inner: Callable[[Node, Change], Node], top: str) -> Node:
    """A copy of a module with the numbers of its tensors and leaves changed.

    `inner` copies modules that have a class of their own; `top` is the path of the whole.
    """
    if node.path != top and node.block is not None:
        return inner(node, change)
    tensors = {
        name: replace(
            info,
            shape=tuple(
                change(size, hint)
                for size, hint in zip(info.shape, _dims(name, len(info.shape)), strict=True)
            ),
        )
        for name, info in node.tensors.items()
    }
    leaf = node.leaf and replace(
        node.leaf,
        constructor=tuple(
            (key, in_argument(each, change, key)) for key, each in node.leaf.constructor
        ),
    )
    children = {
        name: in_node(child, _inside(change, name), inner, top)
        for name, child in node.children.items()
    }
    return replace(node, tensors=tensors, leaf=leaf, children=children)


def _dims(name: str, count: int) -> Sequence[str]:
    if count == 1:
        return ["size"]
    return ["rows", "columns"] if count == 2 else [f"{identifier(name)}_{i}" for i in range(count)]


def _inside(change: Change, owner: str) -> Change:
    """Names a child's number ``conv1/out_channels``: the short name, or both where it is taken."""

    def changed(number: Any, hint: str) -> Any:
        return change(number, hint if "/" in hint else f"{identifier(owner)}/{hint}")

    return changed


@dataclass(slots=True)
class Facts:
    """The numbers of one instance of a class, in order, with hints for their names."""

    numbers: list[Number] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def read(self, number: Number, hint: str) -> Named:
        """Notes a number; in its place a key has only its type."""
        self.numbers.append(number)
        self.hints.append(hint)
        return Named(type(number).__name__)


@dataclass(slots=True)
class Template:
    """The arguments of a class, and where they stand.

    `names` and, for each, the first of its numbers; `at`: number -> index of the argument; `known`:
    numbers of all instances -> the argument that they are.
    """

    names: tuple[str, ...]
    first: tuple[int, ...]
    at: dict[int, int]
    known: dict[Column, str]

    def arguments(self, numbers: Sequence[Any]) -> tuple[Any, ...]:
        """Constructor arguments of an instance with these numbers."""
        return tuple(numbers[position] for position in self.first)

    def change(self) -> Change:
        """Puts `Named` in the place of the numbers that differ, called in their order."""
        positions: Iterator[int] = iter(range(2**62))

        def put(number: Any, hint: str) -> Any:
            argument = self.at.get(next(positions))
            return number if argument is None else Named(self.names[argument])

        return put


def template(instances: Sequence[Facts], taken: Sequence[str]) -> Template:
    """The arguments that a class needs for its instances.

    `taken`: names that no argument may have.
    """
    columns: dict[Column, int] = {}
    at: dict[int, int] = {}
    first: list[int] = []
    for position, numbers in enumerate(zip(*(one.numbers for one in instances), strict=True)):
        column = _column(numbers)
        if len(set(column)) > 1:
            if column not in columns:
                columns[column] = len(first)
                first.append(position)
            at[position] = columns[column]
    names: list[str] = []
    for position in first:
        names.append(_name(instances[0].hints[position], names, taken))
    known = {column: names[index] for column, index in columns.items()}
    return Template(tuple(names), tuple(first), at, known)


def _column(numbers: Sequence[Number]) -> Column:
    """Equal for numbers that are written alike (0.0 and -0.0 are not, nor 1 and 1.0)."""
    return tuple((type(number).__name__, repr(number)) for number in numbers)


def _name(hint: str, names: Sequence[str], taken: Sequence[str]) -> str:
    owner, _, short = hint.rpartition("/")
    short = identifier(short)
    if short in (*names, *taken, *TAKEN) and owner:
        short = identifier(f"{owner}_{short}")
    return unique(short, [*names, *taken, *TAKEN])


def shapes(
    calls: Sequence[BlockCall | None],
    graph: OpGraph,
    known: dict[Column, str],
    letters: Iterator[str],
) -> dict[str, tuple[Any, ...]]:
    """Value of the first call -> shape for comments; sizes that differ between the calls are the
    arguments that are `known` to, or letters."""

    def shown(sizes: tuple[Any, ...]) -> Any:
        if type(sizes[0]) is not int or len(set(sizes)) == 1:
            return sizes[0]
        column = _column(sizes)
        if column not in known:
            known[column] = next(letters)
        return known[column]

    found = {}
    for names in zip(*map(values_of, calls), strict=True):
        if names[0] in graph.values:
            each = (graph.values[name].shape for name in names)
            found[names[0]] = tuple(map(shown, zip(*each, strict=True)))
    return found


def values_of(call: BlockCall | None) -> list[str]:
    """Values that a call takes, and those that its items make."""
    if call is None:
        return []
    return [*call.inputs, *(name for item in call.items for name in item.outputs)]
