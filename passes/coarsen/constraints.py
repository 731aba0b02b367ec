"""Constraints of the user, resolved against the module paths and ops of a graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import combinations, groupby, product

from pdcompile.errors import ConfigError, InfeasibleError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen.spans import Groups
from pdcompile.passes.form.module_tree import ancestors
from pdcompile.problem import Wish
from pdcompile.problem.constraints import (
    KNOWN,
    Apart,
    Constraint,
    CutAt,
    CutBefore,
    Pin,
    Placed,
    Split,
    Together,
)


@dataclass
class Constraints:
    """Constraints with the ops that each of their patterns stands for, by position.

    Those of `CutAt` are the ops from one border to the next.
    """

    graph: OpGraph
    matched: list[tuple[Constraint, tuple[tuple[int, ...], ...]]] = field(default_factory=list)

    @staticmethod
    def resolve(graph: OpGraph, constraints: Sequence[Constraint]) -> Constraints:
        """Raises ConfigError for anything but constraints, and for unknown names."""
        wishes = Constraints(graph)
        for constraint in constraints:
            if not isinstance(constraint, Constraint):
                raise ConfigError(
                    f"{constraint!r} is not a constraint",
                    remedy=f"use one of pdcompile.problem.constraints: {KNOWN}",
                )
            found = tuple(match(graph, one, constraint) for one in constraint.patterns)
            if isinstance(constraint, CutAt):
                found = tuple(between_borders(graph, constraint.patterns))
            if not isinstance(constraint, Split):  # which says nothing of cuts
                wishes.matched.append((constraint, found))
        return wishes

    def marks(self, groups: Groups) -> dict[int, frozenset[int]]:
        """Numbered patterns that each group is subject to."""
        marks = defaultdict[int, set[int]](set)
        for number, ops in enumerate(ops for _, found in self.matched for ops in found):
            for i in ops:
                marks[groups.find(i)].add(number)
        return {group: frozenset(numbers) for group, numbers in marks.items()}

    def bind(self, item_of: Sequence[int], num_stages: int, groups: Groups) -> tuple[Wish, ...]:
        """Each constraint as entries of a `PartitionProblem`, in the order given.

        Whether they contradict each other is the planner's to say: it names the fewest that do.

        Raises:
            ConfigError: a stage that is not there.
            InfeasibleError: what is to be apart may not be cut; says what, and why.
        """
        for constraint, found in self.matched:
            for a, b in self._apart(constraint, found):
                if item_of[a] == item_of[b]:
                    raise self._inseparable(constraint, a, b, groups)
        return tuple(self._wish(one, found, item_of, num_stages) for one, found in self.matched)

    def _wish(
        self,
        constraint: Constraint,
        found: tuple[tuple[int, ...], ...],
        item_of: Sequence[int],
        num_stages: int,
    ) -> Wish:
        text = str(constraint)
        items = [sorted({item_of[i] for i in ops}) for ops in found]
        if isinstance(constraint, Pin):
            stage = _stage(constraint.numbers[0], num_stages, text)
            return Wish(text, pins=tuple((item, stage) for item in items[0]))
        if isinstance(constraint, Placed):
            position = {op.name: i for i, op in enumerate(self.graph.ops)}
            there = [(position[name], s) for name, s in constraint.placed if name in position]
            pins = {(item_of[i], stage) for i, stage in there}
            return Wish(text, pins=tuple(sorted(pins)))
        if isinstance(constraint, Together):
            everything = sorted({item for part in items for item in part})
            return Wish(text, together=(tuple(everything),) if len(everything) > 1 else ())
        if isinstance(constraint, CutAt):
            return Wish(text, together=tuple(tuple(part) for part in items if len(part) > 1))
        pairs = {tuple(sorted((item_of[a], item_of[b]))) for a, b in self._apart(constraint, found)}
        return Wish(text, apart=tuple((a, b) for a, b in sorted(pairs)))

    def _apart(
        self, constraint: Constraint, found: tuple[tuple[int, ...], ...]
    ) -> Iterator[tuple[int, int]]:
        """Ops that may not share a stage: of two patterns, or (outside, inside that reads it)."""
        if isinstance(constraint, Apart):
            for first, second in combinations(found, 2):
                yield from product(first, second)
        if isinstance(constraint, CutBefore):
            position = {op.name: i for i, op in enumerate(self.graph.ops)}
            inside = set(found[0])
            for i in found[0]:
                sources = (position.get(name) for name in self.graph.ops[i].inputs)
                yield from ((a, i) for a in sources if a is not None and a not in inside)

    def _inseparable(
        self, constraint: Constraint, a: int, b: int, groups: Groups
    ) -> InfeasibleError:
        """The error where two ops of a group are to be apart."""
        one, other = (self.graph.ops[i] for i in (a, b))
        shown = [repr(op.module_path or op.name) for op in (one, other)]
        shown = shown if shown[0] != shown[1] else [repr(op.name) for op in (one, other)]
        why = "; ".join(groups.why(a, b)) if a != b else "it is in both"
        return InfeasibleError(
            f"{constraint!s} asks for a cut between {' and '.join(shown)} "
            f"({one.source}, {other.source}), which have to share a stage: {why}",
            where=str(constraint),
            remedy=f"drop it, or ask for a cut elsewhere: not between {' and '.join(shown)}",
        )


def _stage(given: int, num_stages: int, text: str) -> int:
    stage = given + (num_stages if given < 0 else 0)
    if not 0 <= stage < num_stages:
        raise ConfigError(
            f"{text} names a stage that {num_stages} stages do not have",
            remedy=f"a stage from 0 to {num_stages - 1}, or -1 for the last one",
        )
    return stage


def between_borders(graph: OpGraph, patterns: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Positions of the ops from each border of a module that matches to the next one."""
    chosen = frozenset[str]().union(*(_chosen(graph, pattern) for pattern in patterns))

    def module_at(position: int) -> str:
        """The outermost of the chosen that runs there, or the op itself; "" outside of them."""
        op = graph.ops[position]
        return next((path for path in (*ancestors(op.module_path), op.name) if path in chosen), "")

    for path, positions in groupby(range(len(graph.ops)), module_at):
        run = tuple(positions)
        yield from _calls(graph, run) if path else [run]


