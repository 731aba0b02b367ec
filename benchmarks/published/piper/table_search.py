"""The best plan whose stages are in given tables, and the least memory that has a plan at all.

For memory alone time plays no part, so that the least bytes of a stage are sums over its nodes: for
every number y of microbatches in flight, the least over the variants of first + moving·(y − 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.chain_program import (
    Choices,
    Ints,
    cheapest_among,
    fewest_after,
    fewest_before,
    smallest_threshold,
)
from benchmarks.published.piper.menus import Floats, Menu, pick
from benchmarks.published.piper.stage_tables import StatePairs, Table, alive, bisected
from benchmarks.published.piper.states import Space, in_flight, options_of
from benchmarks.published.piper_model import evaluate
from benchmarks.published.solution import Progress, StageSolution
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.lattice import members

EXACT = 1e-9  # relative: no plan is better than the one found by more than this
PAIRS = 20_000  # of (seconds, bytes), when the variants of a plan's stage are picked


@dataclass(slots=True)
class PiperPlan:
    """The best plan so far and what is known of all plans."""

    objective: float
    stages: tuple[StageSolution, ...]
    masks: tuple[int, ...]  # states between the stages


class TableSearch:
    """Plans through the states of one space, whose tables are given."""

    def __init__(self, space: Space, tables: Sequence[Table], budget: Budget) -> None:
        self.space = space
        self.tables = tables
        self.budget = budget
        self.rows: list[dict[int, Ints]] = [alive(table, math.inf) for table in tables]

    def attempt(self, threshold: float) -> tuple[float, PiperPlan | None] | None:
        """A plan whose stages take at most `threshold` seconds per sample; None: there is none.

        The plan is missing where there is one but its variants were not found (`PAIRS`).
        """
        parts, owner = self._parts(threshold)
        states, devices = len(self.space.masks), self.space.problem.devices
        chain = cheapest_among(parts, states, devices)
        if chain is None:
            return None
        picked = [(i, j, self.tables[owner[part]].menu, width) for i, j, part, width in chain]
        plan = self.plan(picked)
        return (math.inf, None) if plan is None else (plan.objective, plan)

    def narrow(self, threshold: float) -> None:
        """Drop the stages that no plan with objective ≤ threshold has."""
        problem = self.space.problem
        states = len(self.space.masks)
        self.rows = [
            {
                width: rows[
                    table.seconds[table.start[rows]]
                    <= threshold * width - table.cut[rows] - (width - 1) * table.resent[rows]
                ]
                for width, rows in by_width.items()
            }
            for table, by_width in zip(self.tables, self.rows, strict=True)
        ]
        choices = self.choices(threshold)
        head, tail = fewest_before(choices, states), fewest_after(choices, states)
        for table, by_width in zip(self.tables, self.rows, strict=True):
            for width, rows in by_width.items():
                needs = head[table.before[rows]] + tail[table.after[rows]]
                fits = needs + width * table.menu.degree <= problem.devices
                by_width[width] = rows[fits]

    def bisect(
        self, lower: float, best: PiperPlan | None, progress: Progress | None
    ) -> tuple[float, PiperPlan | None]:
        """The best plan in this space, and a threshold below which there is none."""
        if best is None:
            first = self.attempt(math.inf)
            if first is None or first[1] is None:
                return (lower, None)
            best = first[1]
        holder = [best]
        self.narrow(best.objective)
        if progress is not None:
            progress(best.objective, lower)

        def found(_: float, plan: PiperPlan | None) -> None:
            if plan is not None and plan.objective < holder[0].objective:
                holder[0] = plan
                self.narrow(plan.objective)
                if progress is not None:
                    progress(plan.objective, lower)

        def refuted(bound: float) -> None:
            if progress is not None:
                progress(holder[0].objective, bound)

        bound, _, _ = smallest_threshold(
            self.attempt,
            lower,
            best.objective,
            exact=EXACT,
            late=lambda: self.budget.late,
            found=found,
            refuted=refuted,
        )
        return bound, holder[0]

    def choices(self, threshold: float) -> Choices:
        """All stages that take at most `threshold` seconds per sample."""
        return Choices.joined(self._parts(threshold)[0])

    def _parts(self, threshold: float) -> tuple[list[Choices], list[int]]:
        """The same by table and width, and the table of each."""
        owner = [k for k, by_width in enumerate(self.rows) for _ in by_width]
        parts = [
            table.choices(threshold, width, rows)
            for table, by_width in zip(self.tables, self.rows, strict=True)
            for width, rows in by_width.items()
        ]
        return parts, owner

    def plan(self, picked: Sequence[tuple[int, int, Menu, int]]) -> PiperPlan | None:
        """The fastest variants for stages (state, state, menu, width); None: they do not fit."""
        problem = self.space.problem
        flights = in_flight(problem, [width for *_, width in picked])
        stages = []
        for (i, j, menu, width), y in zip(picked, flights, strict=True):
            nodes = members(self.space.masks[j] & ~self.space.masks[i])
            options = options_of(self.space, menu, i, j)
            columns = pick(options, problem.memory_bytes, y, PAIRS)
            if columns is None:
                return None
            variants = {}
            for v, column in zip(nodes, columns, strict=True):
                item, node = menu.items[v], problem.nodes[v]
                assert item is not None
                chosen = node.variants[menu.degree][item.positions[column]]
                variants[str(node.id)] = chosen.id
            names = tuple(problem.nodes[v].id for v in nodes)
            details = {
                "data_parallel": width,
                "tensor_parallel": menu.degree,
                "variants": variants,
            }
            stages.append(StageSolution(names, width, details))
        result = evaluate(problem, stages)
        found = zip(stages, result.seconds, result.memory_bytes, result.in_flight, strict=True)
        done = tuple(
            replace(
                stage,
                details={
                    **stage.details,
                    "seconds": seconds,
                    "memory_bytes": held,
                    "in_flight": y,
                },
            )
            for stage, seconds, held, y in found
        )
        masks = tuple(self.space.masks[i] for i, *_ in picked)
        return PiperPlan(result.objective, done, masks)


MOST_FLIGHTS = 256  # all numbers up to it; beyond it a grid


class LeastMemory:
    """Least bytes of the stages of a space, for any number of microbatches in flight."""

    def __init__(self, space: Space, stages: list[StatePairs]) -> None:
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
        chain = cheapest_among(parts, len(self.space.masks), self.space.problem.devices)
        if chain is None:
            return None
        stages = [(i, j, origin[part], width) for i, j, part, width in chain]
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

    def least_limit(self, known: float) -> float:
        """The least limit, to a millionth, that has a plan; `known` is one that has."""

        def attempt(limit: float) -> tuple[float, None] | None:
            found = self.chain(limit)
            return None if found is None else (found[1], None)

        return smallest_threshold(attempt, 0.0, known, exact=1e-6)[1]

    def _flights(self, along: Floats, rows: NDArray[np.int64], limit: float) -> NDArray[np.int64]:
        number = rows.shape[1]
        low = bisected(
            np.zeros(number, dtype=np.int64),
            np.full(number, len(self.grid), dtype=np.int64),
            lambda at: along[rows[1], at] - along[rows[0], at] <= limit,
        )
        # Up to just before the next number of the grid it may fit too.
        beyond = np.r_[0, self.grid[1:] - 1, self.grid[-1]]
        result: NDArray[np.int64] = beyond[low]
        return result

    def _widths(self, degree: int) -> list[int]:
        return sorted({d for menu in self.menus if menu.degree == degree for d in menu.widths})
