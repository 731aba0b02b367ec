"""Variables of CP-SAT for the stage of each group: thresholds, and the ranges that bounds leave.

The booleans are x[v, s] = "group v is on stage s or later", monotone along the arcs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.model import Model, narrow

Literal: TypeAlias = Any  # True, False or a literal of CP-SAT


class Thresholds:
    """Variables for stages inside each group's range; True below it, False above it.

    Stages do not decrease along `arcs`.  `possible` is False where some group has no stage left:
    then there is nothing else.
    """

    def __init__(
        self,
        cp: Any,
        ranges: Sequence[tuple[int, int]],
        arcs: Iterable[tuple[int, int]],
        stages: int,
    ):
        self.cp = cp
        self.lowest, self.highest = [low for low, _ in ranges], [high for _, high in ranges]
        self.possible = all(low <= high for low, high in ranges)
        if not self.possible:
            return
        self._x = [
            [
                True if s <= low else False if s > high else cp.new_bool_var(f"x{v}_{s}")
                for s in range(stages + 1)
            ]
            for v, (low, high) in enumerate(ranges)
        ]
        for v, (low, high) in enumerate(ranges):
            for s in range(low + 1, high):
                self.clause([negated(self._x[v][s + 1]), self._x[v][s]])
        for a, b in arcs:
            for s in range(1, stages):
                self.clause([negated(self._x[a][s]), self._x[b][s]])

    @staticmethod
    def of(cp: Any, model: Model, upper: float) -> Thresholds:
        """Those of a problem's model, with all that its constraints say."""
        stages, groups = range(model.num_stages), range(model.num_groups)
        x = Thresholds(
            cp, list(zip(*tightened(model, upper), strict=True)), model.arcs, model.num_stages
        )
        if not x.possible:
            return x
        for a, b in model.apart:
            for s in stages:
                x.clause([*x.elsewhere(a, s), *x.elsewhere(b, s)])
        for s in stages:
            cp.add(sum(x.at(v, s) for v in groups) >= 1)
        return x

    def from_stage(self, group: int, stage: int) -> Literal:
        """The group is on this stage or later."""
        return self._x[group][stage]

    def elsewhere(self, group: int, stage: int) -> list[Literal]:
        """Literals of which one holds unless the group is on the stage."""
        return [negated(self._x[group][stage]), self._x[group][stage + 1]]

    def at(self, group: int, stage: int) -> Any:
        """1 when the group is on the stage, else 0, as a linear expression."""
        return self._x[group][stage] - self._x[group][stage + 1]

    def can(self, group: int, stage: int) -> bool:
        return self.lowest[group] <= stage <= self.highest[group]

    def clause(self, literals: Iterable[Literal]) -> None:
        """Demand that at least one literal holds."""
        listed = list(literals)
        if not any(literal is True for literal in listed):
            self.cp.add_bool_or([literal for literal in listed if literal is not False])

    def implied(self, name: str, unless: Iterable[list[Literal]]) -> Literal:
        """A new literal that holds whenever all of one list's negations hold: False if none can.

        Each list holds literals of which one must hold for the new one to be free.
        """
        clauses = [listed for listed in unless if not any(part is True for part in listed)]
        if not clauses:
            return False
        if any(all(part is False for part in listed) for listed in clauses):
            return True
        literal = self.cp.new_bool_var(name)
        for listed in clauses:
            self.clause([*listed, literal])
        return literal

    def read(self, value: Callable[[Any], bool]) -> tuple[int, ...]:
        return tuple(
            self.lowest[v]
            + sum(value(self._x[v][s]) for s in range(self.lowest[v] + 1, self.highest[v] + 1))
            for v in range(len(self._x))
        )


def tightened(model: Model, upper: float) -> tuple[list[int], list[int]]:
    """Ranges of stages in every assignment whose objective is at most `upper`.

    A group and its ancestors need enough stages of at most `upper` seconds each (under flush,
    of upper/m), and so do a group and its descendants from the other end.
    """
    flush = model.problem.objective == "flush"
    room = upper / (model.problem.num_microbatches if flush else 1) * (1 + 1e-9)
    speeds = [stage.speed for stage in model.problem.stages]
    work = [f + w for f, w in zip(model.forward, model.backward, strict=True)]
    lowest, highest = list(model.lowest), list(model.highest)
    before, after = lattice.neighbours(model.num_groups, model.arcs)
    for v, ahead in enumerate(lattice.accumulated(before, work, from_end=False)):
        lowest[v] = max(lowest[v], _first(ahead, speeds, room))
    for v, behind in enumerate(lattice.accumulated(after, work, from_end=True)):
        highest[v] = min(highest[v], model.num_stages - 1 - _first(behind, speeds[::-1], room))
    narrow(lowest, highest, model.arcs)
    return lowest, highest


def _first(work: float, speeds: list[float], room: float) -> int:
    """The first stage by whose end this much work can be done; the last one if never."""
    done = 0.0
    for s, speed in enumerate(speeds):
        done += speed * room
        if work <= done:
            return s
    return len(speeds)


def negated(literal: Literal) -> Literal:
    return not literal if isinstance(literal, bool) else literal.negated()
