"""PipeDream's planning problem: replicated stages inside levels of bandwidth, proved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.published.pipedream.bucket_bounds import relaxation
from benchmarks.published.pipedream.level_tables import NestedStage, levels_of
from benchmarks.published.pipedream.nested_stages import (
    NestedPlan,
    Report,
    operations,
    search,
    unfit,
)
from benchmarks.published.pipedream.profile_cuts import (
    CutSegments,
    Dag,
    Pool,
    arrange,
    dag_of,
    lattice_of,
    segments_of,
    undominated,
)
from benchmarks.published.pipedream_model import HierarchyProblem, PipedreamCost, evaluate
from benchmarks.published.solution import (
    LevelSolution,
    Progress,
    Solution,
    StageSolution,
    relative_gap,
)
from pdcompile.errors import PlanError
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.lattice import members
from pdcompile.units import format_bytes

__all__ = ["solve"]


ENUMERATED = 20_000  # down-closed sets that are listed before they are thought too many
AFFORDABLE = 8e9  # nanoseconds of one core, roughly, for a search over all states
ROUNDS = 4e9  # the same, for all rounds over chosen states


def solve(
    problem: HierarchyProblem,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Solution:
    """The plan with the smallest bottleneck, in seconds per minibatch.

    `time_limit` in wall seconds.  With few down-closed sets, all of them are states of the
    recursion, which proves the optimum over all pipelines of convex stages; with many, states
    are chosen and the bound comes from a relaxation.  "infeasible" is always proved.
    """
    with Budget(time_limit) as budget:
        return _Solver(problem, budget, seed, progress).solve()


@dataclass(frozen=True, slots=True)
class _Family:
    """States in order, and what they are."""

    sets: list[int]
    segments: CutSegments
    text: str  # what the prover went through
    complete: bool


class _Solver:
    def __init__(
        self, problem: HierarchyProblem, budget: Budget, seed: int, progress: Progress | None
    ) -> None:
        self.problem = problem
        self.budget = budget
        self.seed = seed
        self.progress = progress
        self.levels = levels_of(problem)
        self.dag: Dag = dag_of(problem.graph)
        self.best: tuple[PipedreamCost, tuple[LevelSolution, ...]] | None = None
        self.bound = 0.0
        self.provers: list[str] = []
        self._relaxed: CutSegments | None = None

    def solve(self) -> Solution:
        family = self._all_states(memory=False)
        limit = self.problem.memory_bytes
        if limit is None:
            self._unlimited(family)
            return self._answer()
        states = self._all_states(memory=True) if family is not None else None
        segments = self._buckets() if states is None else states.segments
        reason = unfit(self.problem, self.levels, segments)
        if reason is not None:
            self.provers.append(
                "dynamic program for memory alone over "
                + (f"{len(segments.cut)} buckets of work" if states is None else states.text)
            )
            return self._without_plan(reason, proved=True)
        self._unlimited(family)  # its bound holds, and its plan may fit
        if self.best is None or not self._closed():
            self._limited(states, limit)
        if self.best is None:
            return self._without_plan(
                "no plan was found that fits into the memory, and none of the searches proves "
                "that there is none",
                proved=math.isinf(self.bound),
            )
        return self._answer()

    # States

    def _all_states(self, *, memory: bool) -> _Family | None:
        """Every state that an optimal plan may need, or None when they are too many."""
        lattice = lattice_of(self.dag, ENUMERATED, memory=memory)
        if lattice is None:
            return None
        sets = arrange(self.dag, undominated(self.dag, lattice, memory=memory))
        counts = [level.count for level in self.levels]
        if operations(len(sets), counts, self.problem.straight) > AFFORDABLE:
            return None
        text = f"all down-closed sets ({len(sets)} after dominance)"
        return _Family(sets, segments_of(self.dag, sets), text, complete=True)

    # Searches

    def _unlimited(self, family: _Family | None) -> None:
        """Plans and a bound without the memory limit; keeps what fits."""
        if family is not None:
            outcome = search(
                self.levels,
                family.segments,
                self.budget,
                fewer=self.problem.fewer,
                report=self._reporter(),
            )
            self.bound = max(self.bound, outcome.bound)
            self._keep(family.sets, outcome)
            self.provers.append(f"dynamic program over {family.text}")
            return
        buckets = self._buckets()
        self.bound = max(self.bound, search(self.levels, buckets, self.budget).bound)
        self.provers.append(f"relaxation to {len(buckets.cut)} buckets of work for the bound")
        if self.problem.memory_bytes is None:
            self._rounds()

    def _limited(self, family: _Family | None, limit: float) -> None:
        if family is None:
            self._optimistic(self._buckets(), limit)
            self._rounds()
            return
        outcome = self._search(family.segments)
        self._keep(family.sets, outcome)
        self.bound = max(self.bound, outcome.bound if len(self.levels) == 1 else 0.0)
        text = f"dynamic program over {family.text}, memory counted from the last stage"
        if len(self.levels) > 1 and outcome.seconds > self.bound:
            outcome = self._optimistic(family.segments, limit)
            text += ", idle workers neglected in the bound"
            self._keep(family.sets, outcome)  # it may fit all the same
        self.provers.append(text)

    def _optimistic(self, segments: CutSegments, limit: float) -> NestedPlan:
        """Raise the bound by what no plan that fits is below."""
        outcome = search(
            self.levels, segments, self.budget, limit=limit, sound=False, low=self.bound
        )
        self.bound = max(self.bound, outcome.bound)
        return outcome

    def _search(self, segments: CutSegments) -> NestedPlan:
        """Plans that fit; proves nothing beyond the states where there are several levels."""
        return search(
            self.levels,
            segments,
            self.budget,
            limit=self.problem.memory_bytes,
            low=self.bound,
            fewer=self.problem.fewer,
            report=self._reporter(),
        )

    def _buckets(self) -> CutSegments:
        if self._relaxed is None:
            self._relaxed = relaxation(self.dag, self.levels)
        return self._relaxed

    def _rounds(self) -> None:
        """Search chosen states, then more of them around the cuts of the best plan."""
        counts = [level.count for level in self.levels]
        limited = self.problem.memory_bytes is not None

        def price(states: int) -> float:
            return operations(states, counts, self.problem.straight, limited)

        pool = Pool(self.dag, price, self.seed)
        chosen = pool.states()
        spent = 0.0
        visited = 0
        while True:
            sets = arrange(self.dag, chosen)
            outcome = self._search(segments_of(self.dag, sets))
            better = self._keep(sets, outcome)
            visited += 1
            spent += price(len(sets))
            if self._closed() or self.budget.late or spent > ROUNDS:
                break
            if self.best is None:
                other = pool.other_order()
                if other is None:
                    break
                chosen = other
            elif pool.refine(_cuts(outcome.parts or (), sets), better=better):
                chosen = pool.states()
            else:
                break
        self.provers.append(f"dynamic programs over chosen states, {visited} rounds")

    # Results

    def _keep(self, sets: Sequence[int], outcome: NestedPlan) -> bool:
        """Price a plan from the profile; True when it is the best that fits so far."""
        if outcome.parts is None:
            return False
        stages = self._named(outcome.parts, sets)
        try:
            found = evaluate(self.problem, stages)
        except PlanError:
            if self.problem.memory_bytes is None:
                raise
            return False  # a plan that was made without the limit
        if self.best is not None and found.objective >= self.best[0].objective:
            return False
        self.best = found, stages
        self._tell()
        return True

    def _named(
        self, parts: Sequence[NestedStage], sets: Sequence[int]
    ) -> tuple[LevelSolution, ...]:
        return tuple(
            LevelSolution(
                members=self._ids(sets[part.j] & ~sets[part.i]),
                replicas=part.replicas,
                inner=self._named(part.inner, sets),
            )
            for part in parts
        )

    def _ids(self, nodes: int) -> tuple[str, ...]:
        graph = self.problem.graph
        return tuple(graph.nodes[k].id for k in sorted(self.dag.order[v] for v in members(nodes)))

    def _closed(self) -> bool:
        return self.best is not None and relative_gap(self.best[0].objective, self.bound) == 0

    def _reporter(self) -> Report:
        def report(seconds: float, low: float) -> None:
            self._tell()

        return report

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(None if self.best is None else self.best[0].objective, self.bound)

    def _scope(self) -> str:
        counts = "x".join(str(level.count) for level in reversed(self.levels))
        text = f"convex stages of {self.dag.size} nodes on {counts} workers"
        if self.problem.straight:
            text += ", no replication"
        if self.problem.memory_bytes is not None:
            text += f", {format_bytes(self.problem.memory_bytes)} a worker"
        if self.problem.fewer:
            # Exact where the inner tables say how many workers a stage can do with.
            exact = len(self.levels) <= 2 and self.problem.memory_bytes is None
            text += ", then fewest workers" if exact else ", then few workers"
        if self.problem.graph.dropped:
            text += f"; left out, without cost: {', '.join(self.problem.graph.dropped)}"
        return text

    def _without_plan(self, reason: str, *, proved: bool) -> Solution:
        return Solution.of(
            None,
            math.inf if proved else self.bound,
            "; ".join(self.provers),
            self.budget.spent,
            self._scope(),
            reason=reason,
        )

    def _answer(self) -> Solution:
        assert self.best is not None
        found, levels = self.best
        return Solution.of(
            found.objective,
            self.bound,
            "; ".join(self.provers),
            self.budget.spent,
            self._scope(),
            stages=tuple(
                StageSolution(
                    members=leaf.members,
                    replicas=leaf.replicas,
                    details={
                        "compute_seconds": leaf.compute_seconds,
                        "replicas_per_level": list(leaf.replicas_per_level),
                        "memory_bytes": leaf.memory_bytes,
                        "in_flight": leaf.in_flight,
                    },
                )
                for leaf in found.leaves
            ),
            levels=levels if len(self.levels) > 1 else (),
        )


def _cuts(parts: Sequence[NestedStage], sets: Sequence[int]) -> list[int]:
    """The states at which a plan cuts, on all levels."""
    found: dict[int, None] = {}
    for part in parts:
        found[sets[part.i]] = None
        found[sets[part.j]] = None
        found.update(dict.fromkeys(_cuts(part.inner, sets)))
    return list(found)
