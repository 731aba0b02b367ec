"""Piper's space: stages with data- and tensor-parallel degrees and a variant of every node."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from benchmarks.published import linear_orders
from benchmarks.published.chain_program import cheapest_chain, smallest_threshold
from benchmarks.published.piper.menus import device_seconds, heaviest_alone, menus
from benchmarks.published.piper.stage_tables import (
    POINTS,
    StatePairs,
    achievable_table,
    exact_table,
    pairs,
    relaxed_table,
)
from benchmarks.published.piper.states import Space, all_ideals, ideals_around, orders_of
from benchmarks.published.piper.table_search import EXACT, LeastMemory, PiperPlan, TableSearch
from benchmarks.published.piper_model import MenuProblem
from benchmarks.published.solution import ROUNDING, Progress, Solution
from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.budget import Budget
from pdcompile.units import format_bytes, three_digits

__all__ = ["solve"]


IDEALS = 8_000  # at most; beyond it the states are a choice of ideals
STAGES = 600_000  # pairs of states in all tables together
PREFIXES = 64  # of each linear order
ROUNDS = 8  # of looking around the cuts of the best plan
REACH = 12  # nodes that are added or taken away there
FINE = 40  # rules for the variants there
EXACT_STAGES = 100_000  # whose sums of variants are all looked at

SCOPE = (
    "Piper's space: pipelines of convex stages, each with a data-parallel degree that divides the "
    "batch, a tensor-parallel degree and a variant of every node"
)


def solve(
    problem: MenuProblem,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Solution:
    """The best plan found within `time_limit` seconds, re-evaluated, and a bound.

    With all ideals of the graph as states the bound is exact ('Piper: Multidimensional Planner
    for DNN Parallelization', NeurIPS 2021, has this space; its own algorithm picks variants by a
    heuristic).  Where the ideals are too many, the plan is the best through some of them, and
    the bound counts device-seconds and device-bytes.  Ctrl-C ends the search with what there is.
    """
    with Budget(time_limit) as budget:
        return _Solve(problem, budget, seed, progress).run()


class _Solve:
    def __init__(
        self, problem: MenuProblem, budget: Budget, seed: int, progress: Progress | None
    ) -> None:
        self.problem = problem
        self.budget = budget
        self.seed = seed
        self.progress = progress
        self.lower = device_seconds(problem)
        self.prover = "device-seconds"
        self.best: PiperPlan | None = None

    def run(self) -> Solution:
        problem = self.problem
        self.menus = menus(problem)
        for node in problem.nodes:
            if min(node.variants) > problem.devices:
                return self._without(
                    True,
                    f"node {node.id!r} has variants for {min(node.variants)} devices or more, "
                    f"and there are {problem.devices}",
                )
        masks = all_ideals(problem, IDEALS)
        complete = masks is not None and len(masks) ** 2 * len(self.menus) <= 2 * STAGES
        if masks is not None and complete:
            space = Space(problem, masks)
        else:
            space = Space(
                problem,
                linear_orders.prefixes(orders_of(problem, self.seed), math.inf, each=PREFIXES),
            )
        stages = self._all(space)
        self.least = LeastMemory(space, stages)
        self._begin(space, stages)
        if not complete and self.best is not None:
            self._look_around()
        if masks is not None and self._open() and not self.budget.late:
            self._prove(space if complete else Space(problem, masks))
        return self._answer(complete)

    def _all(self, space: Space) -> list[StatePairs]:
        found = [pairs(space, menu, math.inf, len(space.masks) ** 2) for menu in self.menus]
        return [stages for stages in found if stages is not None]

    def _begin(self, space: Space, stages: list[StatePairs]) -> None:
        """A first plan: with the least bytes, then with simple rules for the variants."""
        chain = self.least.chain(self.problem.memory_bytes)
        if chain is None:
            return
        search = TableSearch(space, [achievable_table(space, part) for part in stages], self.budget)
        self.best = search.plan(chain[0])
        _, self.best = search.bisect(self.lower, self.best, self.progress)

    def _look_around(self) -> None:
        """More states, around the cuts of the best plan, as long as that helps."""
        orders = orders_of(self.problem, self.seed)
        full = (1 << len(self.problem.nodes)) - 1
        idle = 0
        for number in range(ROUNDS):
            if self.budget.late or not self._open() or idle > 2:
                return
            assert self.best is not None
            before = self.best.objective
            near = ideals_around(self.problem, self.best.masks, orders[number % len(orders)], REACH)
            space = Space(self.problem, lattice.smaller_first({0, full, *near}))
            stages = self._below(space, self.best.objective)
            if stages is None:
                return
            tables = [achievable_table(space, part, FINE) for part in stages]
            search = TableSearch(space, tables, self.budget)
            _, self.best = search.bisect(self.lower, self.best, self.progress)
            assert self.best is not None
            idle = 0 if self.best.objective < before else idle + 1

    def _prove(self, space: Space) -> None:
        """All ideals: either a proof, or what time allows."""
        assert self.best is not None
        relaxed = self._relaxed(space)
        if relaxed is None or self.budget.late:
            return
        self._raise(self._bound(relaxed, 1e-3), "relaxed dynamic program over ideals")
        relaxed.narrow(self.best.objective)
        stages = sum(
            len(np.unique(np.concatenate([*rows.values()]))) for rows in relaxed.rows if rows
        )
        if self.budget.late or not self._open() or stages > EXACT_STAGES:
            return
        bound, hoped = self._improve(relaxed, POINTS)
        name = "dynamic program over ideals"
        if hoped is not None:
            hoped.narrow(self.best.objective)
            bound, name = self._bound(hoped, ROUNDING), "relaxed " + name
        if not self.budget.late:
            self._raise(bound, name)

    def _relaxed(self, space: Space) -> TableSearch | None:
        """The stages that a better plan may have, with bounds; None: too many to look at."""
        assert self.best is not None
        stages = self._below(space, self.best.objective)
        if stages is None:
            return None
        tables = [relaxed_table(space, part) for part in stages]
        search = TableSearch(space, tables, self.budget)
        search.narrow(self.best.objective)
        return search

    def _improve(self, relaxed: TableSearch, points: int) -> tuple[float, TableSearch | None]:
        """The best plan of what `relaxed` leaves, with up to `points` sums of variants a stage.

        Returns a threshold below which there is no plan with them, and, if that is not all of
        them, the search with bounds for the others.
        """
        assert self.best is not None
        both = [
            exact_table(
                relaxed.space, table, rows, self.best.objective, points, lambda: self.budget.late
            )
            for table, rows in zip(relaxed.tables, relaxed.rows, strict=True)
        ]
        search = TableSearch(relaxed.space, [real for real, _ in both], self.budget)
        bound, self.best = search.bisect(self.lower, self.best, self.progress)
        if all(hoped is None for _, hoped in both):
            return bound, None
        tables = [real if hoped is None else hoped for real, hoped in both]
        return bound, TableSearch(relaxed.space, tables, self.budget)

    def _below(self, space: Space, threshold: float) -> list[StatePairs] | None:
        """Stages that a better plan may have; None: too many to look at."""
        found: list[StatePairs] = []
        left = STAGES
        for menu in self.menus:
            part = None if self.budget.late else pairs(space, menu, threshold, left)
            if part is None:
                return None
            found.append(part)
            left -= len(part)
        return found

    def _bound(self, search: TableSearch, exact: float) -> float:
        """A threshold below which there is no plan, not even one with the table's bounds."""
        assert self.best is not None
        states, devices = len(search.space.masks), self.problem.devices

        def attempt(threshold: float) -> tuple[float, None] | None:
            chain = cheapest_chain(search.choices(threshold), states, devices)
            return None if chain is None else (threshold, None)

        return smallest_threshold(
            attempt,
            self.lower,
            self.best.objective,
            exact=exact,
            late=lambda: self.budget.late,
            refuted=self._refuted,
        )[0]

    def _refuted(self, bound: float) -> None:
        if self.progress is not None:
            self.progress(None if self.best is None else self.best.objective, bound)

    def _raise(self, bound: float, prover: str) -> None:
        if bound > self.lower:
            self.lower, self.prover = bound, prover

    def _open(self) -> bool:
        """There is a plan, and there may be a better one."""
        return self.best is not None and self.lower < self.best.objective * (1 - EXACT)

    def _answer(self, complete: bool) -> Solution:
        if self.best is None:
            return self._nothing(complete)
        return Solution.of(
            self.best.objective,
            self.lower,
            self.prover,
            self.budget.spent,
            SCOPE,
            stages=self.best.stages,
        )

    def _nothing(self, complete: bool) -> Solution:
        problem = self.problem
        limit = format_bytes(problem.memory_bytes)
        node = heaviest_alone(problem)
        if node is not None:
            complete = True
            reason = (
                f"node {problem.nodes[node[0]].id!r} alone needs {format_bytes(node[1])} with "
                f"one microbatch in flight, a device has {limit}"
            )
        else:
            reason = f"{problem.devices} devices of {limit} cannot hold all nodes"
        # The stages of `least` fit into the limit with one microbatch in flight; now all are asked.
        roomy = Space(replace(problem, memory_bytes=math.inf), self.least.space.masks)
        least = LeastMemory(roomy, self._all(roomy))
        unlimited = least.chain(math.inf)
        # A chain of least bytes has too many in flight for the grid of numbers.
        proved = complete or math.isinf(self.lower)
        proved &= self.least.chain(problem.memory_bytes) is None
        if not proved:
            reason = f"no plan was found in which {problem.devices} devices of {limit} hold all "
            reason += "nodes, and it is not proved that there is none"
        if unlimited is not None:
            helps = three_digits(math.ceil(least.least_limit(unlimited[1])))[1]
            return self._without(proved, f"{reason}; {helps} on each device would be enough")
        return self._without(
            proved,
            f"{problem.devices} devices are too few for the tensor-parallel degrees of the "
            f"nodes, whatever their memory; {self._fewest_devices()} would be enough",
        )

    def _fewest_devices(self) -> int:
        most = sum(min(node.variants) for node in self.problem.nodes)
        problem = replace(self.problem, devices=most, memory_bytes=math.inf)
        space = Space(problem, self.least.space.masks)
        self.menus = menus(problem)
        chain = LeastMemory(space, self._all(space)).chain(math.inf)
        return most if chain is None else sum(w * menu.degree for _, _, menu, w in chain[0])

    def _without(self, proved: bool, reason: str) -> Solution:
        bound = 0.0 if math.isinf(self.lower) else self.lower
        prover = "dynamic program over ideals" if proved else self.prover
        return Solution.of(
            None, math.inf if proved else bound, prover, self.budget.spent, SCOPE, reason=reason
        )
