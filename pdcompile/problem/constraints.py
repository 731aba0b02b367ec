"""Constraints that a person may ask for: pin, keep together, cut here, not there, divide so.

A pattern names a module with everything below it (``transformer.h.0``), one op of the captured
graph by its name, or several of either with ``*``, ``?`` and ``[…]`` (``transformer.h.*.attn``).
Patterns are resolved when the model is known (`pdcompile.passes.coarsen`); one that names
nothing is refused with the nearest names.

On the command line each is an option of the same name: `parsed` reads ``--pin "h.0=1"``,
``--together "wte,lm_head"`` and ``--cut-at "h.*"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Literal, TypeVar, cast, get_args

from pdcompile.errors import ConfigError

T = TypeVar("T")
MANY_SETS = 100  # of limits, which are not all tried for a smaller conflict
#: what `Split` may ask for: families of `split=`, but for weights in slices, or nothing divided
SplitAxis = Literal[
    "width", "width+sequence", "sequence", "context", "samples", "experts",
    "experts+samples", "whole",
]  # fmt: skip


@dataclass(frozen=True, init=False, repr=False)
class Constraint:
    """Patterns that are bound, and numbers of stages from 0, where −1 is the last one.

    Raises:
        ConfigError: something else was given, or too little.
    """

    patterns: tuple[str, ...]
    numbers: tuple[int, ...]

    def _hold(
        self, patterns: tuple[str, ...], numbers: tuple[int, ...] = (), least: int = 1
    ) -> None:
        """Keep so many patterns at least, and the numbers."""
        kind, wanted = type(self), "a stage number"
        got: tuple[object, ...] = numbers
        if all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
            wanted, got = f"names of modules or ops, {least} or more", patterns
            if len(patterns) >= least and all(isinstance(p, str) and p for p in patterns):
                object.__setattr__(self, "patterns", patterns)
                object.__setattr__(self, "numbers", numbers)
                return
        raise ConfigError(
            f"{kind.__name__} needs {wanted}, got {got!r}",
            remedy=f"such as {_parsed(kind, _EXAMPLES[kind])}, with names as in "
            "model.named_modules(); the last stage is -1",
        )

    def __repr__(self) -> str:
        """The call that makes it: ``Pin('h.0', 1)``."""
        return f"{type(self).__name__}({', '.join(map(repr, (*self.patterns, *self.numbers)))})"


class Pin(Constraint):
    """The ops that match run on stage `stage` (from 0; −1 is the last stage)."""

    def __init__(self, pattern: str, stage: int) -> None:
        self._hold((pattern,), (stage,))


class Together(Constraint):
    """All ops that match any of the patterns run on one stage: ``Together("wte", "lm_head")``."""

    def __init__(self, *patterns: str) -> None:
        self._hold(patterns)


class Apart(Constraint):
    """No stage holds ops of two of the patterns: ``Apart("encoder", "decoder")``."""

    def __init__(self, *patterns: str) -> None:
        self._hold(patterns, least=2)


class CutBefore(Constraint):
    """A stage begins at the ops that match: all that they read is made on earlier stages."""

    def __init__(self, pattern: str) -> None:
        self._hold((pattern,))


class CutAt(Constraint):
    """Stages begin and end only where a module that matches begins or ends: ``CutAt("h.*")``.

    Of modules inside each other that match, the outermost counts; several calls of one module
    have a border each. What runs between two borders stays on one stage.
    """

    def __init__(self, *patterns: str) -> None:
        self._hold(patterns)


@dataclass(frozen=True, init=False, repr=False)
class Split(Constraint):
    """The products of modules that match are divided along this axis wherever their stage is
    divided into parts, and other ops between them as suits: ``Split("h.*.mlp", "sequence")``.

    Axes are those of ``split=``, which says so of all other modules; ``"whole"``: each part
    computes all of it.  Where there is no product, every op that has the axis is divided.
    """

    axis: SplitAxis

    def __init__(self, pattern: str, axis: SplitAxis) -> None:
        self._hold((pattern,))
        object.__setattr__(self, "axis", axis)
        if axis not in get_args(SplitAxis):
            raise ConfigError(
                f"Split({pattern!r}, …) divides along no axis {axis!r}",
                remedy=f"one of {', '.join(map(repr, get_args(SplitAxis)))}",
            )

    @property
    def pattern(self) -> str:
        return self.patterns[0]

    def __repr__(self) -> str:
        return f"Split({self.pattern!r}, {self.axis!r})"


@dataclass(frozen=True, init=False, repr=False)
class Placed(Constraint):
    """Each op, by its own name, runs on its stage: of ops that were written for stages, or whose
    tensors are there; not on the command line."""

    placed: tuple[tuple[str, int], ...]

    def __init__(self, placed: tuple[tuple[str, int], ...]) -> None:
        self._hold((), least=0)
        object.__setattr__(self, "placed", placed)

    def __repr__(self) -> str:
        return f"the stages of {len(self.placed)} ops, which are fixed"


#: the kinds by the names of their options on the command line
KINDS: dict[str, type[Constraint]] = {
    "pin": Pin, "together": Together, "apart": Apart, "cut_at": CutAt, "cut_before": CutBefore,
    "split_of": Split,
}  # fmt: skip
KNOWN = ", ".join(kind.__name__ for kind in KINDS.values())


def smallest_conflict(limits: Sequence[T], holds: Callable[[Sequence[T]], bool]) -> tuple[T, ...]:
    """The fewest limits that cannot hold together, which all of these cannot; the first ones where
    several sets would do.

    First one of which every part can is found; then smaller ones are sought, unless they are many.
    """
    core = [*limits]
    for limit in reversed(limits):
        rest = [one for one in core if one != limit]
        if rest and not holds(rest):
            core = rest
    for size in range(1, len(core) if comb(len(limits), len(core) - 1) <= MANY_SETS else 0):
        for chosen in combinations(limits, size):
            if not holds(chosen):
                return chosen
    return tuple(core)


def parsed(given: Mapping[str, Sequence[str]]) -> tuple[Constraint, ...]:
    """Constraints of what was written on the command line, by the names of `KINDS`.

    Places where cuts may be add up: ``--cut-at`` twice is one `CutAt`.

    Raises:
        ConfigError: names the option, and what it should look like.
    """
    found: list[Constraint] = []
    for name, kind in KINDS.items():
        texts = given.get(name, ())
        if kind is CutAt and texts:
            texts = (",".join(texts),)
        for text in texts:
            try:
                found.append(_parsed(kind, text))
            except (ValueError, ConfigError) as error:
                option = f"--{name.replace('_', '-')}"
                like = f'such as {option} "{_EXAMPLES[kind]}"'
                cause = f": {error.message}" if isinstance(error, ConfigError) else ""
                known = error.remedy if isinstance(error, ConfigError) else ""
                remedy = f"{known}, {like}" if known else like
                raise ConfigError(
                    f"{option} {text!r} cannot be read{cause}", where=option, remedy=remedy
                ) from None
    return tuple(found)


_EXAMPLES: dict[type[Constraint], str] = {
    CutAt: "h.*", CutBefore: "h.4", Pin: "h.0=1", Together: "wte,lm_head",
    Apart: "encoder,decoder", Split: "h.*.mlp=width",
}  # fmt: skip


def _parsed(kind: type[Constraint], text: str) -> Constraint:
    patterns, equals, value = text.partition("=")
    if bool(equals) != (kind in (Pin, Split)):
        raise ValueError(text)
    if kind is Split:
        return Split(patterns.strip(), cast(SplitAxis, value.strip()))
    numbers = [int(value)] if equals else []
    several = kind in (Together, Apart, CutAt)
    names = [part.strip() for part in (patterns.split(",") if several else [patterns])]
    return kind(*names, *numbers)
