"""Which values need no name: those that the author did not name go into the expression that
reads them, as in ``x = x + self.drop(self.proj(y))``.

The order of evaluation stays that of the ops: Python evaluates arguments from left to right, so
that values wait on a stack and may be used from its top only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from pdcompile.ir.graph import CHECK, Op, Ref, walk
from pdcompile.passes.codegen.expressions import IN_PLACE
from pdcompile.passes.codegen.pieces import Loop, Piece, Unpack, item_of, reads

INSIDE = 52  # columns of an expression that goes into another one
WHOLE = 84  # columns of a statement's expression


@dataclass(slots=True)
class Inliner:
    """Decides for one body.

    `place`: pieces share an expression only if it is equal (section and region).
    `text`: the expression of a piece, given those of the values that go into it.
    `draws`: whether a line before the statement starts the op's random stream.
    """

    wishes: Mapping[str, tuple[str, bool]]
    outputs: Collection[str]
    place: Callable[[Piece], Hashable]
    text: Callable[[Piece, Mapping[str, str]], str]
    draws: Callable[[Op], bool]
    waiting: list[str] = field(default_factory=list)  # values, in order of evaluation
    texts: dict[str, str] = field(default_factory=dict)  # of those, and of what went into others
    random: set[str] = field(default_factory=set)  # values whose expression draws

    def unnamed(self, pieces: Sequence[Piece]) -> set[str]:
        """Values that are read once, by the next statement."""
        readers: dict[str, int] = {}
        for piece in pieces:
            for name in _operands(piece):
                readers[name] = readers.get(name, 0) + 1
        found: set[str] = set()
        where: Hashable = None
        for piece in pieces:
            if self.place(piece) != where:
                self.waiting = []
            where = self.place(piece)
            used = self._taken(piece)
            text = "" if isinstance(piece, Loop) else self.text(piece, self._own(used))
            if used and len(text) > WHOLE:
                self.waiting, used = [], []
                text = self.text(piece, {})
            found.update(used)
            item = item_of(piece)
            if isinstance(item, Op) and not isinstance(piece, Unpack | Loop):
                name = item.name
                if readers.get(name) == 1 and self._may_wait(item) and len(text) <= INSIDE:
                    self.texts[name] = text
                    if item.draw is not None or self.random.intersection(used):
                        self.random.add(name)
                    self.waiting.append(name)
                    continue
            self.waiting = []
        return found

    def _taken(self, piece: Piece) -> list[str]:
        """The waiting values that the piece reads, taken off the stack; [] where they have to be
        statements after all."""
        if isinstance(piece, Loop):
            return []
        used = [name for name in _operands(piece) if name in self.waiting]
        item = item_of(piece)
        in_order = self.waiting[len(self.waiting) - len(used) :] == used
        fits = in_order and (not isinstance(item, Op) or self._takes(item, used))
        if not used or not fits:
            if used or not isinstance(item, Op):
                self.waiting = []
            return []
        del self.waiting[len(self.waiting) - len(used) :]
        return used

    def _takes(self, op: Op, used: Sequence[str]) -> bool:
        if self.draws(op) and self.random.intersection(used):
            return False  # the op's own stream has begun by then
        word = op.target.removeprefix("operator.")
        if word == "setitem":
            return walk((op.args[0], op.args[1]), Ref) == [op.args[0]] and op.args[0] not in [
                Ref(name) for name in used
            ]
        return word not in IN_PLACE or op.args[0] not in [Ref(name) for name in used]

    def _own(self, used: Sequence[str]) -> dict[str, str]:
        return {name: self.texts[name] for name in used}

    def _may_wait(self, op: Op) -> bool:
        word = op.target.removeprefix("operator.")
        return (
            not op.variable
            and not self.wishes[op.name][1]
            and op.name not in self.outputs
            and word not in {*IN_PLACE, "setitem"}
            and op.target != CHECK
            and not op.mutates
            and not self.draws(op)
        )


def _operands(piece: Piece) -> list[str]:
    """What the piece reads, in order, as often as it reads it."""
    item = item_of(piece)
    if isinstance(piece, Loop) or not isinstance(item, Op):
        return list(reads(piece))
    return [ref.name for ref in walk((item.args, item.kwargs), Ref)]


def may_draw(op: Op) -> bool:
    """Whether a function needs `draw` before it; leaf modules are seeded by the runtime's hooks.

    Attention counts as a draw in every model, but without dropout it never looks at the stream.
    """
    if op.draw is None or op.kind in ("module", "opaque"):
        return False
    if op.target.endswith(".scaled_dot_product_attention"):
        place = 4  # of dropout_p
        dropout = op.args[place] if len(op.args) > place else dict(op.kwargs).get("dropout_p", 0.0)
        return dropout != 0.0
    return True
