"""Chains of ideals: all ways to cut a model into stages on some ranks, by dynamic programming.

D[u][I]: the least that the stages of the last u ranks cost, at their worst, when they hold all
but the ideal I: min over r and J ⊃ I of max(cost(I, J, r), D[u − r][J]).  With as many stages
as are asked for, one table for each number of stages left.  Over all ideals of the graph this is
the optimum for every objective that is a maximum of per-stage costs; over some of them (prefixes
of linear orders) it is an upper bound.  PipeDream (Narayanan et al., 2019) does it for linear
orders, Tarnawski et al. (2020) over ideals; the menu of replica counts is as in Piper (Tarnawski
et al., 2021).

Complete chains are then enumerated best first (A*, D being the exact rest), those of equal bound
by the sum of the squares of their loads, which prefers balanced ones and those that do not
recompute.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.budget import Budget, OutOfTimeError
from pdcompile.passes.partition.segments import ALL, Matrix, Segments
from pdcompile.problem.deployment import StageDeployment

Key = tuple[int, int]  # stages left (0 where any number will do), ranks left
#: of a stage, from stages and ranks left, its row of the menu and the ideals before it: what it
#: costs at least and its load, both as [I, J]
Costs = Callable[[int, int, StageDeployment, slice], tuple[Matrix, Matrix]]
#: of the same stage, with its load and the joined loads of those behind it: theirs with its own
Joined = Callable[[Key, StageDeployment, Matrix, Matrix], Matrix]
Cost = Callable[[int], Matrix]  # stage → [I, J] seconds
ONE = StageDeployment()


class Piece(NamedTuple):
    """One stage of a chain: the ideals around it, and its row of the menu."""

    begin: int
    end: int
    option: StageDeployment


def _squared(_: Key, __: StageDeployment, load: Matrix, behind: Matrix) -> Matrix:
    found: Matrix = load**2 + behind
    return found


@dataclass
class Chains:
    """All ways to cut into stages on exactly so many ranks, between `size` ideals.

    `menu`: what a stage may be; `stages`: how many there are, None for any number; `widths`: the
    replicas of each, where they are given; `recomputed`: which of the stages do, where that is
    given.
    """

    size: int
    ranks: int
    menu: tuple[StageDeployment, ...]
    costs: Costs
    stages: int | None = None
    recomputed: tuple[bool, ...] = ()
    widths: tuple[int, ...] = ()
    budget: Budget | None = None
    rest: dict[Key, Matrix] = field(default_factory=dict)
    squares: dict[Key, Matrix] = field(default_factory=dict)
    joined: Joined = _squared
    #: of every ideal the row of the menu and the end of the first stage of the best chain
    choices: dict[Key, tuple[NDArray[np.intp], NDArray[np.intp]]] = field(default_factory=dict)

    def solve(self, most: float = np.inf) -> float:
        """The least bound of all chains; infinite when there is none.

        `most`, after `solve()`: no stage costs more, and of the best chain the squares are least.

        Raises:
            OutOfTimeError: the budget ended first.
        """
        full = np.full(self.size, np.inf)
        full[-1] = 0.0
        self.squares, self.choices = {(0, 0): full}, {}
        if most == np.inf:
            self.rest = dict(self.squares)
        for left in range(1, self.stages + 1) if self.stages else (0,):
            for u in range(1, self.ranks + 1):
                if self.budget is not None and self.budget.late:
                    raise OutOfTimeError
                self._extend((left, u), most)
        return float(self.rest.get(self._start, np.full(1, np.inf))[0])

    def _extend(self, key: Key, most: float) -> None:
        every, scores = np.arange(self.size), np.full(self.size, np.inf)
        for option, behind in self._options(key):
            cost, load = self.costs(*key, option, ALL)
            if most < np.inf:
                load = np.where(cost <= most, load, np.inf)
            table = squares = self.joined(key, option, load, self.squares[behind][None, :])
            if most == np.inf:
                table = np.maximum(cost, self.rest[behind][None, :])
                self.rest[key] = np.minimum(self.rest.get(key, np.inf), table.min(1))
            self.squares[key] = np.minimum(self.squares.get(key, np.inf), squares.min(1))
            ends = table.argmin(1)
            better = table[every, ends] < scores
            scores = np.where(better, table[every, ends], scores)
            rows, known = self.choices.get(key, (every * 0, every * 0))
            row = self.menu.index(option)
            self.choices[key] = np.where(better, row, rows), np.where(better, ends, known)

    @property
    def met(self) -> bool:
        """True if a chain is among what was looked for."""
        return self._start in self.squares and float(self.squares[self._start][0]) < np.inf

    def best(self) -> tuple[Piece, ...]:
        """A chain of the least bound; after `solve`, which found one."""
        pieces, key, begin = list[Piece](), self._start, 0
        while key[1]:
            rows, ends = self.choices[key]
            option, end = self.menu[rows[begin]], int(ends[begin])
            pieces.append(Piece(begin, end, option))
            key, begin = self._behind(key, option), end
        return tuple(pieces)

    def _options(self, key: Key) -> Iterator[tuple[StageDeployment, Key]]:
        """Rows of the menu for the first of so many stages, and what is left behind each."""
        left = key[0]
        for option in self.menu:
            if self.widths and self.widths[-left] != option.replicas:
                continue
            if self.recomputed and self.recomputed[-left] != option.recompute:
                continue
            if (behind := self._behind(key, option)) in self.rest:
                yield option, behind

    def _behind(self, key: Key, option: StageDeployment) -> Key:
        left, u = key
        return left - bool(self.stages), u - option.replicas

    @property
    def _start(self) -> Key:
        return (self.stages or 0, self.ranks)

    def enumerate(
        self, below: Callable[[], float], most: int | None = None
    ) -> Iterator[tuple[float, tuple[Piece, ...]]]:
        """(bound, chain) by rising bound, while that is less than `below()`; after `solve`.

        `most`: begun chains that are looked at before `best` is the last one.
        """
        if self._start not in self.rest:
            return
        ticket = count()
        rest, squares = float(self.rest[self._start][0]), float(self.squares[self._start][0])
        heap = [_Open(rest, squares, next(ticket), 0.0, 0.0, self._start, ())]
        while heap:
            if most is not None and (most := most - 1) < 0:
                yield rest, self.best()
                return
            one = heapq.heappop(heap)
            if not one.bound < below():
                return
            if one.left[1] == 0:
                yield one.bound, one.pieces
                continue
            for following in self._longer(one, below(), ticket):
                heapq.heappush(heap, following)

    def _longer(self, one: _Open, below: float, ticket: Iterator[int]) -> Iterator[_Open]:
        """The chain with one stage more, in every way that may cost less than `below`."""
        begin = one.pieces[-1].end if one.pieces else 0
        for option, behind in self._options(one.left):
            row = slice(begin, begin + 1)
            cost, load = (table[0] for table in self.costs(*one.left, option, row))
            bound = np.maximum(np.maximum(cost, self.rest[behind]), one.worst)
            for end in map(int, np.flatnonzero(bound < below)):
                squares = one.squares + float(load[end]) ** 2
                yield _Open(
                    float(bound[end]),
                    squares + float(self.squares[behind][end]),
                    next(ticket),
                    max(one.worst, float(cost[end])),
                    squares,
                    behind,
                    (*one.pieces, Piece(begin, end, option)),
                )


class _Open(NamedTuple):
    """A chain of the first stages, with what all of it will cost at least."""

    bound: float
    all_squares: float
    ticket: int
    worst: float
    squares: float
    left: Key
    pieces: tuple[Piece, ...]


def straight_chains(
    segments: Segments,
    cost: Cost,
    stages: int | None = None,
    budget: Budget | None = None,
    *,
    keep: bool = False,
) -> Chains:
    """Chains of stages that have a rank and these costs each, in their order.

    Args:
        stages: how many, where the model does not say; any may be used.
        keep: all tables, which are to be read row by row.
    """
    model = segments.model
    num_stages = stages or model.num_stages
    known = num_stages == model.num_stages

    @lru_cache(maxsize=None if keep else 1)
    def table(stage: int) -> Matrix:
        allowed = segments.allowed(stage) if known else segments.nested
        return np.where(allowed, cost(stage), np.inf)

    def costs(_: int, u: int, __: StageDeployment, rows: slice) -> tuple[Matrix, Matrix]:
        found = table(num_stages - u)[rows]
        return found, found

    return Chains(len(segments.ideals), num_stages, (ONE,), costs, budget=budget)


def groups_of(segments: Segments, chain: Sequence[Piece]) -> tuple[int, ...]:
    """The stage of every group in a chain of such stages."""
    return tuple((~segments.inside[[piece.end for piece in chain]]).sum(0).tolist())


def solve(
    segments: Segments, cost: Cost, budget: Budget | None = None
) -> tuple[float, tuple[int, ...]] | None:
    """(optimum, stage of each group) for min max over stages of cost; None when infeasible.

    Raises:
        OutOfTimeError: the budget ended first.
    """
    chains = straight_chains(segments, cost, budget=budget)
    value = chains.solve()
    return None if value == np.inf else (value, groups_of(segments, chains.best()))


def evenest(segments: Segments, loads: Sequence[Matrix]) -> tuple[int, ...] | None:
    """The same for loads of so many stages; of cuts whose largest load is least the one in which
    the squares of all are."""
    chains = straight_chains(segments, loads.__getitem__, len(loads))
    value = chains.solve()
    if value == np.inf:
        return None
    chains.solve(value * (1 + 1e-12))
    return groups_of(segments, chains.best())
