"""What a search knows at any time: the best plan, the best bound, and how long it may go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.model import Model
from pdcompile.plan.evaluate import measure, violations
from pdcompile.problem import Partition, PartitionProblem
from pdcompile.units import format_seconds

Progress = Callable[[str], None]
EQUAL = 2e-7  # a relative gap up to this ends the search: CP-SAT works with rounded numbers


@dataclass(slots=True)
class Search:
    """The best assignment so far, the best bound so far, and who found the bound."""

    problem: PartitionProblem
    model: Model
    budget: Budget
    seed: int = 0
    progress: Progress = lambda _: None
    best: Partition | None = None
    groups: tuple[int, ...] = ()  # of the best
    bound: float = 0.0
    prover: str = "relaxation"
    impossible: bool = False  # proved
    seen: set[tuple[int, ...]] = field(default_factory=set)
    _line: str = ""

    def offer(self, groups: tuple[int, ...], model: Model | None = None) -> bool:
        """Evaluate an assignment of groups; True when it is the best so far."""
        stage_of = (model or self.model).items_of(groups)
        if stage_of in self.seen:
            return False
        self.seen.add(stage_of)
        if violations(self.problem, stage_of):
            return False
        found = measure(self.problem, stage_of)
        if found.objective >= self.upper:
            return False
        self.best = found
        self.groups = tuple(stage_of[group[0]] for group in self.model.members)
        self._tell()
        return True

    def prove(self, bound: float, prover: str) -> None:
        """No assignment is better than `bound` seconds."""
        if bound > self.bound:
            self.bound, self.prover = bound, prover
            self._tell()

    @property
    def upper(self) -> float:
        return math.inf if self.best is None else self.best.objective

    @property
    def proved(self) -> bool:
        return self.best is not None and self.upper - self.bound <= EQUAL * self.upper

    @property
    def late(self) -> bool:
        return self.budget.late

    def _tell(self) -> None:
        if self.best is None:
            return
        bound = min(self.bound, self.upper)
        gap = 1 - bound / self.upper if self.upper > 0 else 0.0
        line = (
            f"plan {format_seconds(self.upper)}, bound {format_seconds(bound)}, "
            f"gap {100 * gap:.2g} %"
        )
        if line != self._line:
            self._line = line
            self.progress(line)
