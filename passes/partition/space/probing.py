"""Chains of stages by probing: which part of the work can the last u ranks do within T seconds?

What the last u ranks begin with, at the earliest, follows from what fewer of them begin with, one
stage and its replicas at a time: a stage that ends earlier and begins where it did takes less time
and less memory.  So a probe is a short dynamic program over ranks, and the least T is found by
bisection (chains on chains: Iqbal, 1991; Pinar and Aykanat, 2004).

- On the line of a linear order a probe gives a pipeline: what it takes besides (transfers,
  microbatches that do not divide) the evaluator says.
- On the line of a path it gives a bound.  Every stage that holds a group of a path of values with
  gradients waits along it for all of every earlier one, there and back, so with F + W of the
  earlier ones and k = ⌈m/r⌉ microbatches a replica, T is at least Σ (F + W) + k (F + W), and
  k (F + W) + reduction; without a flush it is (F + W) / r, and the reduction.  A stage without
  the path keeps at most what lies beside one cut of it, and idle ranks keep nothing: for every
  number of ranks that are lost in this way the others do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pdcompile.passes.partition.path.beside import Array
from pdcompile.passes.partition.space.reach import Probe, Reach
from pdcompile.problem.deployment import StageDeployment

Late = Callable[[], bool]
Piece = tuple[float, StageDeployment]  # the work that lies before a stage, and its row of the menu
CLOSE = 1e-3  # relative: where a bisection ends
NOTHING = 1e-12  # of all work


@dataclass
class Probing:
    """All ways to cut a line into stages on some seats.

    Args:
        reach: of one stage.
        stages: how many there are; None: any number.
        widths, recomputed: the row of each stage, where that is given.
    """

    reach: Reach
    stages: int | None = None
    widths: tuple[int, ...] = ()
    recomputed: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        self.exact, self.ranks = self.reach.line.exact, self.reach.ranks
        #: by stages left (0 where any number will do): where the last u ranks begin, and with what
        self._begins: list[dict[int, Array]] = []
        self._ways: list[dict[int, StageDeployment]] = []

    def least(self, lower: float, upper: float, late: Late) -> tuple[float, float]:
        """(seconds below which nothing is possible, seconds for which something may be).

        Both from `lower` to `upper`, and as close as the time allows; the second one is infinite
        where nothing is possible.
        """
        if not self.possible(upper):
            return upper, np.inf
        while upper - lower > CLOSE * upper and not late():
            middle = (lower + upper) / 2
            if self.possible(middle):
                upper = middle
            else:
                lower = middle
        return lower, upper

    def possible(self, seconds: float) -> bool:
        """Whether nothing shows that these seconds are not enough."""
        if self._probe(seconds, np.zeros(1)):
            return True
        most = 0 if self.exact else self.reach.most_lost(seconds)
        return most > 0 and self._probe(seconds, np.arange(1.0, min(most, self.ranks - 1) + 1))

    def chain(self) -> list[Piece]:
        """The stages of the last probe, which was possible, on the last ranks."""
        left, pieces = self.stages or 0, []
        u = max(u for u, begin in self._begins[left].items() if begin[0] <= self._none)
        while u:
            option = self._ways[left][u]
            pieces.append((float(self._begins[left][u][0]), option))
            u, left = u - option.replicas, max(left - 1, 0)
        return pieces

    @property
    def _none(self) -> float:
        return NOTHING * self.reach.line.whole

    def _probe(self, seconds: float, lost: Array) -> bool:
        beside = lost * self.reach.line.beside
        full = self.reach.line.whole - beside
        probe = Probe(seconds, full, beside, bool(lost.any()))
        self._ways = [{} for _ in range((self.stages or 0) + 1)]
        self._begins = [{0: full}, *({} for _ in range(self.stages or 0))]
        for left in range(1 if self.stages else 0, (self.stages or 0) + 1):
            for u in range(1, self.ranks + 1):
                self._extend(left, u, probe)
        if self.exact:
            return any(begin[0] <= self._none for begin in self._begins[-1].values())
        rest = self.ranks - lost.astype(np.intp)
        return any(
            u in begins and begins[u][j] <= self._none
            for begins in self._begins
            for j, u in enumerate(rest)
        )

    def _extend(self, left: int, u: int, probe: Probe) -> None:
        """Where the last u ranks begin."""
        behind, begins = self._begins[max(left - 1, 0)], self._begins[left]
        for option in self._options(left):
            ends = behind.get(u - option.replicas)
            if ends is None or (self.stages and u == option.replicas and left > 1):
                continue
            begin, known = self.reach.begin(ends, option, u, probe), begins.get(u)
            if known is None or bool((begin < known).any()):
                self._ways[left][u] = option
                begins[u] = begin if known is None else np.minimum(known, begin)

    def _options(self, left: int) -> Iterator[StageDeployment]:
        """The rows of the menu for the first of so many stages."""
        for option in self.reach.menu:
            if not self.exact:  # it may be any of those that hold some of the path
                yield option
            elif self.widths and self.widths[-left] != option.replicas:
                continue
            elif not self.recomputed or self.recomputed[-left] == option.recompute:
                yield option
