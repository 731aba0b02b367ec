"""One class for blocks that differ in numbers only: ``Conv1D(768, 2304)``, ``Conv1D(768, 768)``.

The numbers of a block (sizes of tensors, arguments of constructors and ops) are read off in a
fixed order.  Those that differ between the instances of a class become arguments of its
constructor, equal ones the same argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from pdcompile.ir.graph import Op, OpGraph, rewritten
from pdcompile.passes.codegen.block_calls import BlockCall
from pdcompile.passes.form.expressions import Named
from pdcompile.passes.form.module_tree import TAKEN, Node
from pdcompile.passes.stages.naming import identifier, unique

MOST = 6  # arguments of a class; blocks that differ in more have classes of their own
_LETTERS = "nmpqrsuvwyz"

Number: TypeAlias = int | float
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
    """The numbers of one instance of a class, in order, with hints for their names.

    `sizes`: those in its comments.
    """

    numbers: list[Number] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    sizes: list[Number] = field(default_factory=list)

    def read(self, number: Number, hint: str) -> Named:
        """Notes a number; in its place a key has only its type."""
        self.numbers.append(number)
        self.hints.append(hint)
        return Named(type(number).__name__)


@dataclass(slots=True)
class Template:
    """The arguments of a class, and where they stand.

    `names` and, for each, the first of its numbers; `at`: number -> index of the argument.
    """

    names: tuple[str, ...] = ()
    first: tuple[int, ...] = ()
    at: dict[int, int] = field(default_factory=dict)
    letters: dict[int, str] = field(default_factory=dict)  # size in comments -> how it is written

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


def template(instances: Sequence[Facts], taken: Sequence[str]) -> Template | None:
    """The arguments that a class needs for its instances; None if these are too many.

    `taken`: names that no argument may have.
    """
    columns: dict[tuple[Any, ...], int] = {}
    found = Template()
    first: list[int] = []
    for position in range(len(instances[0].numbers)):
        column = tuple(_exactly(one.numbers[position]) for one in instances)
        if len(set(column)) > 1:
            if column not in columns:
                columns[column] = len(first)
                first.append(position)
            found.at[position] = columns[column]
    if len(first) > MOST:
        return None
    names: list[str] = []
    for position in first:
        names.append(_name(instances[0].hints[position], names, taken))
    found.names, found.first = tuple(names), tuple(first)
    known = {column: names[index] for column, index in columns.items()}
    letters = iter(_LETTERS * 9)
    for position in range(len(instances[0].sizes)):
        column = tuple(_exactly(one.sizes[position]) for one in instances)
        if len(set(column)) > 1:
            if column not in known:
                known[column] = next(letters)
            found.letters[position] = known[column]
    return found


def _exactly(number: Number) -> tuple[str, str]:
    """Equal for numbers that are written alike (0.0 and -0.0 are not, nor 1 and 1.0)."""
    return type(number).__name__, repr(number)


def _name(hint: str, names: Sequence[str], taken: Sequence[str]) -> str:
    owner, _, short = hint.rpartition("/")
    short = identifier(short)
    if short in (*names, *taken, *TAKEN) and owner:
        short = identifier(f"{owner}_{short}")
    return unique(short, [*names, *taken, *TAKEN])


def shapes(
    call: BlockCall | None, graph: OpGraph, letters: Mapping[int, str], start: int
) -> dict[str, tuple[Any, ...]]:
    """Value -> shape for comments, sizes that differ between instances as letters."""
    found: dict[str, tuple[Any, ...]] = {}
    position = start
    for name in values_of(call):
        value = graph.values.get(name)
        shape: list[Any] = []
        for size in value.shape if value is not None else ():
            if type(size) is int:
                shape.append(letters.get(position, size))
                position += 1
            else:
                shape.append(size)
        found[name] = tuple(shape)
    return found


def sizes_of(call: BlockCall | None, graph: OpGraph) -> tuple[Number, ...]:
    """All fixed sizes of the values that a call takes and makes, in the order of `shapes`."""
    return tuple(
        size
        for name in values_of(call)
        if name in graph.values
        for size in graph.values[name].shape
        if type(size) is int
    )


def values_of(call: BlockCall | None) -> list[str]:
    """Values that a call takes, and those that its items make."""
    if call is None:
        return []
    return [*call.inputs, *(name for item in call.items for name in item.outputs)]
