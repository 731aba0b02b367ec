"""Chains of ideals with replicas, the cheapest bound first.

D[u][I]: the least that the stages of the last u ranks cost, at their worst, when they hold all
but the ideal I: min over r and J ⊃ I of max(cost(I, J, r), D[u − r][J]).  With as many stages
as are asked for, one table for each number of stages left.  PipeDream's dynamic program
(Narayanan et al., 2019, section 3.1, one level) over all ideals instead of a linear order; the
menu of replica counts as in Piper (Tarnawski et al., 2021).

Complete chains are then enumerated best first (A*, D being the exact rest), those of equal bound
by the sum of the squares of their loads, which prefers balanced ones and those that do not
recompute.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from pdcompile.passes.partition.segments import Matrix
from pdcompile.passes.partition.space.matrices import Bool, Matrices
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.problem.deployment import StageDeployment

MAX_KEPT = 20_000_000  # cells of costs
Key = tuple[int, int]  # stages left (0 where any number will do), ranks left


class Piece(NamedTuple):
    """One stage of a chain: the ideals around it, and its row of the menu."""

    begin: int
    end: int
    option: StageDeployment


@dataclass
class Chains:
    """All ways to cut into stages on exactly these seats.

    `menu`: what a stage may be; `widths`: the replicas of each, where they are given; `stages`: how
    many there are, None for any number;
    `numbered`: the model's pins are to these stages.  `heuristic`: order by load per microbatch
    instead of by the bound.  `recomputed`: which of the stages do, where that is given.
    """

    matrices: Matrices
    seats: Seats
    menu: tuple[StageDeployment, ...]
    stages: int | None = None
    numbered: bool = False
    heuristic: bool = False
    recomputed: tuple[bool, ...] = ()
    widths: tuple[int, ...] = ()
    rest: dict[Key, Matrix] = field(default_factory=dict)
    squares: dict[Key, Matrix] = field(default_factory=dict)
    _allowed: dict[int, Bool] = field(default_factory=dict)
    _known: dict[tuple[int, StageDeployment], tuple[Matrix, Matrix]] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return len(self.seats.ranks)

    def solve(self) -> float:
        """The least bound of all chains; infinite when there is none."""
        full = np.full(self.matrices.size, np.inf)
        full[-1] = 0.0
        self.rest[0, 0] = self.squares[0, 0] = full
        for left in range(1, (self.stages or 1) + 1):
            for u in range(1, self.num_ranks + 1):
                self._extend(left if self.stages else 0, u)
        found = self.rest.get(self._start)
        return np.inf if found is None else float(found[0])

    def _extend(self, left: int, u: int) -> None:
        known = (left, u)
        for option in self._options(left):
            behind = (max(left - 1, 0), u - option.replicas)
            if behind not in self.rest:
                continue
            cost, load = self._all_costs(left, u, option)
            rest = np.maximum(cost, self.rest[behind][None, :]).min(1)
            squares = (load**2 + self.squares[behind][None, :]).min(1)
            self.rest[known] = np.minimum(self.rest.get(known, np.inf), rest)
            self.squares[known] = np.minimum(self.squares.get(known, np.inf), squares)

    def _all_costs(self, left: int, u: int, option: StageDeployment) -> tuple[Matrix, Matrix]:
        """Costs between all ideals, kept for other numbers of stages left where that is little."""
        if (known := self._known.get((u, option))) is not None:
            return known
        found = self._costs(left, u, option, slice(None))
        cells = self.num_ranks * len(self.menu) * self.matrices.size**2
        if self.stages and not self.numbered and cells <= MAX_KEPT:
            self._known[u, option] = found
        return found

    def _options(self, left: int) -> Iterator[StageDeployment]:
        """The rows of the menu for the first of so many stages."""
        for option in self.menu:
            if self.widths and self.widths[-left] != option.replicas:
                continue
            if not self.recomputed or self.recomputed[-left] == option.recompute:
                yield option

    def _pinned(self, stage: int) -> Bool:
        if stage not in self._allowed:
            self._allowed[stage] = self.matrices.segments.allowed(stage)
        return self._allowed[stage]

    @property
    def _start(self) -> Key:
        return (self.stages or 0, self.num_ranks)

    def _costs(
        self, left: int, u: int, option: StageDeployment, rows: slice
    ) -> tuple[Matrix, Matrix]:
        position = self.num_ranks - u
        load = self.matrices.load(self.seats, position, option, rows)
        if self.numbered:
            load = np.where(self._pinned((self.stages or 0) - left)[rows], load, np.inf)
        if self.heuristic:
            return load, load
        return self.matrices.bound(self.seats, position, option, rows, load), load

    def enumerate(self, below: Callable[[], float]) -> Iterator[tuple[float, tuple[Piece, ...]]]:
        """(bound, chain) by rising bound, while that is less than `below()`; after `solve`."""
        if self._start not in self.rest:
            return
        ticket = count()
        rest, squares = float(self.rest[self._start][0]), float(self.squares[self._start][0])
        heap = [_Open(rest, squares, next(ticket), 0.0, 0.0, self._start, ())]
        while heap:
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
        left, u = one.left
        begin = one.pieces[-1].end if one.pieces else 0
        for option in self._options(left):
            behind = (max(left - 1, 0), u - option.replicas)
            if behind not in self.rest:
                continue
            row = slice(begin, begin + 1)
            cost, load = (table[0] for table in self._costs(left, u, option, row))
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
