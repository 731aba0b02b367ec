"""The integer program: thresholds x[v, s] = (stage(v) ≥ s), solved by CP-SAT.

Integer loads are true loads times a power of two, rounded down, so that whatever CP-SAT proves of
them is a lower bound of the true objective; the best placements it meets are evaluated exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.published.placement.placements import (
    Placement,
    compact,
    neighbours,
    stage_ranges,
)
from benchmarks.published.placement_model import LoadProblem
from pdcompile.passes.partition.budget import Budget, minimize
from pdcompile.passes.partition.lattice import reachable
from pdcompile.passes.partition.thresholds import Thresholds, negated

BITS = 40  # of the largest load; the sum of all stays far below 63
BETTER = 1e-7  # a plan has to be better than the known one by this part of it to be looked for
Offer = Callable[[Placement], float]
"""Takes a placement, returns its true objective (inf when it breaks a limit exactly)."""


@dataclass(frozen=True, slots=True)
class PlacementProof:
    """`bound` ≤ the least objective; `complete`: the search ended, and did not run out of time.

    A complete search that met no placement has proved that none has an objective below `bound`;
    that is inf when the limits leave no placement at all.
    """

    bound: float
    complete: bool


def prove(
    problem: LoadProblem,
    upper: float,
    *,
    budget: Budget,
    offer: Offer,
    seed: int = 0,
    effort: float = math.inf,
    stop_at: float = -math.inf,
    progress: Callable[[float], None] = lambda _: None,
) -> PlacementProof:
    """Search for placements better than `upper` (by at least `BETTER`), offering each.

    Args:
        upper: objective of a known placement, positive and finite; anything above it is cut off.
        effort: limit in CP-SAT's deterministic seconds, which are the same on every machine.
        stop_at: an objective at which the search may stop.
        progress: called with improved lower bounds.
    """
    model = ThresholdModel(problem, upper)
    if not model.possible:
        return PlacementProof(model.beyond, True)

    def proved(units: float) -> float:
        return model.time_of(math.ceil(units - 1e-6))

    while True:
        broken: Placement | None = None  # the last placement, where only rounding lets it through

        def on_solution(value: Callable[[Any], bool]) -> bool:
            nonlocal broken
            placement = model.read(value)
            objective = offer(placement)
            broken = placement if math.isinf(objective) else None
            return broken is None and objective <= stop_at

        solved = minimize(
            model.cp, budget, on_solution, seed=seed, effort=effort, presolve=True,
            on_bound=lambda units: progress(proved(units)),
        )  # fmt: skip
        if solved.infeasible:
            return PlacementProof(model.beyond, True)
        if solved.optimal and broken is not None:
            model.forbid(broken)
            continue
        return PlacementProof(proved(solved.bound), solved.optimal)


class ThresholdModel:
    """The CP-SAT model of placements of Σ count stages with all loads below `upper`."""

    def __init__(self, problem: LoadProblem, upper: float) -> None:
        from ortools.sat.python import cp_model

        self.cp_model, self.cp = cp_model, cp_model.CpModel()
        self.problem = problem
        n = len(problem.sizes)
        self.classes = [c for c, kind in enumerate(problem.classes) if kind.count]
        counts = {c: min(problem.classes[c].count, n) for c in self.classes}
        self.stages = sum(counts.values())
        self.shift = BITS - math.frexp(upper)[1]
        self.top = math.floor(math.ldexp(upper * (1 - BETTER), self.shift))
        ranges = stage_ranges(problem, upper, self.stages)
        self.possible = ranges is not None
        # No integer load of a placement that was cut off is ≤ top.
        self.beyond = self.time_of(self.top + 1)
        if ranges is None:
            return
        self.x = Thresholds(self.cp, ranges, problem.arcs, self.stages)
        self.kinds = self._kinds(counts)
        self.time = self.cp.new_int_var(0, self.top, "time")
        self._loads(ranges, [self._transfers(ranges, s) for s in range(self.stages)])
        self._memory(ranges)
        self.cp.minimize(self.time)

    def time_of(self, units: int) -> float:
        return math.ldexp(units, -self.shift)

    def units(self, seconds: float) -> int:
        """Rounded down; what exceeds the known plan counts as just above what is allowed."""
        if not seconds < self.time_of(self.top + 1):
            return self.top + 1
        return math.floor(math.ldexp(seconds, self.shift))

    def _kinds(self, counts: dict[int, int]) -> list[dict[int, Any]]:
        """[stage][class]: the literal that the stage's device is of that class."""
        if len(self.classes) == 1:
            return [{self.classes[0]: True} for _ in range(self.stages)]
        kinds: list[dict[int, Any]]
        if len(self.classes) == 2:
            first, second = self.classes
            choice = [self.cp.new_bool_var("") for _ in range(self.stages)]
            kinds = [{first: negated(b), second: b} for b in choice]
            self.cp.add(sum(choice) == counts[second])
            return kinds
        kinds = [{c: self.cp.new_bool_var("") for c in self.classes} for _ in range(self.stages)]
        for row in kinds:
            self.cp.add_exactly_one(row.values())
        for c, count in counts.items():
            self.cp.add(sum(row[c] for row in kinds) == count)
        return kinds

    def _transfers(self, ranges: Sequence[tuple[int, int]], s: int) -> list[tuple[int, Any]]:
        """(cost, literal: paid by stage s) of every value that stage s can pay."""
        if s == 0:
            self._ends(ranges)
        found = []
        for e, (pins, cost) in enumerate(zip(self.problem.pins, self.problem.costs, strict=True)):
            near = [v for v in pins if ranges[v][0] <= s <= ranges[v][1]]
            first, last = self.firsts[e][s], self.lasts[e][s + 1]
            if not near or (first is True and last is False):
                continue
            pay = self.cp.new_bool_var("")
            for v in near:
                away = self.x.elsewhere(v, s)
                self.x.clause((*away, negated(last), pay))
                self.x.clause((*away, first, pay))
            found.append((self.units(cost), pay))
        return found

    def _ends(self, ranges: Sequence[tuple[int, int]]) -> None:
        """[value][s]: all pins are on stages ≥ s, and some pin is, in the direction needed."""
        before, after = neighbours(self.problem)
        ancestors = reachable(before, from_end=False)
        descendants = reachable(after, from_end=True)
        self.firsts: list[list[Any]] = []
        self.lasts: list[list[Any]] = []
        for pins in self.problem.pins:
            mask = sum(1 << v for v in pins)
            least = [v for v in pins if not ancestors[v] & mask]
            most = [v for v in pins if not descendants[v] & mask]
            first, last = [], []
            for s in range(self.stages + 1):
                first.append(self._every(self.x.from_stage(v, s) for v in least))
                none = self._every(negated(self.x.from_stage(v, s)) for v in most)
                last.append(negated(none))
            self.firsts.append(first)
            self.lasts.append(last)

    def _every(self, literals: Iterable[Any]) -> Any:
        """A literal that implies all of these."""
        open_ones = {_key(x): x for x in literals if x is not True}
        if not open_ones:
            return True
        if any(x is False for x in open_ones.values()):
            return False
        if len(open_ones) == 1:
            return next(iter(open_ones.values()))
        every = self.cp.new_bool_var("")
        for x in open_ones.values():
            self.cp.add_implication(every, x)
        return every

    def _held(
        self, ranges: Sequence[tuple[int, int]], s: int, amounts: Sequence[int]
    ) -> tuple[list[Any], list[int], int]:
        """Literals, coefficients and constant of the sum of `amounts` on stage s."""
        literals, coefficients, constant = [], [], 0
        for v, amount in enumerate(amounts):
            if not amount or not ranges[v][0] <= s <= ranges[v][1]:
                continue
            for literal, sign in ((self.x.from_stage(v, s), 1), (self.x.from_stage(v, s + 1), -1)):
                if literal is True:
                    constant += sign * amount
                elif literal is not False:
                    literals.append(literal)
                    coefficients.append(sign * amount)
        return literals, coefficients, constant

    def _loads(
        self, ranges: Sequence[tuple[int, int]], transfers: Sequence[list[tuple[int, Any]]]
    ) -> None:
        for c in self.classes:
            amounts = [self.units(row[c]) for row in self.problem.seconds]
            for s in range(self.stages):
                literals, coefficients, constant = self._held(ranges, s, amounts)
                if self.problem.classes[c].transfers:
                    literals += [pay for _, pay in transfers[s]]
                    coefficients += [cost for cost, _ in transfers[s]]
                total = self.cp_model.LinearExpr.weighted_sum(
                    [*literals, self.time], [*coefficients, -1]
                )
                self._enforce(self.cp.add(total <= -constant), self.kinds[s][c])

    def _memory(self, ranges: Sequence[tuple[int, int]]) -> None:
        total = math.fsum(self.problem.sizes)
        whole = total < 2**BITS and all(size.is_integer() for size in self.problem.sizes)
        shift = 0 if whole else BITS - math.frexp(total)[1]
        for c in self.classes:
            memory = self.problem.classes[c].memory
            if memory >= total:
                continue
            limit = math.floor(math.ldexp(memory, shift))
            amounts = [
                min(limit + 1, math.floor(math.ldexp(size, shift))) for size in self.problem.sizes
            ]
            for s in range(self.stages):
                literals, coefficients, constant = self._held(ranges, s, amounts)
                held = self.cp_model.LinearExpr.weighted_sum(literals, coefficients)
                self._enforce(self.cp.add(held <= limit - constant), self.kinds[s][c])

    def _enforce(self, constraint: Any, literal: Any) -> None:
        if literal is not True:
            constraint.only_enforce_if(literal)

    def forbid(self, placement: Placement) -> None:
        """No stage of a class holds all groups of a stage that breaks that class's memory."""
        for s, kind in enumerate(placement.kinds):
            held = [v for v, stage in enumerate(placement.stage_of) if stage == s]
            size = math.fsum(self.problem.sizes[v] for v in held)
            if size <= self.problem.classes[kind].memory:
                continue
            for t in range(self.stages):
                away: list[Any] = [negated(self.kinds[t][kind])]
                for v in held:
                    away += self.x.elsewhere(v, t)
                self.x.clause(away)

    def read(self, value: Callable[[Any], bool]) -> Placement:
        def true(literal: Any) -> bool:
            return literal if isinstance(literal, bool) else bool(value(literal))

        kinds = [next(c for c in row if true(row[c])) for row in self.kinds]
        return compact(self.x.read(value), kinds)


def _key(literal: Any) -> Any:
    return literal if isinstance(literal, bool) else literal.index
