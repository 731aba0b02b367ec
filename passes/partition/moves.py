"""Moves of groups from a stage to the next one or the one before, which make a plan better."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdcompile.passes.partition.model import single_moves
from pdcompile.plan.evaluate import Evaluation, path_of

if TYPE_CHECKING:
    from pdcompile.passes.partition.search import Search
    from pdcompile.passes.partition.segments import Segments

QUICK, PATIENT = 300, 5_000  # tries without a better plan, after which it is enough
TRIES = 3  # of each group on each stage, at most
MOST = 32  # groups at once
RELOCATING = 0.15  # of the tries: where no boundary is worth moving, another stage may be worth it


def move_groups(search: Search, _: Segments) -> None:
    """Moves single groups across a boundary as long as that helps, then several at once, in the
    first half of the time."""
    budget = search.budget
    _move_single(search)
    _shift(search, QUICK, lambda: budget.spent > budget.left)


def shift_more(search: Search, _: Segments) -> None:
    """Tries more moves of several groups than before the bound was known."""
    _shift(search, PATIENT, lambda: search.late)


def _move_single(search: Search) -> None:
    improved, left = True, 200
    while improved and left > 0 and not search.late:
        improved = False
        barred = barred_by(search)
        model, best = search.model, search.groups
        for v, s in single_moves(model.arcs, best):
            if not model.lowest[v] <= s <= model.highest[v]:
                continue
            groups = (*best[:v], s, *best[v + 1 :])
            left -= 1
            if not barred(groups) and search.offer(groups):
                improved = True
                break
            if left <= 0 or search.late:
                return


def barred_by(search: Search) -> Callable[[tuple[int, ...]], bool]:
    """A test for assignments that one path proves to be no better than the best.

    The best one's critical path is a chain in every assignment that has its hops.  To add it up
    takes far less than to walk through a schedule of many stages and microbatches.
    """
    problem, model = search.problem, search.model
    full_duplex = all(stage.full_duplex for stage in problem.stages)
    if problem.objective != "flush" or not full_duplex:
        return lambda _: False
    path = path_of(problem, model.items_of(search.groups))
    upper = search.upper * (1 + 1e-12)  # rounding of sums must bar nothing that is better

    def barred(groups: tuple[int, ...]) -> bool:
        return path.seconds(Evaluation(problem, model.items_of(groups)).times.timing) >= upper

    return barred


def _shift(search: Search, patience: int, late: Callable[[], bool]) -> None:
    """Moves the last groups of a stage to the next one, or the first ones back, at one boundary or
    two at a time, at random, or moves a boundary far away; until that has not helped for so many
    tries, or it is late.

    A stage's groups are in topological order, so that most moves are possible.
    """
    model, chance = search.model, random.Random(search.seed)
    if search.problem.objective != "flush" or model.num_stages == 1:
        return
    barred, tries = barred_by(search), 0
    patience = min(patience, model.num_groups * model.num_stages * TRIES)
    while tries < patience and not late():
        tries += 1
        stages = list(search.groups)
        moves = chance.choice((1, 1, 2))
        if chance.random() < RELOCATING:
            stages = _relocated(stages, model.num_stages, chance)
            moves -= 1
        for _ in range(moves):
            _move_some(stages, chance.randrange(model.num_stages - 1), chance)
        if any(stages[u] > stages[v] for u, v in model.arcs):
            continue
        if not barred(tuple(stages)) and search.offer(tuple(stages)):
            barred, tries = barred_by(search), 0


def _relocated(stages: list[int], count: int, chance: random.Random) -> list[int]:
    """Two stages in a row made one, and the groups of another parted in two, if there are two."""
    merged, parted = chance.randrange(count - 1), chance.randrange(count - 1)
    fewer = [s - (s > merged) for s in stages]
    own = [v for v, s in enumerate(fewer) if s == parted]
    if len(own) < 2:
        return stages
    later = set(own[chance.randrange(1, len(own)) :])
    return [s + (s > parted or v in later) for v, s in enumerate(fewer)]


def _move_some(stages: list[int], boundary: int, chance: random.Random) -> None:
    most = int(2 ** chance.uniform(0, MOST.bit_length() - 1))
    if chance.random() < 0.5:
        for v in [v for v, s in enumerate(stages) if s == boundary][-most:]:
            stages[v] = boundary + 1
    else:
        for v in [v for v, s in enumerate(stages) if s == boundary + 1][:most]:
            stages[v] = boundary
