"""Wishes: constraints of the user's, resolved against the module paths and ops of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from pdcompile.constraints import Apart, Constraint, CutBefore, Pin, Together, patterns_of
from pdcompile.errors import ConfigError, InfeasibleError
from pdcompile.graph import OpGraph
from pdcompile.passes.coarsen.groups import Groups

TOGETHER = "constraints of the user's"


@dataclass
class Wishes:
    """Constraints with the ops that each of their patterns stands for, by position."""

    graph: OpGraph
    matched: list[tuple[Constraint, tuple[tuple[int, ...], ...]]] = field(default_factory=list)

    @staticmethod
    def resolve(graph: OpGraph, constraints: Sequence[Constraint]) -> Wishes:
        """Raises ConfigError for something that is no constraint and for unknown names."""
        wishes = Wishes(graph)
        for constraint in constraints:
            if not isinstance(constraint, Constraint):
                raise ConfigError(
                    f"{constraint!r} is not a constraint",
                    remedy="use Pin, Together, Apart or CutBefore of pdcompile.constraints",
                )
            found = tuple(match(graph, pattern) for pattern in patterns_of(constraint))
            wishes.matched.append((constraint, found))
        return wishes

    def join(self, groups: Groups) -> None:
        """Join what `Together` names."""
        for constraint, found in self.matched:
            if isinstance(constraint, Together):
                groups.join([i for ops in found for i in ops], TOGETHER)

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

    def pins(self, item_of: Sequence[int], num_stages: int) -> tuple[tuple[int, int], ...]:
        """Pairs (item, stage). Raises ConfigError for a stage that is not there, and for two."""
        pins: dict[int, tuple[int, Pin]] = {}
        for constraint, found in self.matched:
            if not isinstance(constraint, Pin):
                continue
            stage = constraint.stage + (num_stages if constraint.stage < 0 else 0)
            if not 0 <= stage < num_stages:
                raise ConfigError(
                    f"{constraint} names a stage that {num_stages} stages do not have",
                    remedy=f"a stage from 0 to {num_stages - 1}, or -1 for the last one",
                )
            for i in found[0]:
                other = pins.setdefault(item_of[i], (stage, constraint))
                if other[0] != stage:
                    raise InfeasibleError(
                        f"{other[1]} and {constraint} contradict: "
                        f"op '{self.graph.ops[i].name}' cannot be on both stages",
                        where=self.graph.ops[i].source,
                        remedy="remove one of the two, or name smaller modules",
                    )
        return tuple(sorted((item, stage) for item, (stage, _) in pins.items()))

    def apart(self, item_of: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Pairs of items on different stages. Raises InfeasibleError when one item is both."""
        pairs: set[tuple[int, int]] = set()
        for constraint, found in self.matched:
            items = [sorted({item_of[i] for i in ops}) for ops in found]
            if isinstance(constraint, Apart):
                for k, first in enumerate(items):
                    for second in items[k + 1 :]:
                        for a in first:
                            pairs.update(self._pair(constraint, a, b) for b in second)
            elif isinstance(constraint, CutBefore):
                position = {op.name: i for i, op in enumerate(self.graph.ops)}
                inside = set(found[0])
                for i in found[0]:
                    for name in self.graph.ops[i].inputs:
                        source = position.get(name)
                        if source is not None and source not in inside:
                            pairs.add(self._pair(constraint, item_of[source], item_of[i]))
        return tuple(sorted(pairs))

    def _pair(self, constraint: Constraint, a: int, b: int) -> tuple[int, int]:
        if a == b:
            raise InfeasibleError(
                f"{constraint} cannot hold: some of these ops may not be separated",
                remedy="cut at another module (`pdcompile explain` lists what stays together)",
            )
        return min(a, b), max(a, b)


def match(graph: OpGraph, pattern: str) -> tuple[int, ...]:
    """Positions of the ops that a pattern names.

    A module's name stands for all ops below it.  Raises ConfigError, with the nearest names,
    when nothing matches.
    """
    named = {op.name for op in graph.ops}.union(*(_above(op.module_path) for op in graph.ops))
    chosen = {pattern} & named
    if any(sign in pattern for sign in "*?["):
        chosen |= {name for name in named if fnmatchcase(name, pattern)}
    found = [
        i
        for i, op in enumerate(graph.ops)
        if op.name in chosen or not chosen.isdisjoint(_above(op.module_path))
    ]
    if not found:
        near = get_close_matches(pattern, sorted(named), n=3) or sorted(named - {""})[:1]
        raise ConfigError(
            f"no module and no op of the graph is named {pattern!r}",
            remedy=f"did you mean {' or '.join(repr(name) for name in near)}?",
        )
    return tuple(found)


def _above(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[: n + 1]) for n in range(len(parts))]
