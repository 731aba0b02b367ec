"""Search for the best placement of groups, with its proof: linear orders, down-closed sets, CP-SAT.

Problems of up to some thousand groups are solved over all down-closed sets where these are few,
and by an integer program elsewhere.  Larger ones are cut into a series of small parts first: where
all cuts of the series can be listed, the best pipeline of all is found; elsewhere there are lower
bounds, and better orders as time allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from benchmarks.published import linear_orders
from benchmarks.published.placement.cut_chain import (
    MANY,
    Arrays,
    Ints,
    arrays,
    best,
    combinations,
    linear_chain,
    main_class,
    positions_of,
    thinned,
)
from benchmarks.published.placement.ideal_program import all_ideals, best_chain, promising
from benchmarks.published.placement.node_groups import (
    lifted,
    memory_problem,
    together,
    without_zeros,
)
from benchmarks.published.placement.placements import (
    Placement,
    compact,
    neighbours,
    objective,
    simple_bound,
)
from benchmarks.published.placement.relaxed import relaxed_chain, wide_parts
from benchmarks.published.placement.series import (
    MOST_IN_SEGMENT,
    Segment,
    Unlisted,
    listed,
    segments,
    series,
    series_chain,
    stages_of,
    useful,
)
from benchmarks.published.placement.threshold_program import prove
from benchmarks.published.placement_model import LoadProblem
from benchmarks.published.solution import ROUNDING
from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.budget import Budget

IDEALS = 100_000  # down-closed sets, listed at most
CELLS = 2e7  # of the table: down-closed sets times combinations of devices
FEW = 3_000  # down-closed sets that need no better incumbent first
PAIRS = 3e8  # of down-closed sets, before the integer program has its turn
ROUNDS = 5  # of four random orders each
NEAR = 12  # orders through the cuts of a new incumbent
EFFORT = 8.0  # CP-SAT's deterministic seconds before the incumbent is looked at again
CLOSED = ROUNDING / 10  # a relative gap up to this ends the search
RESTART = 2e-3  # an incumbent better by this part tightens the ranges enough to start again
ENTRIES = 20_000_000  # of the band of a linear order
DEFAULT_SECONDS = 60.0  # wall seconds for large problems, when the user sets no limit,
DEFAULT_PER_GROUP = 1e-3  # and more for each group
FIRST_REACH = 1.05  # times the bound: loads looked at first

Report = Callable[[float | None, float], None]


@dataclass(frozen=True, slots=True)
class PlacementFound:
    """The best placement of the problem's groups, and `bound` ≤ the least objective.

    No placement and bound inf: there is none, proved.  No placement and a finite bound: unknown.
    """

    placement: Placement | None
    objective: float
    bound: float
    prover: str

    @property
    def proved(self) -> bool:
        return self.objective - self.bound <= CLOSED * self.objective or math.isinf(self.bound)


def solve(
    problem: LoadProblem,
    *,
    budget: Budget,
    seed: int = 0,
    report: Report | None = None,
    stop_at: float = -math.inf,
) -> PlacementFound:
    """The best placement, or the best within the budget.

    Args:
        report: called with (objective or None, bound) whenever either improves.
        stop_at: an objective at which the search may stop.
    """
    search = ExactSearch(without_zeros(problem), budget, seed, report, stop_at)
    search.run()
    placement = search.best
    if placement is not None:
        placement = lifted(search.problem, problem, placement)
    return PlacementFound(placement, search.upper, min(search.bound, search.upper), search.prover)


def solve_large(
    problem: LoadProblem,
    *,
    budget: Budget,
    seed: int = 0,
    report: Report | None = None,
    most_in_segment: int = MOST_IN_SEGMENT,
    rounds: int | None = None,
) -> PlacementFound:
    """The best placement found within the budget, and a proved bound.

    Args:
        report: called with (objective or None, bound) whenever either improves.
        most_in_segment: down-closed sets between two anchors that are listed at most.
        rounds: random orders to try where no optimum is proved; None: as the budget allows, and
            without a limit for a minute and a millisecond for each group.
    """
    if math.isinf(budget.deadline):
        seconds = DEFAULT_SECONDS + DEFAULT_PER_GROUP * len(problem.sizes)
        budget.deadline = budget.begin + seconds
    search = LargeSearch(problem, budget, seed, report)
    if math.isfinite(search.bound):
        search.run(most_in_segment, rounds)
    return PlacementFound(search.best, search.upper, min(search.bound, search.upper), search.prover)


class PlacementSearch:
    """The best placement so far, the bound so far, and how linear orders improve the former."""

    def __init__(
        self,
        problem: LoadProblem,
        budget: Budget,
        seed: int = 0,
        report: Report | None = None,
    ) -> None:
        self.problem, self.budget, self.seed, self.report = problem, budget, seed, report
        self.best: Placement | None = None
        self.upper = math.inf
        self.bound = simple_bound(problem)
        self.prover = "average and largest load"
        self.before, self.after = neighbours(problem)
        self.a = arrays(problem)
        self.exactly = combinations([kind.count for kind in self.a.classes]) <= MANY
        if not self.exactly:
            self.a = _fewer_classes(self.a)

    @property
    def closed(self) -> bool:
        return self.bound >= self.upper * (1 - CLOSED) and self.best is not None

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

    def along(self, order: Sequence[int]) -> bool:
        """Offer the best placement along an order, if it is better than what is known."""
        a = self.a
        place = positions_of(order)
        everything = float(a.seconds.max(axis=0, initial=0.0).sum() + a.costs.sum()) * 2
        reach = self.upper * (1 - 1e-6)
        if not math.isfinite(reach):
            reach = max(self.bound * FIRST_REACH, 1e-4 * everything)
        while True:
            reach = min(reach, everything)
            span = max(reach / max(float(a.least.sum()), 1e-300), 1e-9)
            cuts = thinned(a, place, int((ENTRIES / min(span, 1.0)) ** 0.5))
            chain = linear_chain(a, place, cuts, reach)
            found, _ = best(chain, self.bound, precision=1e-5, late=lambda: self.budget.late)
            if found is not None:
                bounds = cuts[list(found.cuts)]
                self.take(np.searchsorted(bounds, place, side="right") - 1, found.kinds)
                return True
            if math.isfinite(self.upper) or reach >= everything or self.budget.late:
                return False
            reach *= 1.15 if reach < 2 * self.bound else 2.0

    def take(self, stages: Ints, kinds: tuple[int, ...]) -> None:
        self.offer(compact(stages.tolist(), kinds))


class ExactSearch(PlacementSearch):
    """All down-closed sets where they are few, CP-SAT elsewhere."""

    def __init__(
        self,
        problem: LoadProblem,
        budget: Budget,
        seed: int,
        report: Report | None,
        stop_at: float,
    ) -> None:
        super().__init__(problem, budget, seed, report)
        self.stop_at = stop_at

    @property
    def done(self) -> bool:
        if math.isinf(self.bound):
            return True
        if self.stop_at > -math.inf:  # a decision, which has no tolerance
            return self.upper <= self.stop_at or self.bound > self.stop_at
        return self.closed

    @property
    def sought(self) -> float:
        """Placements above this are of no interest; positive."""
        if self.stop_at == -math.inf:
            return self.upper
        least = min((s for row in self.problem.seconds for s in row if s > 0), default=1.0)
        return min(self.upper, max(self.stop_at * (1 + CLOSED), least / 2))

    def run(self) -> None:
        if self.done:
            return
        self.linear(self.orders(0))
        if self.done:
            return
        found = self.listed()
        if found is None or len(found) > FEW:
            # Incumbents are what the program over many ideals, and ranges, are pruned with.
            if self.stop_at == -math.inf:
                self.linear(self.orders(ROUNDS))
                if self.best is None:
                    self.memory_alone()
                if self.best is None:
                    return
            self.near()
        if self.done or self.budget.late or (found is not None and self.ideals(found)):
            return
        if self.best is None and self.stop_at == -math.inf:
            self.memory_alone()
        if self.best is not None and not self.done:
            self.integer_program()

    def orders(self, rounds: int) -> Iterator[list[int]]:
        values = zip(self.problem.pins, self.problem.costs, strict=True)
        return linear_orders.orders(self.before, self.after, values, self.seed, rounds)

    def linear(self, lines: Iterable[Sequence[int]]) -> None:
        """Tries the first order at least."""
        for order in lines:
            self.along(order)
            if self.budget.late:
                return

    def around(self, stage_of: Sequence[int], seed: int) -> Iterator[list[int]]:
        """Random orders that pass through all cuts of a given pipeline."""
        base = linear_orders.levels(self.before, self.after)
        rng = Random(seed)
        far = 4.0 * (len(stage_of) + 1)
        for number in range(NEAR):
            noise = (1, 3, 10)[number // 2 % 3]
            priority = [
                far * s + x + noise * rng.random()
                for s, x in zip(stage_of, base[number % 2], strict=True)
            ]
            yield lattice.by_priority(self.before, self.after, priority)

    def near(self) -> None:
        """Orders through the cuts of the incumbent, as long as they improve it."""
        for attempt in range(20):
            before = self.upper
            if self.best is None or self.budget.late or self.done:
                return
            self.linear(self.around(self.best.stage_of, self.seed + attempt))
            if self.upper >= before * (1 - RESTART / 4):
                return

    def listed(self) -> list[int] | None:
        """All ideals, when they are few enough."""
        found = all_ideals(self.problem, IDEALS)
        devices = math.prod(1 + kind.count for kind in arrays(self.problem).classes)
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

    def memory_alone(self) -> None:
        """Memory alone, when no order has a placement: some placement, or the proof of none."""
        memory, limit = memory_problem(self.problem)
        found = solve(memory, budget=self.budget, seed=self.seed, stop_at=limit)
        if found.bound > limit * (1 + 1e-12):
            self.raise_bound(math.inf, f"least memory: {found.prover}")
        if found.placement is not None and not math.isinf(self.offer(found.placement)):
            self.linear(self.around(found.placement.stage_of, self.seed))

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
                stop_at=max(self.stop_at, before * (1 - RESTART)),
                progress=lambda bound: self.raise_bound(bound, "CP-SAT"),
            )
            self.raise_bound(proof.bound, "CP-SAT over thresholds")
            if proof.complete:
                return
            if self.upper < before:
                self.near()
            else:
                effort *= 2


class LargeSearch(PlacementSearch):
    """All cuts of a series of parts where they can be listed, relaxations elsewhere."""

    def __init__(
        self, problem: LoadProblem, budget: Budget, seed: int, report: Report | None
    ) -> None:
        super().__init__(problem, budget, seed, report)
        self.random = Random(seed)
        self.early, self.late = linear_orders.levels(self.before, self.after)

    def run(self, most_in_segment: int, rounds: int | None) -> None:
        self.first()
        if self.exactly and not self.closed and not self.budget.late:
            parts = segments(self.a, most_in_segment)
            narrow = listed(parts)
            if narrow is None or not self.all_cuts(narrow):
                self.bounds(parts)
        if not self.closed:
            self.improve(rounds)

    @property
    def closed(self) -> bool:
        return self.bound >= self.upper * (1 - ROUNDING)

    def raise_bound(self, bound: float, prover: str) -> None:
        """Take a bound found in floating point: sums of n groups err by at most n roundings."""
        a = self.a
        if math.isfinite(bound):
            total = float(a.least.sum() + a.costs.sum())
            slack = 1e-9 + 4e-16 * a.groups * total / bound if bound > 0 else 0.0
            super().raise_bound(bound * (1 - slack), prover)

    def first(self) -> None:
        ids = list(range(self.a.groups))
        deepest = sorted(ids, key=lambda v: -self.early[v])
        self.along(ids)
        if not self.closed and not self.budget.late:
            self.along(linear_orders.depth_first(self.before, self.after, deepest))

    def all_cuts(self, parts: list[Segment]) -> bool:
        """Find the best pipeline of all; False when that does not fit into memory."""
        if not math.isfinite(self.upper):
            return False
        made = series(self.a, parts)
        for attempt in range(9):
            reach = self.upper * (1 + 1e-9)
            keep = useful(made, reach)
            chain = series_chain(made, reach, keep)
            if chain is not None or self.budget.late or attempt == 8:
                break
            self.round()
        if chain is None:
            return False
        found, bound = best(chain, self.bound, late=lambda: self.budget.late)
        if found is not None:
            self.take(stages_of(made, keep[list(found.cuts)].tolist()), found.kinds)
        self.raise_bound(bound, "dynamic program over all cuts")
        return True

    def bounds(self, parts: list[Segment | Unlisted]) -> None:
        """Bounds where some cuts cannot be listed."""
        a, late = self.a, lambda: self.budget.late
        reach = self.upper if math.isfinite(self.upper) else 4 * self.bound
        wide = wide_parts(a, parts, late)
        took = 0.0
        for share in (0.05, 0.25, 1.0):
            # Each is about five times the work of the one before it.
            if self.budget.late or self.closed or 6 * took > self.budget.left / 2:
                return
            began = self.budget.spent
            chain = relaxed_chain(a, parts, wide, reach, share)
            if chain is None:
                return
            _, bound = best(chain, self.bound, precision=1e-4, late=late)
            self.raise_bound(bound, "relaxed dynamic program")
            took = self.budget.spent - began

    def round(self) -> None:
        """One more order."""
        for order in self.some_orders():
            if self.closed or self.budget.late:
                return
            self.along(order)

    def improve(self, rounds: int | None) -> None:
        """Random orders, half of them through the cuts of the best placement, until the budget
        is spent."""
        done = 0
        while not self.closed and not self.budget.late and (rounds is None or done < rounds):
            self.round()
            done += 1

    def some_orders(self) -> Iterator[list[int]]:
        n, r = self.a.groups, self.random
        noise = r.choice((0.1, 0.3, 1.0))
        first = sorted(range(n), key=lambda v: -self.early[v] * (1 + noise * r.random()))
        yield linear_orders.depth_first(self.before, self.after, first)
        for base in (self.early, self.late, list(range(n))):
            if self.best is None:
                return
            far, jitter = 4.0 * n, r.choice((1, 3, 10, 30, 100))
            yield lattice.by_priority(
                self.before,
                self.after,
                [
                    far * stage + x + jitter * r.random()
                    for stage, x in zip(self.best.stage_of, base, strict=True)
                ],
            )


def _fewer_classes(a: Arrays) -> Arrays:
    """Leave devices of the smaller classes idle until few enough combinations are left."""
    counts = [kind.count for kind in a.classes]
    main = main_class(a)
    while combinations(counts) > MANY:
        c = max((c for c in range(len(counts)) if c != main), key=lambda c: counts[c])
        counts[c] -= 1
    kinds = zip(a.classes, counts, strict=True)
    return replace(a, classes=tuple(replace(kind, count=n) for kind, n in kinds))
