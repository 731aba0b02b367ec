"""Which limits conflict: the smallest set, found with as few questions as possible.

A set of limits is asked about as a whole: can they hold together?  Any set that cannot, and of
which every part can, is an explanation; QuickXplain (Junker, AAAI 2004) finds one.  A smallest
one is found through its dual (Ignatiev et al., CP 2015, "Smallest MUS extraction with minimal
hitting set dualization"): every conflict shares a limit with every set whose removal helps, so a
smallest set that meets all such sets known so far is either a smallest conflict, or holds, and
then leads to another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition import dynamic_program
from pdcompile.passes.partition.bounds import crude_upper
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.dynamic_program import Cost, OutOfTimeError
from pdcompile.passes.partition.ideals import all_ideals, prefixes
from pdcompile.passes.partition.integer_program import IntegerProgram
from pdcompile.passes.partition.limits import Limit, keeping, limits_of
from pdcompile.passes.partition.model import Model, build
from pdcompile.passes.partition.segments import Segments
from pdcompile.plan.evaluate import violations
from pdcompile.problem import PartitionProblem

MAX_IDEALS = 800
Holds = Callable[[Sequence[int]], bool]  # can these limits hold together?


@dataclass(slots=True)
class Oracle:
    """Answers whether problems that differ in their limits alone have any assignment."""

    budget: Budget
    seed: int = 0
    _segments: dict[Hashable, Segments] = field(default_factory=dict)

    def feasible(self, problem: PartitionProblem) -> bool:
        return self.assignment(problem) is not None

    def assignment(self, problem: PartitionProblem) -> tuple[int, ...] | None:
        """The stage of every item in some assignment; None when there is none.

        Raises:
            OutOfTimeError: neither was found in time.
        """
        if self.budget.late:
            raise OutOfTimeError
        try:
            model = build(problem)
        except InfeasibleError:
            return None
        segments = self.segments(model)
        nothing = np.zeros(segments.subset.shape)
        found = dynamic_program.solve(segments, lambda _: nothing, self.budget)
        if found is None and segments.complete:
            return None
        if found is not None:
            stage_of = model.items_of(found[1])
            if not violations(problem, stage_of):
                return stage_of
        return self._search(model)

    def least(
        self, problem: PartitionProblem, cost: Callable[[Segments], Cost]
    ) -> tuple[tuple[int, ...] | None, bool]:
        """(assignment with the least largest cost, whether it is proved)."""
        if self.budget.late:
            raise OutOfTimeError
        try:
            model = build(problem)
        except InfeasibleError:
            return None, True
        segments = self.segments(model)
        found = dynamic_program.solve(segments, cost(segments), self.budget)
        if found is None:
            return None, segments.complete
        stage_of = model.items_of(found[1])
        if violations(problem, stage_of):
            return None, False
        return stage_of, segments.complete

    def segments(self, model: Model) -> Segments:
        """Matrices depend on groups and on what is apart, not on the other limits."""
        key: Hashable = model.members, model.apart
        if key not in self._segments:
            ideals = all_ideals(model, MAX_IDEALS, self.budget)
            chosen = ideals or prefixes(model, MAX_IDEALS, self.seed, self.budget)
            self._segments[key] = Segments.build(model, chosen, complete=ideals is not None)
        return replace(self._segments[key], model=model)

    def _search(self, model: Model) -> tuple[int, ...] | None:
        """CP-SAT, for what the dynamic program leaves open."""
        if model.num_groups * model.num_stages > 20_000:
            raise OutOfTimeError
        program = IntegerProgram(model, crude_upper(model))
        for _ in range(20):  # rounding of bytes can let through what does not fit
            bound, groups = program.solve(self.budget, self.seed, lambda _: None, first=True)
            if bound == math.inf:
                return None
            if groups is None:
                break
            if not violations(model.problem, model.items_of(groups)):
                return model.items_of(groups)
            program.forbid(groups)
        raise OutOfTimeError


@dataclass(frozen=True, slots=True)
class Conflict:
    """Limits that cannot hold together.

    `minimal`: each part of them can.  `smallest`: proved, there is no conflict of fewer limits.
    `helps`: sets of limits (of all) whose removal leaves a problem that can be solved.
    """

    limits: tuple[Limit, ...]
    minimal: bool
    smallest: bool
    helps: tuple[tuple[Limit, ...], ...] = ()


def conflict(problem: PartitionProblem, oracle: Oracle) -> Conflict:
    """The smallest conflict of an infeasible problem, or the best that the budget allows."""
    limits = limits_of(problem)

    def holds(chosen: Sequence[int]) -> bool:
        return oracle.feasible(keeping(problem, [limits[i] for i in chosen]))

    everything = tuple(range(len(limits)))
    core, minimal, smallest = everything, False, False
    helps: list[frozenset[int]] = []
    try:
        core = _irreducible(everything, holds)
        minimal = True
        core, helps = _smallest(core, len(limits), holds, helps)
        smallest = True
    except OutOfTimeError:
        pass
    named = tuple(limits[i] for i in sorted(core))
    sets = sorted((len(one), sorted(one)) for one in helps)
    return Conflict(
        named, minimal, smallest, tuple(tuple(limits[i] for i in one) for _, one in sets)
    )


def _irreducible(limits: Sequence[int], holds: Holds) -> tuple[int, ...]:
    """QuickXplain: a conflict of which every part holds, of the first limits where either do."""

    def within(known: tuple[int, ...], fresh: bool, open_: tuple[int, ...]) -> tuple[int, ...]:
        if fresh and not holds(known):
            return ()
        if len(open_) == 1:
            return open_
        half = len(open_) // 2
        first, second = open_[:half], open_[half:]
        later = within((*known, *first), bool(first), second)
        earlier = within((*known, *later), bool(later), first)
        return (*earlier, *later)

    return within((), True, tuple(limits)) if limits else ()


def _smallest(
    core: tuple[int, ...], count: int, holds: Holds, helps: list[frozenset[int]]
) -> tuple[tuple[int, ...], list[frozenset[int]]]:
    """A conflict of the least number of limits; `core` is one that may be larger."""
    while True:
        chosen = _hitting(helps, len(core) - 1)
        if chosen is None:
            return core, helps
        if not holds(sorted(chosen)):
            return tuple(sorted(chosen)), helps
        held = set(chosen)
        for i in range(count):
            if i not in held and holds(sorted(held | {i})):
                held.add(i)
        helps.append(frozenset(range(count)) - held)


def _hitting(sets: list[frozenset[int]], most: int) -> frozenset[int] | None:
    """A smallest set of at most `most` numbers that meets every one of the sets."""
    for size in range(most + 1):
        found = _hit(sets, frozenset(), size)
        if found is not None:
            return found
    return None


def _hit(sets: list[frozenset[int]], chosen: frozenset[int], left: int) -> frozenset[int] | None:
    missed = [one for one in sets if not one & chosen]
    if not missed:
        return chosen
    if not left:
        return None
    _, fewest = min((len(one), sorted(one)) for one in missed)
    for i in fewest:
        found = _hit(sets, chosen | {i}, left - 1)
        if found is not None:
            return found
    return None
