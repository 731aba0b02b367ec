"""Chains of stages by probing: which part of the work can the last u ranks do within T seconds?

What the last u ranks begin with, at the earliest, follows from what fewer of them begin with, one
stage and its replicas at a time: a stage that ends earlier and begins where it did takes less time
and less memory.  So a probe is a short dynamic program over ranks, and the least T is found by
bisection (chains on chains: Iqbal, 1991; Pinar and Aykanat, 2004).  What the chain takes besides
(transfers, microbatches that do not divide) the evaluator says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pdcompile.passes.partition.space.reach import Reach
from pdcompile.problem.deployment import StageDeployment

Late = Callable[[], bool]
Piece = tuple[float, StageDeployment]  # the work that lies before a stage, and its row of the menu
CLOSE = 1e-3  # relative: where a bisection ends
NOTHING = 1e-12  # of all work
MOST_DOUBLED = 40  # times, from all work on all devices, until some seconds are enough


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
        self.ranks = self.reach.ranks
        #: by stages left (0 where any number will do): where the last u ranks begin, and with what
        self._begins: list[dict[int, float]] = []
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

    def some(self, lower: float, upper: float, late: Late) -> bool:
        """True if there is a chain below `upper`; the last probe has the one of least seconds."""
        if upper == math.inf:
            upper, doubled = 2 * lower, 0
            while not self.possible(upper):
                upper, doubled = 2 * upper, doubled + 1
                if doubled > MOST_DOUBLED or late():
                    return False
        _, upper = self.least(lower, upper, late)
        return upper < math.inf and self.possible(upper)

    def possible(self, seconds: float) -> bool:
        """True if there is a chain for which these seconds may be enough."""
        self._ways = [{} for _ in range((self.stages or 0) + 1)]
        self._begins = [{0: self.reach.line.whole}, *({} for _ in range(self.stages or 0))]
        for left in range(1 if self.stages else 0, (self.stages or 0) + 1):
            for u in range(1, self.ranks + 1):
                self._extend(left, u, seconds)
        return any(begin <= self._none for begin in self._begins[-1].values())

    def chain(self) -> list[Piece]:
        """The stages of the last probe, which was possible, on the last ranks."""
        left, pieces = self.stages or 0, []
        u = max(u for u, begin in self._begins[left].items() if begin <= self._none)
        while u:
            option = self._ways[left][u]
            pieces.append((self._begins[left][u], option))
            u, left = u - option.replicas, max(left - 1, 0)
        return pieces

    @property
    def _none(self) -> float:
        return NOTHING * self.reach.line.whole

    def _extend(self, left: int, u: int, seconds: float) -> None:
        """Note where the last u ranks begin."""
        behind, begins = self._begins[max(left - 1, 0)], self._begins[left]
        for option in self._options(left):
            end = behind.get(u - option.replicas, np.inf)
            if end == np.inf or (self.stages and u == option.replicas and left > 1):
                continue
            before = self.stages - left if self.stages else 0
            begin = self.reach.begin(end, option, u, seconds, before)
            if begin < begins.get(u, np.inf):
                self._ways[left][u], begins[u] = option, begin

    def _options(self, left: int) -> Iterator[StageDeployment]:
        """The rows of the menu for the first of so many stages."""
        for option in self.reach.menu:
            if self.widths and self.widths[-left] != option.replicas:
                continue
            if not self.recomputed or self.recomputed[-left] == option.recompute:
                yield option
