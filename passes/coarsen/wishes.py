"""Wishes: constraints of the user's, resolved against the module paths and ops of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from pdcompile.errors import ConfigError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen.spans import Groups
from pdcompile.passes.form.module_tree import ancestors
from pdcompile.problem import Wish
from pdcompile.problem.constraints import (
    Apart,
    Constraint,
    CutBefore,
    Forbid,
    Pin,
    Together,
    describe,
    patterns_of,
)


@dataclass
class Wishes:
    """Constraints with the ops that each of their patterns stands for, by position."""

    graph: OpGraph
    matched: list[tuple[Constraint, tuple[tuple[int, ...], ...]]] = field(default_factory=list)

    @staticmethod
    def resolve(graph: OpGraph, constraints: Sequence[Constraint]) -> Wishes:
        """Raises ConfigError for anything but constraints, and for unknown names."""
        wishes = Wishes(graph)
        for constraint in constraints:
            if not isinstance(constraint, Constraint):
                raise ConfigError(
                    f"{constraint!r} is not a constraint",
                    remedy="use Pin, Together, Apart, CutBefore, Forbid or MaxStages of "
                    "pdcompile.problem.constraints",
                )
            found = tuple(match(graph, pattern) for pattern in patterns_of(constraint))
            wishes.matched.append((constraint, found))
        return wishes

    def marks(self, groups: Groups) -> dict[int, frozenset[int]]:
        """For each group the numbered patterns that it is subject to."""
        marks: dict[int, set[int]] = {}
        count = 0
        for _, found in self.matched:
            for ops in found:
                count += 1
                for i in ops:
                    marks.setdefault(groups.find(i), set()).add(count)
        return {group: frozenset(numbers) for group, numbers in marks.items()}

    def bind(self, item_of: Sequence[int], num_stages: int) -> tuple[Wish, ...]:
        """Each constraint as entries of a `PartitionProblem`, in the order given.

        Whether they contradict each other is the planner's to say: it names the fewest that do.

        Raises:
            ConfigError: a stage that is not there.
        """
        return tuple(self._wish(one, found, item_of, num_stages) for one, found in self.matched)

    def _wish(
        self,
        constraint: Constraint,
        found: tuple[tuple[int, ...], ...],
        item_of: Sequence[int],
        num_stages: int,
    ) -> Wish:
        text = describe(constraint)
        items = [sorted({item_of[i] for i in ops}) for ops in found]
        if isinstance(constraint, Pin):
            stage = _stage(constraint.stage, num_stages, text)
            return Wish(text, pins=tuple((item, stage) for item in items[0]))
        if isinstance(constraint, Forbid):
            stages = sorted({_stage(s, num_stages, text) for s in constraint.stages})
            return Wish(text, forbidden=tuple((item, s) for item in items[0] for s in stages))
        if isinstance(constraint, Together):
            everything = sorted({item for part in items for item in part})
            return Wish(text, together=(tuple(everything),) if len(everything) > 1 else ())
        if isinstance(constraint, Apart):
            pairs = {
                (min(a, b), max(a, b))
                for k, first in enumerate(items)
                for second in items[k + 1 :]
                for a in first
                for b in second
            }
            return Wish(text, apart=tuple(sorted(pairs)))
        if isinstance(constraint, CutBefore):
            return Wish(text, apart=tuple(sorted(self._entries(found[0], item_of))))
        return Wish(text, max_stages=constraint.count)

    def _entries(self, ops: tuple[int, ...], item_of: Sequence[int]) -> set[tuple[int, int]]:
        """Pairs (item outside that makes what is read, item inside that reads it)."""
        position = {op.name: i for i, op in enumerate(self.graph.ops)}
        inside = set(ops)
        return {
            (min(item_of[source], item_of[i]), max(item_of[source], item_of[i]))
            for i in ops
            for name in self.graph.ops[i].inputs
            if (source := position.get(name)) is not None and source not in inside
        }


def _stage(given: int, num_stages: int, text: str) -> int:
    stage = given + (num_stages if given < 0 else 0)
    if not 0 <= stage < num_stages:
        raise ConfigError(
            f"{text} names a stage that {num_stages} stages do not have",
            remedy=f"a stage from 0 to {num_stages - 1}, or -1 for the last one",
        )
    return stage


def match(graph: OpGraph, pattern: str) -> tuple[int, ...]:
    """Positions of the ops that a pattern names.

    A module's name stands for all ops below it.  Raises ConfigError, with the nearest names,
    when nothing matches.
    """
    named = {op.name for op in graph.ops}.union(*(ancestors(op.module_path) for op in graph.ops))
    chosen = {pattern} & named
    if any(sign in pattern for sign in "*?["):
        chosen |= {name for name in named if fnmatchcase(name, pattern)}
    found = [
        i
        for i, op in enumerate(graph.ops)
        if op.name in chosen or not chosen.isdisjoint(ancestors(op.module_path))
    ]
    if not found:
        near = get_close_matches(pattern, sorted(named), n=3) or sorted(named - {""})[:1]
        raise ConfigError(
            f"no module and no op of the graph is named {pattern!r}",
            remedy=f"did you mean {' or '.join(repr(name) for name in near)}?",
        )
    return tuple(found)
