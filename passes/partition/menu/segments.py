"""Stages between every two states: tables that are filled once and asked for every threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcompile.menu import MenuProblem
from pdcompile.passes.partition.menu.chain import Choices, Ints
from pdcompile.passes.partition.menu.model import Floats, Items, Menu
from pdcompile.passes.partition.menu.states import members


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
    """States, and for every pair of them what lies between.  `covers[j]`: largest states below."""

    def __init__(self, problem: MenuProblem, masks: Sequence[int]) -> None:
        self.problem = problem
        self.masks = list(masks)
        n = len(problem.nodes)
        self.has = np.zeros((len(masks), n))
        for i, mask in enumerate(masks):
            self.has[i, members(mask)] = 1.0
        count = [mask.bit_count() for mask in masks]
        self.inside = (self.has @ self.has.T >= np.array(count)[:, None]) & (
            np.array(count)[:, None] < np.array(count)
        )
        self.covers: list[list[int]] = []
        for j in range(len(masks)):
            below = np.flatnonzero(self.inside[:, j])
            largest = ~self.inside[np.ix_(below, below)].any(axis=1)
            self.covers.append(below[largest].tolist())

    def cuts(self, menu: Menu) -> Floats:
        """[i, j] least seconds, for the whole batch, of the edges that enter or leave j ∖ i."""
        source = self.has[:, [edge.source for edge in self.problem.edges]]
        target = self.has[:, [edge.target for edge in self.problem.edges]]
        enters = (source * menu.entering) @ target.T
        leaves = source * menu.leaving
        stays = (leaves * (1 - target)).sum(axis=1)
        moved = (enters - np.diag(enters)[:, None]) + (
            stays - (leaves.sum(axis=1)[:, None] - leaves @ target.T)
        )
        result: Floats = np.maximum(moved, 0.0) / self.problem.bytes_per_second
        return result


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