def _calls(graph: OpGraph, run: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The ops of a module, divided where it is called several times in a row with the same ops."""
    ops = [graph.ops[i] for i in run]
    first = {op.module_call for op in ops if op.module_path == ops[0].module_path}
    size, rest = divmod(len(run), len(first))
    same = [(op.module_path, op.target) for op in ops]
    if rest or any(same[i] != same[i % size] for i in range(len(run))):
        return [run]
    return [run[i : i + size] for i in range(0, len(run), size)]


def match(graph: OpGraph, pattern: str, constraint: Constraint) -> tuple[int, ...]:
    """Positions of the ops that a pattern of a constraint names; a module's name stands for all
    ops below it.  Raises ConfigError, with the nearest names, when nothing matches."""
    chosen = _chosen(graph, pattern)
    found = [
        i
        for i, op in enumerate(graph.ops)
        if op.name in chosen or not chosen.isdisjoint(ancestors(op.module_path))
    ]
    if not found:
        raise ConfigError(
            f"no module and no op of the graph is named {pattern!r}",
            where=str(constraint),
            remedy=f"did you mean {' or '.join(map(repr, _nearest(pattern, graph)))}?",
        )
    return tuple(found)


def _names(graph: OpGraph) -> set[str]:
    """Names of ops, and of all modules on their paths."""
    return {op.name for op in graph.ops}.union(*(ancestors(op.module_path) for op in graph.ops))


def _chosen(graph: OpGraph, pattern: str) -> set[str]:
    named = _names(graph)
    chosen = {pattern} & named
    if _is_wild(pattern):
        chosen |= {name for name in named if fnmatchcase(name, pattern)}
    return chosen


def _is_wild(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")


def _nearest(pattern: str, graph: OpGraph) -> list[str]:
    """Names that may have been meant; of a pattern with signs the same signs in such names."""
    named = _names(graph)
    if _is_wild(pattern):
        longer = sorted(name for name in named if fnmatchcase(name, f"*.{pattern}"))
        if longer:
            parts = longer[0].split(".")
            return [".".join([*parts[: len(parts) - pattern.count(".") - 1], pattern])]
    outermost = dict.fromkeys((*ancestors(op.module_path), op.name)[0] for op in graph.ops)
    near = get_close_matches(pattern, sorted(named), n=3) or list(outermost)[:3]
    return list(dict.fromkeys(_as_wild(pattern, name) for name in near))


def _as_wild(pattern: str, name: str) -> str:
    """A name with the signs of a pattern in their places."""
    given, parts = pattern.split("."), name.split(".")
    if len(given) != len(parts):
        return name
    pairs = zip(given, parts, strict=True)
    return ".".join(sign if _is_wild(sign) else part for sign, part in pairs)
