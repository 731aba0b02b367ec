"""Constraints that a person may ask for: pin, keep together, cut here, not there, divide so.

A pattern names a module with everything below it (``transformer.h.0``), one op of the captured
graph by its name, or several of either with ``*``, ``?`` and ``[…]`` (``transformer.h.*.attn``).
Patterns are resolved when the model is known (`pdcompile.passes.coarsen`); one that names
nothing is refused with the nearest names.

On the command line each is an option of the same name: `parsed` reads ``--pin "h.0=1"``,
``--together "wte,lm_head"`` and ``--cut-at "h.*"``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Literal, TypeVar, get_args

from pdcompile.errors import ConfigError

T = TypeVar("T")
MANY_SETS = 100  # of limits, which are not all tried for a smaller conflict
#: what `Split` may ask for: families of `split=`, but for weights in slices, or nothing divided
SplitAxis = Literal[
    "width", "width+sequence", "sequence", "context", "samples", "experts",
    "experts+samples", "whole",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pin:
    """The ops that match run on stage `stage` (from 0; −1 is the last stage)."""

    pattern: str
    stage: int

    def __post_init__(self) -> None:
        _check_patterns(self, (self.pattern,))
        if isinstance(self.stage, bool) or not isinstance(self.stage, int):
            raise ConfigError(
                f"Pin needs a stage number, got {self.stage!r}",
                remedy=f"such as Pin({self.pattern!r}, 0), or -1 for the last stage",
            )


@dataclass(frozen=True, slots=True, init=False)
class Together:
    """All ops that match any of the patterns run on one stage: ``Together("wte", "lm_head")``."""

    patterns: tuple[str, ...]

    def __init__(self, *patterns: str) -> None:
        _check_patterns(self, patterns)
        object.__setattr__(self, "patterns", patterns)


@dataclass(frozen=True, slots=True, init=False)
class Apart:
    """No stage holds ops of two of the patterns: ``Apart("encoder", "decoder")``."""

    patterns: tuple[str, ...]

    def __init__(self, *patterns: str) -> None:
        _check_patterns(self, patterns)
        if len(patterns) < 2:
            raise ConfigError(
                f"Apart needs two patterns or more, got {patterns!r}",
                remedy='such as Apart("encoder", "decoder")',
            )
        object.__setattr__(self, "patterns", patterns)


@dataclass(frozen=True, slots=True)
class CutBefore:
    """A stage begins at the ops that match: all that they read is made on earlier stages."""

    pattern: str

    def __post_init__(self) -> None:
        _check_patterns(self, (self.pattern,))


@dataclass(frozen=True, slots=True, init=False)
class CutAt:
    """Stages begin and end only where a module that matches begins or ends: ``CutAt("h.*")``.

    Of modules inside each other that match, the outermost counts; several calls of one module
    have a border each. What runs between two borders stays on one stage.
    """

    patterns: tuple[str, ...]

    def __init__(self, *patterns: str) -> None:
        _check_patterns(self, patterns)
        object.__setattr__(self, "patterns", patterns)


@dataclass(frozen=True, slots=True, init=False)
class Forbid:
    """The ops that match run on none of the stages: ``Forbid("embed", 0, -1)``.

    Stages count from 0, −1 is the last one; stage s runs on device s.
    """

    pattern: str
    stages: tuple[int, ...]

    def __init__(self, pattern: str, *stages: int) -> None:
        _check_patterns(self, (pattern,))
        if not stages or any(isinstance(s, bool) or not isinstance(s, int) for s in stages):
            raise ConfigError(
                f"Forbid needs stage numbers, got {stages!r}",
                remedy=f"such as Forbid({pattern!r}, 0)",
            )
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "stages", stages)


@dataclass(frozen=True, slots=True)
class MaxStages:
    """At most `count` stages hold anything: fewer where that is faster or all that fits."""

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ConfigError(
                f"MaxStages needs a number from 1, got {self.count!r}",
                remedy="such as MaxStages(4)",
            )


@dataclass(frozen=True, slots=True)
class Split:
    """The products of modules that match are divided along this axis wherever their stage is
    divided into parts, and other ops between them as suits: ``Split("h.*.mlp", "sequence")``.

    Axes are those of ``split=``, which says so of all other modules; ``"whole"``: each part
    computes all of it.  Where there is no product, every op that has the axis is divided.
    """

    pattern: str
    axis: SplitAxis

    def __post_init__(self) -> None:
        _check_patterns(self, (self.pattern,))
        if self.axis not in get_args(SplitAxis):
            raise ConfigError(
                f"Split({self.pattern!r}, …) divides along no axis {self.axis!r}",
                remedy=f"one of {', '.join(map(repr, get_args(SplitAxis)))}",
            )


@dataclass(frozen=True, slots=True)
class Placed:
    """Each op, by its own name, runs on its stage: of ops that were written for stages, or whose
    tensors are there; not on the command line."""

    stages: tuple[tuple[str, int], ...]


Constraint = Pin | Together | Apart | CutBefore | CutAt | Forbid | MaxStages | Split | Placed

#: the kinds by the names of their options on the command line
KINDS: dict[str, type[Constraint]] = {
    "pin": Pin, "together": Together, "apart": Apart, "cut_at": CutAt, "cut_before": CutBefore,
    "forbid": Forbid, "max_stages": MaxStages, "split_of": Split,
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


def patterns_of(constraint: Constraint) -> tuple[str, ...]:
    """The patterns of a constraint, in its order."""
    if isinstance(constraint, Together | Apart | CutAt):
        return constraint.patterns
    if isinstance(constraint, MaxStages | Placed):
        return ()
    return (constraint.pattern,)


def describe(constraint: Constraint) -> str:
    """As a person would write it: ``Pin('h.0', 1)``."""
    given: tuple[object, ...] = patterns_of(constraint)
    if isinstance(constraint, Pin):
        given = (*given, constraint.stage)
    elif isinstance(constraint, Forbid):
        given = (*given, *constraint.stages)
    elif isinstance(constraint, Split):
        given = (*given, constraint.axis)
    elif isinstance(constraint, MaxStages):
        given = (constraint.count,)
    elif isinstance(constraint, Placed):
        return f"the stages of {len(constraint.stages)} ops, which are fixed"
    return f"{type(constraint).__name__}({', '.join(map(repr, given))})"


def read(text: str) -> Constraint | None:
    """The constraint of which `describe` gave this text; None where it is of none."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return None
        kind = next(one for one in KINDS.values() if one.__name__ == call.func.id)
        return kind(*map(ast.literal_eval, call.args))
    except (SyntaxError, StopIteration, TypeError, ValueError):
        return None


