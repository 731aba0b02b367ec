"""From groups to the best placement with its proof: orders, ideals, integer program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.published.placement.ideals import all_ideals, best_chain, promising
from pdcompile.passes.published.placement.integer_program import prove
from pdcompile.passes.published.placement.linear import best_linear
from pdcompile.passes.published.placement.loads import Placement, objective
from pdcompile.passes.published.placement.orders import around, orders
from pdcompile.passes.published.placement.reduce import together, without_zeros
from pdcompile.passes.published.placement.simple import simple_bound as simple_bound
from pdcompile.passes.published.placement_file import LoadProblem
from pdcompile.problem.answer import ROUNDING

IDEALS = 100_000  # down-closed sets, listed at most
CELLS = 2e7  # of the table: down-closed sets times combinations of devices
FEW = 3_000  # down-closed sets that need no better incumbent first
PAIRS = 3e8  # of down-closed sets, before the integer program has its turn
ROUNDS = 5  # of four random orders each
NEAR = 12  # orders through the cuts of a new incumbent
EFFORT = 8.0  # CP-SAT's deterministic seconds before the incumbent is looked at again
CLOSED = ROUNDING / 10  # a relative gap up to this ends the search
RESTART = 2e-3  # an incumbent better by this part tightens the ranges enough to start again

Report = Callable[[float | None, float], None]


@dataclass(frozen=True, slots=True)
class Found:
    """The best placement of the problem's groups, and `bound` ≤ the least objective.

    No placement and bound inf: there is none, proved.  No placement and a finite bound: unknown.
    """

    placement: Placement | None
    objective: float
    bound: float
    prover: str

    @property
    def proved(self) -> bool:
        return self.objective - self.bound <= ROUNDING / 10 * self.objective or math.isinf(
            self.bound
        )


def solve(
    problem: LoadProblem,
    *,
    budget: Budget,
    seed: int = 0,
    report: Report | None = None,
    enough: float = -math.inf,
) -> Found:
    """The best placement, or the best within the budget.

    Args:
        report: called with (objective or None, bound) whenever either improves.
        enough: an objective at which the search may stop.
    """
    search = _Search(without_zeros(problem), budget, seed, report, enough)
    search.run()
    best = search.best
    if best is not None:
        best = lifted(search.problem, problem, best)
    return Found(best, search.upper, min(search.bound, search.upper), search.prover)


class _Search:
    def __init__(
        self,
        problem: LoadProblem,
        budget: Budget,
        seed: int,
        report: Report | None,
        enough: float,
    ) -> None:
        self.problem, self.budget, self.seed = problem, budget, seed
        self.report, self.enough = report, enough
        self.best: Placement | None = None
        self.upper = math.inf
        self.bound = simple_bound(problem)
        self.prover = "average and largest load"

    @property
    def done(self) -> bool:
        if math.isinf(self.bound):
            return True
        if self.enough > -math.inf:  # a decision, which has no tolerance
            return self.upper <= self.enough or self.bound > self.enough
        return self.bound >= self.upper * (1 - CLOSED) and self.best is not None

    @property
    def sought(self) -> float:
        """Placements above this are of no interest; positive."""
        if self.enough == -math.inf:
            return self.upper
        least = min((s for row in self.problem.seconds for s in row if s > 0), default=1.0)
        return min(self.upper, max(self.enough * (1 + CLOSED), least / 2))

    def offer(self, placement: Placement) -> float:
        value = objective(self.problem, placement)
        if value < self.upper:
            self.best, self.upper = placement, value
            self.tell()
        return value

    def tell(self) -> None:
        if self.report is not None:
            self.report(None if self.best is None else self.upper, min(self.bound, self.upper))

    def raise_bound(self, bound: float, prover: str) -> None:
        if bound > self.bound:
            self.bound, self.prover = bound, prover
            self.tell()

    def run(self) -> None:
        if self.done:
            return
        self.linear(orders(self.problem, self.seed, 0))
        if self.done:
            return
        found = self.listed()
        if found is None or len(found) > FEW:
            # Incumbents are what the program over many ideals, and ranges, are pruned with.
            if self.enough == -math.inf:
                self.linear(orders(self.problem, self.seed, ROUNDS))
                if self.best is None:
                    self.fit()
                if self.best is None:
                    return
            self.near()
        if self.done or self.budget.late or (found is not None and self.ideals(found)):
            return
        if self.best is None and self.enough == -math.inf:
            self.fit()
        if self.best is not None and not self.done:
            self.integer_program()

    def linear(self, lines: Iterable[Sequence[int]]) -> None:
        _, found = best_linear(self.problem, lines, budget=self.budget)
        if found is not None:
            self.offer(found)

    def near(self) -> None:
        """Orders through the cuts of the incumbent, as long as they improve it."""
        for turn in range(20):
            before = self.upper
            if self.best is None or self.budget.late or self.done:
                return
            line = around(self.problem, self.best.stage_of, self.seed + turn, NEAR)
            self.linear(line)
            if self.upper >= before * (1 - RESTART / 4):
                return

    def listed(self) -> list[int] | None:
        """All ideals, when they are few enough."""
        found = all_ideals(self.problem, IDEALS)
        devices = math.prod(1 + min(k.count, len(self.problem.sizes)) for k in self.problem.classes)
        return None if found is None or len(found) * devices > CELLS else found

    def ideals(self, found: list[int]) -> bool:
        """True when the dynamic program over all ideals settled the matter."""
        if len(found) > FEW:
            few = promising(self.problem, found, FEW)
            chain = best_chain(self.problem, few, self.budget, self.sought)
            if chain is not None and chain.placement is not None:
                self.offer(chain.placement)
            if self.done:
                return True
        chain = best_chain(self.problem, found, self.budget, self.sought, PAIRS)
        if chain is None:
            return False
        self.raise_bound(chain.bound, f"dynamic program over all {len(found)} down-closed sets")
        if chain.placement is not None:
            self.offer(chain.placement)
        return self.done

    def fit(self) -> None:
        """Memory alone, when no order has a placement: some placement, or the proof of none."""
        memory, limit = memory_problem(self.problem)
        found = solve(memory, budget=self.budget, seed=self.seed, enough=limit)
        if found.bound > limit * (1 + 1e-12):
            self.raise_bound(math.inf, f"least memory: {found.prover}")
        if found.placement is not None and not math.isinf(self.offer(found.placement)):
            self.linear(around(self.problem, found.placement.stage_of, self.seed, NEAR))

    def integer_program(self) -> None:
        effort = EFFORT
        while not (self.budget.late or self.done):
            before, known = self.upper, self.sought
            tight = together(self.problem, known)

            def offer(placement: Placement, tight: LoadProblem = tight) -> float:
                return self.offer(lifted(tight, self.problem, placement))

            proof = prove(
                tight,
                known,
                budget=self.budget,
                offer=offer,
                seed=self.seed,
                effort=effort,
                enough=max(self.enough, before * (1 - RESTART)),
                progress=lambda bound: self.raise_bound(bound, "CP-SAT"),
            )
            self.raise_bound(proof.bound, "CP-SAT over thresholds")
            if proof.complete:
                return
            if self.upper < before:
                self.near()
            else:
                effort *= 2


def memory_problem(problem: LoadProblem) -> tuple[LoadProblem, float]:
    """(problem, limit): the placements that fit are those of `problem` with objective ≤ limit.

    The load of a device is the memory it holds; where classes have unlike limits, in parts of
    the first one's.
    """
    total = math.fsum(problem.sizes)
    bounded = [kind.memory for kind in problem.classes if kind.count and kind.memory < total]
    limit = bounded[0] if bounded else total

    def amount(v: int, c: int) -> float:
        memory, size = problem.classes[c].memory, problem.sizes[v]
        if math.isinf(problem.seconds[v][c]):
            return math.inf
        if memory >= total:
            return 0.0
        if memory == limit or size == 0:
            return size
        return size * (limit / memory) if memory > 0 else math.inf

    return (
        replace(
            problem,
            seconds=tuple(
                tuple(amount(v, c) for c in range(len(problem.classes)))
                for v in range(len(problem.sizes))
            ),
            sizes=(0.0,) * len(problem.sizes),
            pins=(),
            costs=(),
            classes=tuple(
                replace(kind, memory=math.inf, transfers=False) for kind in problem.classes
            ),
        ),
        limit,
    )


def lifted(small: LoadProblem, large: LoadProblem, placement: Placement) -> Placement:
    """A placement of merged groups as one of the groups they were merged from."""
    stage = {v: placement.stage_of[g] for g, group in enumerate(small.members) for v in group}
    return Placement(tuple(stage[group[0]] for group in large.members), placement.kinds)
