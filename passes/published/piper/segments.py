"""Stages between every two states: tables that are filled once and asked for every threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.chain_program import Choices, Ints
from pdcompile.passes.partition.lattice import members
from pdcompile.passes.published.piper.model import Floats, Items, Menu
from pdcompile.passes.published.piper.states import neighbours
from pdcompile.passes.published.piper_model import MenuProblem


@dataclass(frozen=True, slots=True)
class Table:
    """The stages of one menu.  Stage i goes from state `before[i]` to state `after[i]`.

    It needs `seconds[j]`, j ascending from `start[i]` to `stop[i]`, for the nodes when at most
    `flights[j]` microbatches are in flight, and besides `cut[i]` and `resent[i]` for each replica
    beyond the first; all of it divided by its width.
    """

    menu: Menu
    before: Ints
    after: Ints
    cut: Floats
    resent: Floats
    start: Ints
    stop: Ints
    seconds: Floats
    flights: Floats

    def steps(self, stage: int) -> tuple[Floats, Floats]:
        """(seconds, flights) of one stage."""
        part = slice(int(self.start[stage]), int(self.stop[stage]))
        return self.seconds[part], self.flights[part]

    def choices(self, threshold: float, width: int, rows: NDArray[np.int64]) -> Choices:
        """Those of `rows` that take at most `threshold` seconds per sample on `width` replicas."""
        budget = threshold * width - self.cut[rows] - (width - 1) * self.resent[rows]
        low, high = self.start[rows], self.stop[rows]
        most = int((high - low).max(initial=0))
        for _ in range(most.bit_length()):
            middle = (low + high) >> 1
            inside = low < high
            right = inside & (self.seconds[np.where(inside, middle, 0)] <= budget)
            low = np.where(right, middle + 1, low)
            high = np.where(inside & ~right, middle, high)
        some = low > self.start[rows]
        rows, low = rows[some], low[some]
        # y = 1 + ⌈later/width⌉ ≤ flights, with `later` the replicas of all later stages.
        reach = width * (self.flights[low - 1].astype(np.int64) - 1)
        same = np.ones(len(rows), dtype=np.int64)
        return Choices(
            self.before[rows],
            self.after[rows],
            same * (width * self.menu.degree),
            same * width,
            reach,
        )


class Space:
    """States, in an order in which larger ideals come later."""

    def __init__(self, problem: MenuProblem, masks: Sequence[int]) -> None:
        self.problem = problem
        self.masks = list(masks)
        self.has = np.zeros((len(masks), len(problem.nodes)))
        for i, mask in enumerate(masks):
            self.has[i, members(mask)] = 1.0
        self._at = {mask: i for i, mask in enumerate(masks)}
        self._covers: dict[int, list[int]] = {}
        _, after = neighbours(problem)
        self._gives = [sum(1 << u for u in children) for children in after]

    def covers(self, j: int) -> list[int]:
        """The states below j with no other state between."""
        found = self._covers.get(j)
        if found is None:
            found = self._covers[j] = self._largest_below(j)
        return found

    def inside(self, i: int, j: int) -> bool:
        """Is i below j?"""
        return i != j and not self.masks[i] & ~self.masks[j]

    def _largest_below(self, j: int) -> list[int]:
        mask = self.masks[j]
        tops = [v for v in members(mask) if not self._gives[v] & mask]
        near = [self._at.get(mask & ~(1 << v), -1) for v in tops]
        if -1 not in near:
            return near  # every ideal one node smaller is a state
        found: list[int] = []
        for h in range(j - 1, -1, -1):
            if self.inside(h, j) and not any(self.inside(h, other) for other in found):
                found.append(h)
        return found


def alive(table: Table, threshold: float) -> dict[int, Ints]:
    """By width, the rows of a table that have a choice at this threshold."""
    found = {}
    for width in table.menu.widths:
        budget = threshold * width - table.cut - (width - 1) * table.resent
        if len(table.start):
            found[width] = np.flatnonzero(table.seconds[table.start] <= budget)
    return found


def in_flight(problem: MenuProblem, widths: Sequence[int]) -> list[int]:
    """Microbatches in flight of each stage of a pipeline, from its widths."""
    later = 0
    found = []
    for width in reversed(widths):
        later += width
        found.append(-(-later // width))
    return found[::-1]


def options_of(space: Space, menu: Menu, i: int, j: int) -> list[Floats]:
    """For every node of j ∖ i the (seconds, moving, first) of its variants, all edges counted."""
    found = []
    for v in members(space.masks[j] & ~space.masks[i]):
        item = menu.items[v]
        assert item is not None
        options = entered(space.problem, item, space.masks[i])
        assert options is not None
        found.append(left(space.problem, item, options, space.masks[j]))
    return found


def entered(problem: MenuProblem, item: Items | None, before: int) -> Floats | None:
    if item is None:
        return None
    seconds = item.seconds
    for u, more in item.entering:
        if before >> u & 1:
            seconds = seconds + more / problem.bytes_per_second
    return np.stack([seconds, item.moving, item.first])


def left(problem: MenuProblem, item: Items, options: Floats, after: int) -> Floats:
    for w, more in item.leaving:
        if not after >> w & 1:
            options = options + np.stack([more / problem.bytes_per_second, more * 0, more * 0])
    return options
