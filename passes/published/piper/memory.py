"""Does any plan fit into memory, and if none does, how much would be enough?

Time plays no part, so that the least bytes of a stage are sums over its nodes: for every number
y of microbatches in flight, the least over the variants of first + moving·(y − 1).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.chain_program import Choices, cheapest_chain
from pdcompile.passes.published.piper.model import Floats, Menu
from pdcompile.passes.published.piper.pairs import Pairs
from pdcompile.passes.published.piper.segments import Space, in_flight

MOST_FLIGHTS = 256  # all numbers up to it; beyond it a grid


class Least:
    """Least bytes of the stages of a space, for any number of microbatches in flight."""

    def __init__(self, space: Space, stages: list[Pairs]) -> None:
        self.space = space
        self.menus = [pairs.menu for pairs in stages]
        most = space.problem.devices
        grid = list(range(1, min(most, MOST_FLIGHTS) + 1))
        while grid[-1] < most:
            grid.append(min(most, grid[-1] + grid[-1] // 16))
        self.grid = np.array(grid, dtype=np.int64)
        self.stages: list[tuple[Menu, Floats, NDArray[np.int64]]] = []
        for k, pairs in enumerate(stages):
            menu = pairs.menu
            # Menus of one degree have the same bytes: keep the widths together.
            if k and self.menus[k - 1].degree == menu.degree:
                continue
            held = np.zeros((len(grid), len(menu.items)))
            for v, item in enumerate(menu.items):
                if item is not None:
                    held[:, v] = (item.first + item.moving * (self.grid[:, None] - 1)).min(axis=1)
            rows = np.stack([pairs.before, pairs.after])
            self.stages.append((menu, space.has @ held.T, rows))

    def chain(self, limit: float) -> tuple[list[tuple[int, int, Menu, int]], float] | None:
        """Stages (state, state, menu, width) that fit into `limit`, and the most bytes of one.

        Exact while no stage needs more than `MOST_FLIGHTS` in flight, else too hopeful.
        """
        parts: list[Choices] = []
        origin: list[Menu] = []
        for menu, along, rows in self.stages:
            flights = self._flights(along, rows, limit)
            some = np.flatnonzero(flights >= 1)
            for width in self._widths(menu.degree):
                same = np.ones(len(some), dtype=np.int64)
                parts.append(
                    Choices(
                        rows[0][some],
                        rows[1][some],
                        same * (width * menu.degree),
                        same * width,
                        width * (flights[some] - 1),
                    )
                )
                origin.append(menu)
        columns = [
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("before", "after", "devices", "replicas", "reach")
        ]
        choices = Choices(*columns)
        chain = cheapest_chain(choices, len(self.space.masks), self.space.problem.devices)
        if chain is None:
            return None
        ends = np.cumsum([len(part) for part in parts])
        stages = []
        for row in chain:
            menu = origin[int(np.searchsorted(ends, row, side="right"))]
            width = int(choices.replicas[row])
            stages.append((int(choices.before[row]), int(choices.after[row]), menu, width))
        flights_of = in_flight(self.space.problem, [width for *_, width in stages])
        held = [
            self.bytes(i, j, menu, y) for (i, j, menu, _), y in zip(stages, flights_of, strict=True)
        ]
        return stages, max(held)

    def bytes(self, i: int, j: int, menu: Menu, flights: int) -> float:
        """Least bytes of the stage between states i and j."""
        mask = self.space.masks[j] & ~self.space.masks[i]
        return math.fsum(
            float((item.first + item.moving * (flights - 1)).min())
            for v, item in enumerate(menu.items)
            if mask >> v & 1 and item is not None
        )

    def enough(self, fits: float) -> float:
        """The least limit, to a millionth, with which there is a plan; `fits` is enough."""
        low, high = 0.0, fits
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            found = self.chain(middle)
            if found is None:
                low = middle
            else:
                high = max(min(found[1], middle), low)
        return high

    def _flights(self, along: Floats, rows: NDArray[np.int64], limit: float) -> NDArray[np.int64]:
        low = np.zeros(rows.shape[1], dtype=np.int64)
        high = np.full(rows.shape[1], len(self.grid), dtype=np.int64)
        for _ in range(len(self.grid).bit_length()):
            middle = (low + high) >> 1
            inside = low < high
            at = np.where(inside, middle, 0)
            fits = inside & (along[rows[1], at] - along[rows[0], at] <= limit)
            low = np.where(fits, middle + 1, low)
            high = np.where(inside & ~fits, middle, high)
        # Up to just before the next number of the grid it may fit too.
        beyond = np.r_[0, self.grid[1:] - 1, self.grid[-1]]
        result: NDArray[np.int64] = beyond[low]
        return result

    def _widths(self, degree: int) -> list[int]:
        return sorted({d for menu in self.menus if menu.degree == degree for d in menu.widths})