def option(constraint: Constraint) -> tuple[str, str]:
    """Name and value of the command-line option that `parsed` reads as this constraint."""
    name = next(name for name, kind in KINDS.items() if type(constraint) is kind)
    value = ",".join(patterns_of(constraint))
    if isinstance(constraint, Pin):
        value += f"={constraint.stage}"
    elif isinstance(constraint, Split):
        value += f"={constraint.axis}"
    elif isinstance(constraint, Forbid):
        value += f"={','.join(map(str, constraint.stages))}"
    elif isinstance(constraint, MaxStages):
        value = str(constraint.count)
    return f"--{name.replace('_', '-')}", value


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
                raise ConfigError(
                    f"{option} {text!r} cannot be read{cause}", where=option, remedy=like
                ) from None
    return tuple(found)


_EXAMPLES: dict[type[Constraint], str] = {
    CutAt: "h.*", CutBefore: "h.4", Pin: "h.0=1", Forbid: "wte=0,-1", Together: "wte,lm_head",
    Apart: "encoder,decoder", MaxStages: "4", Split: "h.*.mlp=width",
}  # fmt: skip


def _parsed(kind: type[Constraint], text: str) -> Constraint:
    if kind is MaxStages:
        return MaxStages(int(text))
    patterns, equals, stages = text.partition("=")
    if bool(equals) != (kind in (Pin, Forbid, Split)):
        raise ValueError(text)
    if kind is Split:
        return Split(patterns.strip(), stages.strip())  # type: ignore[arg-type]
    numbers = [int(part) for part in stages.split(",")] if equals else []
    several = kind in (Together, Apart, CutAt)
    names = [part.strip() for part in (patterns.split(",") if several else [patterns])]
    return kind(*names, *numbers)  # type: ignore[arg-type]


def _check_patterns(constraint: object, patterns: tuple[str, ...]) -> None:
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise ConfigError(
            f"{type(constraint).__name__} needs names of modules or ops, got {patterns!r}",
            remedy="name a module as in model.named_modules(), such as 'transformer.h.0'",
        )
