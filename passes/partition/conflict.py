"""Limits of a problem that conflict: the smallest set, found with as few questions as possible.

Precedence along the flow of data and a parameter's price on every holder are no limits: they are
what the model is.  A set of limits is asked about as a whole: can they hold together?  Any set
that cannot, and of which every part can, is an explanation; QuickXplain (Junker, AAAI 2004) finds
one.  A smallest one is found through its dual (Ignatiev et al., CP 2015, "Smallest MUS extraction
with minimal hitting set dualization"): every conflict shares a limit with every set whose removal
helps, so a smallest set that meets all such sets known so far is either a smallest conflict, or
holds, and then leads to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition import dynamic_program
from pdcompile.passes.partition.budget import Budget, OutOfTimeError
from pdcompile.passes.partition.cpsat import any_assignment
from pdcompile.passes.partition.dynamic_program import Cost
from pdcompile.passes.partition.model import Model, all_ideals, build, prefixes
from pdcompile.passes.partition.segments import Segments
from pdcompile.plan.evaluate import violations
from pdcompile.problem import PartitionProblem, Wish
from pdcompile.units import format_bytes

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Limit:
    """The memory of a stage, what a person asked for, or that no stage may be empty."""

    text: str
    stage: int | None = None
    wish: Wish | None = None

    @property
    def empty(self) -> bool:
        return self.stage is None and self.wish is None


def limits_of(problem: PartitionProblem) -> tuple[Limit, ...]:
    """Everything that can be given up; wishes first, because the first are blamed first."""
    found = [Limit(wish.text, wish=wish) for wish in _wishes(problem)]
    if not problem.allow_empty:
        found.append(Limit(f"something on each of {len(problem.stages)} stages"))
    found += [
        Limit(f"the {format_bytes(stage.memory_bytes)} of memory of stage {s}", stage=s)
        for s, stage in enumerate(problem.stages)
        if stage.memory_bytes is not None
    ]
    return tuple(found)


def keeping(problem: PartitionProblem, limits: Collection[Limit]) -> PartitionProblem:
    """The problem under these of its limits alone."""
    stages = {limit.stage for limit in limits}
    wishes = tuple(limit.wish for limit in limits if limit.wish is not None)
    counts = [wish.max_stages for wish in wishes if wish.max_stages is not None]
    return replace(
        problem,
        stages=tuple(
            stage if s in stages else replace(stage, memory_bytes=None)
            for s, stage in enumerate(problem.stages)
        ),
        allow_empty=not any(limit.empty for limit in limits),
        pins=_entries(wish.pins for wish in wishes),
        together=_entries(wish.together for wish in wishes),
        apart=_entries(wish.apart for wish in wishes),
        forbidden=_entries(wish.forbidden for wish in wishes),
        max_stages=min(counts, default=None),
        wishes=wishes,
    )


def listed(limits: Iterable[Limit]) -> str:
    """Limits in words: neighbouring stages with the same memory together."""
    given = sorted(limits, key=lambda limit: -1 if limit.stage is None else limit.stage)
    texts = [limit.text for limit in given if limit.stage is None]
    stages = [limit for limit in given if limit.stage is not None]
    runs: list[list[Limit]] = []
    for before, limit in pairwise([None, *stages]):
        assert limit is not None
        if before is not None and (before.stage, _size(before)) == (_below(limit), _size(limit)):
            runs[-1].append(limit)
        else:
            runs.append([limit])
    for run in runs:
        if len(run) == 1:
            texts.append(run[0].text)
        else:
            texts.append(f"{_size(run[0])} of memory of each of stages {run[0].stage}–"
                         f"{run[-1].stage}")  # fmt: skip
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + f" and {texts[-1]}"


def _below(limit: Limit) -> int:
    return (limit.stage or 0) - 1


def _size(limit: Limit) -> str:
    return limit.text.rpartition(" of stage ")[0].removesuffix(" of memory")


def _wishes(problem: PartitionProblem) -> list[Wish]:
    """Wishes of a person, and every entry that no wish lists, as one of its own."""
    names = [repr(item.name) for item in problem.items]
    found = list(problem.wishes)
    known = {
        field: {entry for wish in found for entry in getattr(wish, field)}
        for field in ("pins", "together", "apart", "forbidden")
    }
    for i, s in problem.pins:
        if (i, s) not in known["pins"]:
            found.append(Wish(f"{names[i]} pinned to stage {s}", pins=((i, s),)))
    for group in problem.together:
        if group not in known["together"]:
            words = " with ".join(names[i] for i in group)
            found.append(Wish(f"{words} on one stage", together=(group,)))
    for a, b in problem.apart:
        if (a, b) not in known["apart"]:
            found.append(Wish(f"{names[a]} apart from {names[b]}", apart=((a, b),)))
    for i, s in problem.forbidden:
        if (i, s) not in known["forbidden"]:
            found.append(Wish(f"{names[i]} kept off stage {s}", forbidden=((i, s),)))
    if problem.max_stages is not None and all(wish.max_stages is None for wish in found):
        text = f"at most {problem.max_stages} stages"
        found.append(Wish(text, max_stages=problem.max_stages))
    return found


def _entries(parts: Iterable[tuple[Entry, ...]]) -> tuple[Entry, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(parts)))


MAX_IDEALS = 800
MAX_VARIABLES = 20_000  # groups x stages: larger problems are not given to CP-SAT
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
        if model.num_groups * model.num_stages > MAX_VARIABLES:
            raise OutOfTimeError
        groups = any_assignment(model, self.budget, self.seed)
        return None if groups is None else model.items_of(groups)

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
