"""Plans and bounds for graphs with thousands of groups.

First good plans along linear orders.  Then, where all cuts of the graph can be listed, the best
pipeline of all, which is the optimum; elsewhere lower bounds, and better orders as time allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.orders import by_priority
from pdcompile.passes.published.placement.large.arrays import (
    Arrays,
    Ints,
    arrays,
    main_class,
    speeds,
)
from pdcompile.passes.published.placement.large.chain import MANY, best, combinations
from pdcompile.passes.published.placement.large.lattice import (
    MOST_IN_SEGMENT,
    Segment,
    Unlisted,
    listed,
    segments,
)
from pdcompile.passes.published.placement.large.linear import (
    linear_chain,
    positions_of,
    thinned,
)
from pdcompile.passes.published.placement.large.nested import Nested, nested_bound
from pdcompile.passes.published.placement.large.relaxed import relaxed_chain, wide_parts
from pdcompile.passes.published.placement.large.series import (
    series,
    series_chain,
    stages_of,
    useful,
)
from pdcompile.passes.published.placement.loads import (
    Placement,
    compact,
    neighbours,
    objective,
)
from pdcompile.passes.published.placement.orders import depth_first, levels
from pdcompile.passes.published.placement.search import Found, Report, simple_bound
from pdcompile.passes.published.placement_file import LoadProblem
from pdcompile.problem.answer import ROUNDING

ENTRIES = 20_000_000  # of the band of a linear order
DEFAULT_SECONDS = 60.0  # wall seconds, when the user sets no limit,
DEFAULT_PER_GROUP = 1e-3  # and more for each group
FIRST_REACH = 1.05  # times the bound: loads looked at first


def solve(
    problem: LoadProblem,
    *,
    budget: Budget,
    seed: int = 0,
    report: Report | None = None,
    most_in_segment: int = MOST_IN_SEGMENT,
    rounds: int | None = None,
) -> Found:
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
    search = Search(problem, budget, seed, report)
    if math.isfinite(search.bound):
        search.run(most_in_segment, rounds)
    return Found(search.best, search.upper, min(search.bound, search.upper), search.prover)


class Search:
    """The best placement so far and the bound so far."""

    def __init__(
        self, problem: LoadProblem, budget: Budget, seed: int, report: Report | None
    ) -> None:
        self.problem, self.budget, self.report = problem, budget, report
        self.random = Random(seed)
        self.best: Placement | None = None
        self.upper = math.inf
        self.a = arrays(problem)
        counts = [kind.count for kind in problem.classes]
        self.exactly = combinations(counts) <= MANY
        self.bound = simple_bound(problem)
        self.prover = "average and largest load"
        if not self.exactly:
            self.a = _fewer_classes(self.a)
        self.before, self.after = neighbours(problem)
        self.early, self.late = levels(self.before, self.after)
        self.nested: Nested | None = None

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
        if not math.isfinite(bound):
            return
        total = float(a.least.sum() + a.costs.sum())
        slack = 1e-9 + 4e-16 * a.groups * total / bound if bound > 0 else 0.0
        if bound * (1 - slack) > self.bound:
            self.bound, self.prover = bound * (1 - slack), prover
            self.tell()

    def take(self, stages: Ints, kinds: tuple[int, ...]) -> None:
        placement = compact(stages.tolist(), kinds)
        value = objective(self.problem, placement)
        if value < self.upper:
            self.upper, self.best = value, placement
            self.tell()

    def tell(self) -> None:
        if self.report is not None:
            known = None if self.best is None else self.upper
            self.report(known, min(self.bound, self.upper))

    def along(self, order: list[int], cuts: Ints | None = None) -> bool:
        """Offer the best placement along an order, if it is better than what is known."""
        a = self.a
        place = positions_of(order)
        everything = float(a.seconds.max(axis=0, initial=0.0).sum() + a.costs.sum()) * 2
        reach = self.upper * (1 - 1e-6)
        if not math.isfinite(reach):
            reach = max(self.bound * FIRST_REACH, 1e-4 * everything)
        while True:
            reach = min(reach, everything)
            chosen = cuts
            if chosen is None:
                span = max(reach / max(float(a.least.sum()), 1e-300), 1e-9)
                chosen = thinned(a, place, int((ENTRIES / min(span, 1.0)) ** 0.5))
            chain = linear_chain(a, place, chosen, reach)
            found, _ = best(chain, self.bound, precision=1e-5, late=lambda: self.budget.late)
            if found is not None:
                bounds = chosen[list(found.cuts)]
                stages = np.searchsorted(bounds, place, side="right") - 1
                self.take(stages, found.kinds)
                return True
            if math.isfinite(self.upper) or reach >= everything or self.budget.late:
                return False
            reach *= 1.15 if reach < 2 * self.bound else 2.0

    def first(self) -> None:
        ids = list(range(self.a.groups))
        deepest = sorted(ids, key=lambda v: -self.early[v])
        self.along(ids)
        if not self.closed and not self.budget.late:
            self.along(depth_first(self.before, self.after, deepest))

    def all_cuts(self, parts: list[Segment]) -> bool:
        """Find the best pipeline of all; False when that does not fit into memory."""
        if not math.isfinite(self.upper):
            return False
        made = series(self.a, parts)
        reach = self.upper * (1 + 1e-9)
        keep = useful(made, reach)
        chain = series_chain(made, reach, keep)
        for _ in range(8):
            if chain is not None or self.budget.late:
                break
            self.round()
            reach = self.upper * (1 + 1e-9)
            keep = useful(made, reach)
            chain = series_chain(made, reach, keep)
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
        transfers = [kind.transfers for kind in a.classes if kind.count]
        exempt = sum(kind.count for kind in a.classes if not kind.transfers)
        self.nested = Nested(a, late)
        if any(transfers) and exempt < 2 and not self.budget.late:
            # A device that pays nothing may be one of the two that hold a cut value.
            speed = speeds(a)
            used = [c for c, kind in enumerate(a.classes) if kind.count]
            slowest = float(speed[used].min())
            if slowest > 0:
                found = nested_bound(
                    self.nested,
                    work=float(a.seconds[main_class(a)].sum()),
                    shares=float(sum(a.classes[c].count / speed[c] for c in used)),
                    slowest=slowest,
                    paid=2.0 - exempt,
                    low=self.bound,
                    high=reach,
                )
                self.raise_bound(found, "work and cut values")
        if self.budget.late:
            return
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
        turn = 0
        while not self.closed and not self.budget.late and (rounds is None or turn < rounds):
            self.round()
            turn += 1

    def some_orders(self) -> Iterator[list[int]]:
        n, r = self.a.groups, self.random
        noise = r.choice((0.1, 0.3, 1.0))
        first = sorted(range(n), key=lambda v: -self.early[v] * (1 + noise * r.random()))
        yield depth_first(self.before, self.after, first)
        if self.nested is not None:
            self.nested.least(self.upper * r.choice((1.0, 0.7, 0.3, 0.1, 0.02)))
            yield self.nested.order(r, r.random())
        for base in (self.early, self.late, list(range(n))):
            if self.best is None:
                return
            far, jitter = 4.0 * n, r.choice((1, 3, 10, 30, 100))
            yield by_priority(
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
