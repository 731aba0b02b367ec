"""The pieces of a body: an op or call, a loop over equal blocks, or a tuple taken apart.

Also the region that a piece runs in, and the variables that it may bind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from pdcompile.errors import SourceError
from pdcompile.hardware import devices
from pdcompile.ir.graph import Op, OpGraph, Ref, TorchLiteral
from pdcompile.ir.targets import from_literal
from pdcompile.passes.codegen.block_calls import BlockCall, Item, Pair, ops_of
from pdcompile.passes.codegen.block_classes import CodeLayout
from pdcompile.passes.codegen.source_text import Line
from pdcompile.passes.form.expressions import quote
from pdcompile.passes.stages.naming import RESERVED


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of all modules of one container in order, each fed by the one before.

    `thread` is the argument that is the previous call's result; all others stay the same.
    """

    container: str
    block: int
    calls: tuple[BlockCall, ...]
    thread: int


@dataclass(frozen=True, slots=True)
class Unpack:
    """A container-valued op whose items are taken out once each: ``q, k, v = …``."""

    op: Op
    twin: Op | None
    items: tuple[str, ...]


Piece: TypeAlias = Pair | Loop | Unpack


def pieces_of(
    pairs: Sequence[Pair], layout: CodeLayout, graph: OpGraph, outputs: Collection[str]
) -> list[Piece]:
    """The pairs of a body, with loops rolled up and tuples taken apart where made."""
    return _unpack(_roll(pairs, layout, outputs), graph)


def item_of(piece: Piece) -> Item:
    """The op or (first) call of a piece."""
    if isinstance(piece, Loop):
        return piece.calls[0]
    return piece.op if isinstance(piece, Unpack) else piece.item


def reads(piece: Piece) -> Sequence[str]:
    """Values that a piece reads."""
    if isinstance(piece, Loop):
        inner = {call.outputs[0] for call in piece.calls}
        return [name for call in piece.calls for name in call.inputs if name not in inner]
    return item_of(piece).inputs


def rereads(piece: Piece) -> Sequence[str]:
    """Values that a piece reads again after it has bound its result, as a loop does."""
    if not isinstance(piece, Loop):
        return ()
    return [name for i, name in enumerate(piece.calls[0].inputs) if i != piece.thread]


def makes(piece: Piece) -> Sequence[str]:
    """Values that a piece binds to variables."""
    if isinstance(piece, Loop):
        return piece.calls[-1].outputs
    return piece.items if isinstance(piece, Unpack) else piece.item.outputs


def _roll(pairs: Sequence[Pair], layout: CodeLayout, outputs: Collection[str]) -> list[Pair | Loop]:
    done: list[Pair | Loop] = []
    read_by: dict[str, int] = dict.fromkeys(outputs, 2)  # returned: not to be overwritten
    for each in pairs:
        for name in each.item.inputs:
            read_by[name] = read_by.get(name, 0) + 1
    position = 0
    while position < len(pairs):
        loop = _loop_at(pairs, position, layout, read_by)
        if loop is None:
            done.append(pairs[position])
            position += 1
        else:
            done.append(loop)
            position += len(loop.calls)
    return done


def _loop_at(
    pairs: Sequence[Pair], position: int, layout: CodeLayout, read_by: Mapping[str, int]
) -> Loop | None:
    first = pairs[position].item
    if not isinstance(first, BlockCall) or len(first.outputs) != 1:
        return None
    container, _, name = first.path.rpartition(".")
    node = layout.root.find(container)
    if not container or node is None or not node.is_indexed or name != next(iter(node.children)):
        return None
    paths = [f"{container}.{child}" for child in node.children]
    calls = [pair.item for pair in pairs[position : position + len(paths)]]
    if len(calls) < 2 or [c.path for c in calls if isinstance(c, BlockCall)] != paths:
        return None
    chain = [call for call in calls if isinstance(call, BlockCall)]
    if len({layout.block_of[call.path] for call in chain}) != 1:
        return None
    if any(read_by.get(call.outputs[0], 0) != 1 for call in chain[:-1]):
        return None  # something else looks at a result in between
    threads = {_thread(one, other) for one, other in pairwise(chain)}
    thread = threads.pop()
    if threads or thread is None:
        return None
    return Loop(container, layout.block_of[first.path], tuple(chain), thread)


def _thread(one: BlockCall, other: BlockCall) -> int | None:
    """The one argument of `other` that is the result of `one`, when all others are the same."""
    if one.tensors != other.tensors or len(one.inputs) != len(other.inputs):
        return None
    differ = [i for i, (a, b) in enumerate(zip(one.inputs, other.inputs, strict=True)) if a != b]
    if len(differ) == 1 and other.inputs[differ[0]] == one.outputs[0]:
        return differ[0]
    return None


