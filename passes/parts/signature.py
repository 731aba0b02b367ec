"""Signatures of ops: which dimensions of which operands are one loop, and what may be done to it.

    "input *k, weight nk, +bias n -> *n"          linear: rows and n free, k summed; then the bias
    "query *qD, key *KD, value *Ke, attn_mask? *qK -> *qe"       D and K are needed whole
    "input b(gi)~, weight (go)i~, +bias (go) -> b(go)~"          a convolution in groups
    "mat_a Tk, mat_b ekn, =offs e -> Tn"         rows by groups, of which each part sums its own

As in einsum, a letter is a loop over a dimension, and what the result does not have is summed.  A
capital is a loop that the op needs whole.  `*` stands for leading dimensions that broadcast, `&`
for dimensions that are needed whole, `~` for such that no other term has.  `1` is a dimension of
size one, parentheses are a product as in einops, the outermost factor first.  An operand with fewer
dimensions has the last ones.  `+` marks an operand that is added to the sum, `=` one that is read
whole wherever the op is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from pdcompile.passes.parts.atoms import ONE, Extent, Run, fresh, join, leaves, whole_extent
from pdcompile.passes.parts.calls import Call

Kind = Literal["free", "sum", "whole", "meet"]
Letters = tuple[str, ...]  # the factors of one dimension
Term = tuple[Letters, ...]  # the dimensions of one operand or result
Dims = tuple[Run, ...]

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(slots=True)
class Loop:
    """One index of an op, as in einsum.

    Operands without it are read whole.  Along "meet" the op of a part exchanges with the others
    what it needs, and gives the whole result.
    """

    run: Run
    kind: Kind


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
    sizes: Mapping[str, Extent] = field(default_factory=dict)
    vocabulary: str = ""
    meets: str = ""


Rule = str | Callable[[Call], Form]


class Whole(Exception):
    """An op that stays whole, and why."""

    def __init__(self, reason: str = "its sizes do not divide alike") -> None:
        super().__init__(reason)


def named(call: Call, text: str, **other: Any) -> Form:
    """The form of a signature whose terms have the names of arguments.

    A term is the argument of its own position, or of another one, ``name@position``, and may be
    missing: ``name?``.  ``name|name``: it has several.

    Raises:
        Whole: an operand is missing.
    """
    left, _, right = text.partition("->")
    terms, numbers = [], list[int | None]()
    for i, (plus, names, at, optional, term) in enumerate(_NAMED.findall(left)):
        found = [call.role(int(at or i), name) for name in names.split("|")]
        numbers.append(next((one for one in found if one is not None), None))
        terms.append(plus + term)
        if numbers[-1] is None and not (plus == "+" or optional):
            raise Whole("its operands are not known")
    return Form(f"{','.join(terms)}->{right.strip()}", numbers, **other)


_NAMED = re.compile(r"([+=]?)([\w|]+)(?:@(\d+))?(\??) ([^\s,]*)")


def letters_with(count: int, capital: Sequence[int] = ()) -> str:
    """Letters, so many, those of some dimensions as capitals."""
    whole = {int(dim) % count for dim in capital if count}
    return "".join(c.upper() if i in whole else c for i, c in enumerate(LETTERS[:count]))


@cache
def _terms(text: str) -> tuple[Term, ...]:
    return tuple(
        tuple(() if one == "1" else tuple(one.strip("()")) for one in _FACTORS.findall(term))
        for term in text.split(",")
    )


_FACTORS = re.compile(r"\(\w*\)|[^+=]")


class Binding:
    """The loops of a form over given operands, by letter, and the letters of these and of results.

    Attributes:
        reads: terms of the operands that are given, by their number among the call's.
        makes: terms of the results, by number.
        added: operands that are added after a sum.
    """

    def __init__(self, form: Form, dims: Mapping[int, Dims], results: Mapping[int, Dims]) -> None:
        """`dims` are those of operands; both are joined where they are the same.

        Raises:
            Whole: a dimension has not the size that the signature asks for.
        """
        self.loops: dict[str, Loop] = {}
        self.reads: dict[int, Term] = {}
        self.makes: dict[int, Term] = {}
        inputs, outputs = map(_terms, form.signature.split("->"))
        marked = [*zip(form.signature.split(","), form.operands, strict=False)]
        self.added = tuple(i for term, i in marked if term[:1] == "+" and i is not None)
        self._form, self._shown = form, {c for term in outputs for one in term for c in one}
        for i, number in enumerate(form.operands):
            if number is not None:
                self.reads[number] = _filled(inputs[i], len(dims[number]), f"~{i}")
                self._bind(self.reads[number], dims[number])
        for number, each in results.items():
            term = _filled(outputs[min(number, len(outputs) - 1)], len(each), "")
            self.makes[number] = term
            self._bind(term, each, made=True)
            if any(
                self._size(c) for one, run in zip(term, each, strict=True) if not run for c in one
            ):
                raise Whole  # of size one, and what is read is not
        for i in (i for text, i in marked if text[:1] == "=" and i is not None):
            del self.reads[i]

    def _bind(self, term: Term, dims: Dims, *, made: bool = False) -> None:
        seen = set[str]()
        for letters, run in zip(term, dims, strict=True):
            if not leaves(run):
                continue  # of size one: broadcast, if others have more
            pieces = [self._piece(letter, run, letters) for letter in letters]
            read = tuple(atom for piece in pieces for atom in piece)
            if not (join(read, run) if made else join(run, read)):  # results have operands' atoms
                raise Whole
            if not seen.isdisjoint(letters):
                raise Whole  # a diagonal
            seen.update(letters)

    def _piece(self, letter: str, run: Run, letters: Letters) -> Run:
        """The run of a letter, made where it has none yet: of the size that others leave over."""
        if self._size(letter) is None:
            size, known = whole_extent(run), self._form.sizes.get(letter)
            for other in letters if known is None else ():
                if other != letter:
                    own = self._form.sizes.get(other) or self._size(other, ONE)
                    if own is None or not own.divides(size):
                        raise Whole
                    size = size.over(own)
            made = run if known is None and len(letters) == 1 else fresh(known or size)
            self.loops[letter] = Loop(made, self._kind(letter))
        return self.loops[letter].run

    def _size(self, letter: str, one: Extent | None = None) -> Extent | None:
        """The size of the loops that are known; of size one: `one`."""
        found = self.loops.get(letter)
        return None if found is None else (whole_extent(found.run) if leaves(found.run) else one)

    def _kind(self, letter: str) -> Kind:
        if letter in self._form.meets:
            return "meet"
        if letter.isupper() or letter[0] in "&~":
            return "whole"
        return "free" if letter in self._shown or letter[0] == "*" else "sum"


def _filled(term: Term, count: int, own: str) -> Term:
    """The term with a loop for each dimension that `*`, `&` or `~` stands for, named from the
    right; `own`: what to call the latter ("" for a result, which has all dimensions)."""
    at = next((i for i, letters in enumerate(term) if letters and letters[0] in "*&~"), None)
    if at is None:
        if len(term) < count or (len(term) > count and not own):
            raise Whole
        return term[len(term) - count :]
    many = count - len(term) + 1
    if many < 0:
        raise Whole
    name = own or "~" if term[at][0] == "~" else term[at][0]
    each = tuple((f"{name}.{many - i}",) for i in range(many))
    return (*term[:at], *each, *term[at + 1 :])
