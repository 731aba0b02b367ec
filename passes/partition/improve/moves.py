"""Moves of groups from a stage to the next one or the one before, which make a plan better.

Constraints are kept all the time, but limits of memory may be exceeded on the way to a plan that
keeps them: what is lacking is priced.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.improve.makespans import Makespans, Seconds, Stages
from pdcompile.passes.partition.improve.needs import Needs
from pdcompile.passes.partition.model import single_moves

if TYPE_CHECKING:
    from pdcompile.passes.partition.model import Model
    from pdcompile.passes.partition.search import Search
    from pdcompile.passes.partition.segments import Segments

FIRST = 1_280, 7_680, 2_560, 15_360  # tries of each cooling, where nothing is proved yet
MORE = 2_560, 20_480, 5_120, 40_960  # and once the bound is known
TRIES = 6  # of each group on each stage in a cooling, at most
FEWEST, WIDEST = 16, 128  # tried together: more where it is long since one was good enough
HEAT = 0.004  # of the makespan: how much worse a plan may become at first
FEW = 8  # of these, whose makespans are found exactly together
MOST = 32  # groups at once
LACKING = 10.0  # makespans, for as much memory as a whole stage has
SEVERAL = 0.2  # of the tries: over more boundaries than one
SINGLE = 0.4  # of the tries: groups one by one
RELOCATING, TAKING = 0.2, 0.4  # of the others: a boundary far away, a group with what it needs


def move_groups(search: Search, _: Segments) -> None:
    """Simulated annealing (Kirkpatrick et al., Science 1983) in the first half of the time."""
    budget = search.budget
    _anneal(search, FIRST, lambda: budget.spent > budget.left)


def move_more(search: Search, _: Segments) -> None:
    """The same with more patience than before the bound was known."""
    _anneal(search, MORE, lambda: search.late or search.proved)


def _anneal(search: Search, coolings: tuple[int, ...], late: Callable[[], bool]) -> None:
    """Several coolings from the best plan.

    Many changes of the present plan are tried together, in an order: the first one that
    is good enough is made, as if they had been tried one after the other.
    """
    model, chance = search.model, random.Random(search.seed)
    if search.problem.objective != "flush" or model.num_stages == 1:
        return
    allowed, priced, changes = _Allowed(model), _Priced(model), _Changes(model, chance)
    for n, most in enumerate(coolings):
        hottest = HEAT * (n % 2)  # every other one starts cold: only what is better is made
        present, seconds, width, tried = np.array(search.groups), search.upper, FEWEST, 0
        most = min(most, TRIES * model.num_groups * model.num_stages)
        while tried < most:
            if late():
                return
            changed = allowed.of(changes.of(present, width))
            heat = hottest * search.upper * (1 - tried / most) ** 2
            limits = [seconds - heat * math.log(1 - chance.random()) for _ in changed]
            found, tried = priced.first(changed, np.array(limits)), tried + width
            if found is None:
                width = min(2 * width, WIDEST)
                continue
            width = max(width // 2, FEWEST)
            stages, its, lacking = found
            if lacking or its >= search.upper * (1 - 1e-9) or search.offer(tuple(stages.tolist())):
                present, seconds = stages, its


class _Priced:
    """Makespans of assignments, raised where memory lacks."""

    def __init__(self, model: Model):
        self._makespans, self._needs = Makespans(model), Needs(model)

    def first(self, stages: Stages, limits: Seconds) -> tuple[Stages, float, bool] | None:
        """The first assignment that is within its limit, its seconds, and whether memory lacks."""
        good = np.flatnonzero(self._makespans.at_least(stages) <= limits)
        for few in np.split(good, range(FEW, len(good), FEW)):
            lacking = self._needs.excess(stages[few])
            seconds = self._makespans.exact(stages[few]) * (1 + LACKING * lacking)
            within = np.flatnonzero(seconds <= limits[few])
            if within.size:
                i = within[0]
                return stages[few[i]], float(seconds[i]), bool(lacking[i])
        return None


class _Allowed:
    """Which assignments keep the constraints of a model."""

    def __init__(self, model: Model):
        self._model = model
        self._before, self._after = np.array(model.arcs, dtype=np.intp).reshape(-1, 2).T
        self._lowest, self._highest = np.array(model.lowest), np.array(model.highest)
        self._empty = model.problem.allow_empty
        self._forbidden = np.array(model.forbidden, dtype=np.intp).reshape(-1, 2).T
        self._apart = np.array(model.apart, dtype=np.intp).reshape(-1, 2).T

    def of(self, stages: Stages) -> Stages:
        """Those that keep everything but limits of memory."""
        stages = stages[((self._lowest <= stages) & (stages <= self._highest)).all(1)]
        kept = (stages[:, self._before] <= stages[:, self._after]).all(1)
        kept &= (stages[:, self._forbidden[0]] != self._forbidden[1]).all(1)
        kept &= (stages[:, self._apart[0]] != stages[:, self._apart[1]]).all(1)
        used = np.zeros((len(stages), self._model.num_stages), dtype=np.bool_)
        np.put_along_axis(used, stages, True, axis=1)
        kept &= used.sum(1) <= self._model.most_used if self._empty else used.all(1)
        found: Stages = stages[kept]
        return found


class _Changes:
    """Changed assignments, not all of which are possible."""

    def __init__(self, model: Model, chance: random.Random):
        self._arcs, self._chance, self._last = model.arcs, chance, model.num_stages - 1
        self._neighbours = lattice.neighbours(model.num_groups, model.arcs)

    def of(self, present: Stages, count: int) -> Stages:
        moves = [*single_moves(self._arcs, present)]
        return np.array([self._changed(present.copy(), moves) for _ in range(count)])

    def _changed(self, stages: Stages, moves: list[tuple[int, int]]) -> Stages:
        chance, some = self._chance, self._chance.choice((1, 1, 2))
        if moves and chance.random() < SINGLE:
            for v, s in (chance.choice(moves) for _ in range(some)):
                stages[v] = s
            return stages
        if (kind := chance.random()) < RELOCATING:
            stages, some = self._relocated(stages), some - 1
        elif kind < RELOCATING + TAKING:
            some -= 1
            self._take_along(stages)
        for _ in range(some):
            self._move_some(stages)
        return stages

    def _take_along(self, stages: Stages) -> None:
        """A group goes to the next stage, or back, with those that it holds back there."""
        chance = self._chance
        v, way = chance.randrange(len(stages)), chance.choice((-1, 1))
        to = int(stages[v]) + way
        found, waiting = {v}, [v] if 0 <= to <= self._last else []
        while waiting and len(found) <= MOST:
            for u in self._neighbours[way > 0][waiting.pop()]:
                if u not in found and way * (to - stages[u]) > 0:
                    found.add(u)
                    waiting.append(u)
        if 0 <= to <= self._last and len(found) <= MOST:
            stages[list(found)] = to

    def _move_some(self, stages: Stages) -> None:
        """The last groups of a stage, which are in topological order, go to the next one, or the
        first ones of that back; sometimes as many over each of several boundaries in a row."""
        chance, first = self._chance, self._chance.randrange(self._last)
        last = chance.randrange(first, self._last) if chance.random() < SEVERAL else first
        most = int(2 ** chance.uniform(0, MOST.bit_length() - 1))
        if chance.random() < 0.5:
            for s in range(last, first - 1, -1):
                stages[np.flatnonzero(stages == s)[-most:]] = s + 1
        else:
            for s in range(first, last + 1):
                stages[np.flatnonzero(stages == s + 1)[:most]] = s

    def _relocated(self, stages: Stages) -> Stages:
        """Two stages in a row made one, and the groups of another parted in two, if there are
        two."""
        chance = self._chance
        merged, parted = chance.randrange(self._last), chance.randrange(self._last)
        fewer = stages - (stages > merged)
        own = np.flatnonzero(fewer == parted)
        if len(own) < 2:
            return stages
        found: Stages = fewer + (fewer > parted)
        found[own[chance.randrange(1, len(own)) :]] += 1
        return found