_PARTS = frozenset({"split", "chunk", "unbind", "tensor_split"})
_PAIRS = frozenset(
    {"topk", "sort", "max", "min", "median", "mode", "kthvalue", "cummax", "cummin"}
    | {"std_mean", "var_mean", "aminmax"}
)


def _unpack(pieces: Sequence[Pair | Loop], graph: OpGraph) -> list[Piece]:
    takers: dict[str, list[Op]] = {}
    for piece in pieces:
        for name in reads(piece):
            item = item_of(piece)
            takers.setdefault(name, []).append(item) if isinstance(item, Op) else None
    done: list[Piece] = []
    taken: set[str] = set()
    for piece in pieces:
        op = piece.item if isinstance(piece, Pair) else None
        if not isinstance(op, Op) or not isinstance(piece, Pair):
            done.append(piece)
        elif op.name not in taken:
            items = _items(op, takers.get(op.name, []), graph)
            taken.update(items)
            twin = piece.twin if isinstance(piece.twin, Op) else None
            done.append(Unpack(op, twin, items) if items else piece)
    return done


def _items(op: Op, takers: Sequence[Op], graph: OpGraph) -> tuple[str, ...]:
    """The values of ``op[0]``, ``op[1]``, …, if these are all that the tuple has."""
    value = graph.values.get(op.name)
    word = op.target.removeprefix("torch.")
    if word not in _PARTS | _PAIRS or value is None or value.is_tensor or not op.args:
        return ()
    if any(taker.target != "operator.getitem" for taker in takers):
        return ()
    indices = {taker.args[1]: taker.name for taker in takers}
    if len(takers) < 2 or sorted(map(repr, indices)) != sorted(map(repr, range(len(takers)))):
        return ()
    names = tuple(indices[i] for i in range(len(takers)))
    if word in _PAIRS:
        return names if len(names) == 2 else ()
    source = op.args[0]
    if not isinstance(source, Ref):
        return ()
    whole, *parts = (graph.values[n].bytes(graph.batch_size) for n in (source.name, *names))
    return names if whole == sum(parts) and whole else ()


@dataclass(frozen=True, slots=True)
class Region:
    """Grad mode and autocast of ops."""

    grad_enabled: bool = True
    autocast: str | None = None
    enables_grad: bool = False


def region_of(item: Item) -> Region:
    """The region that all ops below share; the plain one when they differ."""
    if isinstance(item, Op):
        return Region(item.grad_enabled, item.autocast, item.enables_grad)
    found = {region_of(op) for op in ops_of(item)}
    return found.pop() if len(found) == 1 else Region()


def with_line(region: Region) -> Line:
    """The ``with`` statement that opens a region."""
    contexts = [] if region.grad_enabled else ["torch.no_grad()"]
    if region.enables_grad:
        contexts = ["torch.enable_grad()"]
    if region.autocast is not None:
        contexts.append(_autocast(region.autocast))
    return Line(f"with {', '.join(contexts)}:")


def _autocast(text: str) -> str:
    device, _, dtype = text.partition(":")
    if not re.fullmatch(r"[a-z]+", device):
        raise SourceError(f"{text!r} is not an autocast region", remedy="such as cpu:bfloat16")
    if dtype in ("", "off", "disabled", "none"):
        return f"torch.autocast({quote(device)}, enabled=False)"
    from_literal(TorchLiteral("dtype", dtype), devices.HOST)  # raises if there is none
    return f"torch.autocast({quote(device)}, dtype=torch.{dtype})"


@dataclass(slots=True)
class Variables:
    """Assigns names to values by their spans of life (position made, position last read).

    A name may be bound again once the value that it held is not read any more, as in
    ``x = self.ln(x)``.  Names derived from an op are used once, so that they stay telling.
    """

    avoid: Iterable[str] = ()
    names: dict[str, str] = field(default_factory=dict)
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def fix(self, value: str, name: str, span: tuple[int, int]) -> None:
        """Gives the value this name without asking whether it is free (arguments)."""
        self.names[value] = name
        self.spans.setdefault(name, []).append(span)

    def give(self, value: str, wish: str, rebind: bool, span: tuple[int, int]) -> str:
        """A name for the value: its wish, or the wish with a number."""
        name, count = wish, 0
        while not self.free(name, rebind, span):
            count += 1
            name = f"{wish}_{count}"
        self.fix(value, name, span)
        return name

    def free(self, name: str, rebind: bool, span: tuple[int, int]) -> bool:
        """True if no value that lives in this span has the name."""
        if name in RESERVED or name in self.avoid:
            return False
        others = self.spans.get(name, [])
        if not rebind:
            return not others
        return all(span[0] >= end or start >= span[1] for start, end in others)
