"""Moves of groups from a stage to the next one or the one before, which make a plan better."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pdcompile.passes.partition.improve.makespans import Makespans, Stages
from pdcompile.passes.partition.model import single_moves
from pdcompile.plan.evaluate import violations

if TYPE_CHECKING:
    from pdcompile.passes.partition.model import Model
    from pdcompile.passes.partition.search import Search
    from pdcompile.passes.partition.segments import Segments

ROUNDS = 40, 80, 160, 320  # of each cooling, where nothing is proved yet
MORE = 320, 640, 1280  # and once the bound is known
WIDTH = 32  # assignments that are tried together
TRIES = 4  # of each group on each stage in a cooling, at most
HEAT = 0.004  # of the makespan: how much worse a plan may become at first
MOST = 32  # groups at once
RELOCATING, SINGLE = 0.1, 0.4  # of the tries: a boundary far away, groups one by one


def move_groups(search: Search, _: Segments) -> None:
    """Simulated annealing (Kirkpatrick et al., Science 1983) in the first half of the time."""
    budget = search.budget
    _anneal(search, ROUNDS, lambda: budget.spent > budget.left)


def move_more(search: Search, _: Segments) -> None:
    """The same with more patience than before the bound was known."""
    _anneal(search, MORE, lambda: search.late or search.proved)


def _anneal(search: Search, coolings: tuple[int, ...], late: Callable[[], bool]) -> None:
    """Several coolings, each longer, from the best plan.

    In a round many changes of the present plan are tried together, in an order: the first one that
    is good enough is made, as if they had been tried one after the other.
    """
    model, chance = search.model, random.Random(search.seed)
    if search.problem.objective != "flush" or model.num_stages == 1:
        return
    makespans, allowed = Makespans(model), _Allowed(model)
    for n, rounds in enumerate(coolings):
        hottest = HEAT * (n % 2)  # every other one starts cold: only what is better is made
        rounds = min(rounds, 1 + TRIES * model.num_groups * model.num_stages // WIDTH)
        present, seconds = np.array(search.groups), search.upper
        for done in range(rounds):
            if late():
                return
            changed = allowed.of(_changes(model, present, chance))
            heat = hottest * search.upper * (1 - done / rounds) ** 2
            least, is_all = makespans.at_least(np.array([present, *changed]))
            for stages, its, known in zip(changed, least[1:], is_all[1:], strict=True):
                limit = seconds - heat * math.log(1 - chance.random())
                if its <= limit and not known:
                    its = makespans.exact(stages)
                if its > limit:
                    continue
                groups = tuple(stages.tolist())
                better = its < search.upper * (1 - 1e-9)
                if search.offer(groups) if better else allowed.violates_nothing(groups):
                    present, seconds = stages, its
                    break


class _Allowed:
    """Which assignments keep the order, the ranges and the other limits of a model."""

    def __init__(self, model: Model):
        self._model = model
        self._before, self._after = np.array(model.arcs, dtype=np.intp).reshape(-1, 2).T
        self._lowest, self._highest = np.array(model.lowest), np.array(model.highest)
        self._filled = not model.problem.allow_empty
        limits = model.limited, model.apart, model.forbidden, model.problem.max_stages
        self._others = any(limits)

    def of(self, stages: Stages) -> Stages:
        """Those that keep order and ranges."""
        stages = stages[((self._lowest <= stages) & (stages <= self._highest)).all(1)]
        kept = (stages[:, self._before] <= stages[:, self._after]).all(1)
        if self._filled:
            used = np.zeros((len(stages), self._model.num_stages), dtype=np.bool_)
            np.put_along_axis(used, stages, True, axis=1)
            kept &= used.all(1)
        return stages[kept]

    def violates_nothing(self, groups: tuple[int, ...]) -> bool:
        model = self._model
        return not (self._others and violations(model.problem, model.items_of(groups)))


def _changes(model: Model, present: Stages, chance: random.Random) -> Stages:
    """Changed assignments, not all of which are possible."""
    moves = [*single_moves(model.arcs, present)]
    count, found = model.num_stages, []
    for _ in range(WIDTH):
        stages = present.copy()
        some = chance.choice((1, 1, 2))
        if chance.random() < SINGLE and moves:
            for v, s in (chance.choice(moves) for _ in range(some)):
                stages[v] = s
        else:
            if chance.random() < RELOCATING:
                stages, some = _relocated(stages, count, chance), some - 1
            for _ in range(some):
                _move_some(stages, chance.randrange(count - 1), chance)
        found.append(stages)
    return np.array(found)


def _relocated(stages: Stages, count: int, chance: random.Random) -> Stages:
    """Two stages in a row made one, and the groups of another parted in two, if there are two."""
    merged, parted = chance.randrange(count - 1), chance.randrange(count - 1)
    fewer = stages - (stages > merged)
    own = np.flatnonzero(fewer == parted)
    if len(own) < 2:
        return stages
    found: Stages = fewer + (fewer > parted)
    found[own[chance.randrange(1, len(own)) :]] += 1
    return found


def _move_some(stages: Stages, boundary: int, chance: random.Random) -> None:
    """The last groups of a stage, which are in topological order, go to the next one, or the first
    ones of that back."""
    most = int(2 ** chance.uniform(0, MOST.bit_length() - 1))
    if chance.random() < 0.5:
        stages[np.flatnonzero(stages == boundary)[-most:]] = boundary + 1
    else:
        stages[np.flatnonzero(stages == boundary + 1)[:most]] = boundary
