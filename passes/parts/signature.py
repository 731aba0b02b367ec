"""Signatures of ops: which dimensions of which operands are one loop, and what may be done to it.

    "*k,nk,+n->*n"          linear: rows free, n free, k summed; the bias is added after the sum
    "*qD,*KD,*Ke,*qK->*qe"  attention: the op needs D and K whole
    "b(gi)YX,(go)iVU->b(go)TS"  a convolution in groups

As in einsum, a letter is a loop over a dimension, and what the result does not have is summed.  A
capital is a loop that the op needs whole.  `*` stands for leading dimensions that broadcast, `1`
for a dimension of size one, parentheses for a product as in einops, the outermost factor first.
`+` marks an operand that is added to the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from pdcompile.passes.parts.atoms import ONE, Extent, Run, fresh, join, leaves, whole_extent
from pdcompile.passes.parts.calls import Call

Kind = Literal["free", "sum", "whole", "meet"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a loop is in an operand or result: in dimension `dim`, inside the factors `before`."""

    dim: int
    before: Run = ()


@dataclass(slots=True)
class Loop:
    """One index of an op, as in einsum: where operands and results have it.

    Operands are numbered as they appear in the op; those without it are read whole.  Along "meet"
    the op of a part exchanges with the others what it needs, and gives the whole result.
    """

    run: Run
    kind: Kind
    operands: dict[int, Place] = field(default_factory=dict)
    results: dict[int, Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Form:
    """The signature of one op, with the operands that its terms are.

    `operands` are numbers among the call's (None: not given); `sizes` are those of letters.  Where
    several results have one term, it is that of each.  No signature: the result is the same
    elements in the same order as the first operand, in other dimensions.  `vocabulary`: the letter
    that operands have numbers of, which parts share in order; `meets`: those of kind "meet".
    """

    signature: str
    operands: Sequence[int | None] = (0,)
    sizes: dict[str, Extent] = field(default_factory=dict)
    vocabulary: str = ""
    meets: str = ""


Rule = Callable[[Call], Form | str]  # str: why it stays whole

LETTERS = "abcdefghijklmnopqrstuvwxyz"
Letters = tuple[str, ...]  # the factors of one dimension


def letters_with(count: int, *, capital: Sequence[int] | str = (), skip: str = "") -> str:
    """So many letters, those of some dimensions (or of "all") as capitals."""
    free = [letter for letter in LETTERS if letter not in skip][:count]
    whole = range(count) if capital == "all" else {int(dim) % count for dim in capital if count}
    return "".join(c.upper() if i in whole else c for i, c in enumerate(free))


@cache
def _terms(
    signature: str,
) -> tuple[tuple[tuple[Letters, ...], ...], tuple[tuple[Letters, ...], ...]]:
    left, _, right = signature.partition("->")
    return tuple(map(_term, left.split(","))), tuple(map(_term, right.split(",")))


def _term(text: str) -> tuple[Letters, ...]:
    dims: list[Letters] = []
    inside: list[str] | None = None
    for letter in text.lstrip("+"):
        if letter == "(":
            inside = []
        elif letter == ")":
            dims.append(tuple(inside or ()))
            inside = None
        elif inside is not None:
            inside.append(letter)
        else:
            dims.append(() if letter == "1" else (letter,))
    return tuple(dims)


def added_operands(signature: str) -> tuple[int, ...]:
    """Numbers of the terms that are added after a sum."""
    terms = signature.partition("->")[0].split(",")
    return tuple(i for i, term in enumerate(terms) if term.startswith("+"))


class Mismatch(Exception):
    """The sizes of the operands are not what a signature says."""


def bind(
    signature: str,
    operands: Mapping[int, Sequence[Run]],
    results: Mapping[int, Sequence[Extent]],
    sizes: dict[str, Extent],
) -> tuple[dict[str, Loop], dict[int, tuple[Run, ...]]]:
    """Loops of a signature over given operands by letter, and the dimensions of the results.

    Args:
        operands: the dimensions of the operands that are given, by the number of the term.
        results: the sizes of the results, by number.
        sizes: of letters that are known, by letter.

    Raises:
        Mismatch: a dimension has not the size that the signature asks for.
    """
    inputs, outputs = _terms(signature)
    table = _Table(sizes, {a for term in outputs for dim in term for a in dim})
    for number, dims in operands.items():
        table.read(number, inputs[number], dims)
    last = len(outputs) - 1
    made = {i: table.write(i, outputs[min(i, last)], sizes) for i, sizes in results.items()}
    return table.loops, made


class _Table:
    """The loops of one binding, by letter; those of `*` by their distance from the right."""

    def __init__(self, sizes: dict[str, Extent], shown: set[str]) -> None:
        self.sizes, self.shown = sizes, shown
        self.loops: dict[str, Loop] = {}

    def read(self, number: int, term: tuple[Letters, ...], dims: Sequence[Run]) -> None:
        for i, (letters, run) in enumerate(zip(_filled(term, len(dims)), dims, strict=True)):
            if not leaves(run):
                continue  # of size one: broadcast, if others have more
            before: Run = ()
            pieces = [self._piece(letter, run, letters) for letter in letters]
            if not join(run, tuple(atom for piece in pieces for atom in piece)):
                raise Mismatch
            for letter, piece in zip(letters, pieces, strict=True):
                loop = self.loops[letter]
                if number in loop.operands:
                    raise Mismatch  # a diagonal
                loop.operands[number] = Place(i, before)
                before += piece

    def _piece(self, letter: str, run: Run, letters: Letters) -> Run:
        """The run of a letter, made where it has none yet."""
        found = self.loops.get(letter)
        if found is None or not leaves(found.run):
            known = self.sizes.get(letter)
            if known is None and len(letters) == 1:
                made = tuple(run)
            else:
                made = fresh(known or self._left_over(letter, run, letters))
            if found is None:
                self.loops[letter] = Loop(made, self._kind(letter))
            else:
                found.run = made
        return self.loops[letter].run

    def _left_over(self, letter: str, run: Run, letters: Letters) -> Extent:
        """The size of the one letter of a product that no other place tells."""
        size = whole_extent(run)
        for other in letters:
            if other == letter:
                continue
            known = self.sizes.get(other)
            if known is None and other in self.loops:
                known = whole_extent(self.loops[other].run)
            if known is None or not known.divides(size):
                raise Mismatch
            size = size.over(known)
        return size

    def _kind(self, letter: str) -> Kind:
        if letter.isupper():
            return "whole"
        return "free" if letter in self.shown or letter.startswith("*") else "sum"

    def write(
        self, number: int, term: tuple[Letters, ...], sizes: Sequence[Extent]
    ) -> tuple[Run, ...]:
        dims: list[Run] = []
        for i, (letters, size) in enumerate(zip(_filled(term, len(sizes)), sizes, strict=True)):
            before: Run = ()
            for letter in letters:
                if letter not in self.loops:
                    known = self.sizes.get(letter, size if len(letters) == 1 else ONE)
                    self.loops[letter] = Loop(fresh(known), self._kind(letter))
                loop = self.loops[letter]
                loop.results[number] = Place(i, before)
                before += loop.run
            if whole_extent(before) != size:
                raise Mismatch
            dims.append(before)
        return tuple(dims)


def _filled(term: tuple[Letters, ...], count: int) -> tuple[Letters, ...]:
    """The term with a loop for each dimension that `*` stands for, named from the right."""
    if ("*",) not in term:
        if len(term) != count:
            raise Mismatch
        return term
    at = term.index(("*",))
    many = count - len(term) + 1
    if many < 0:
        raise Mismatch
    return (*term[:at], *((f"*{many - i}",) for i in range(many)), *term[at + 1 :])
