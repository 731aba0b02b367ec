"""CP-SAT: proves that no better assignment exists, or finds one.

x[v, s] says "group v is on stage s or later".  Precedence is x[a, s] ⇒ x[b, s]; everything that a
stage pays is implied by clauses in one direction only, because paying more never helps.

Seconds become integers floored at a power-of-two scale: the integer objective never exceeds
scale · true objective, so a bound of the solver's is a bound on the truth.  What the integer model
leaves out (the order of messages in a half-duplex link, faster links next door than on the way
of a long hop) only makes it smaller.  The makespan is a longest path: a path of one assignment
is a linear lower bound for all, so paths are added until the bound meets the best plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from pdcompile.passes.partition.budget import Budget, noticed, solver_for
from pdcompile.passes.partition.loads import Loads
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.thresholds import Thresholds
from pdcompile.plan.makespan import Path

Linear: TypeAlias = Any  # ortools' linear expressions have no useful static type
BITS = 34  # of the upper bound: products with a few hundred microbatches stay below 2**63


class IntegerProgram:
    """One model for one upper bound; `solve` may be called again after `add_path`."""

    def __init__(self, model: Model, upper: float, hint: tuple[int, ...] | None = None):
        from ortools.sat.python import cp_model

        self.model = model
        self.scale = math.ldexp(1.0, BITS - math.frexp(upper)[1])
        self.cp = cp_model.CpModel()
        self.paths: set[Path] = set()
        self.x = Thresholds.of(self.cp, model, upper)
        self.loads = Loads(self.cp, model, self.x, self.scale)
        self.time = self.cp.new_int_var(0, self.units(upper), "time")
        if self.x.possible:
            self.loads.limit_memory()
            if model.problem.objective == "bottleneck":
                self._bottleneck()
            else:
                self._flush()
        if hint is not None:
            self.x.hint(hint)
        self.cp.minimize(self.time)
        self._cp_model = cp_model

    def units(self, seconds: float) -> int:
        return math.floor(seconds * self.scale)

    def below(self, seconds: float) -> None:
        """Only assignments that the relaxation puts at or below this remain."""
        self.cp.add(self.time <= self.units(seconds))

    def _bottleneck(self) -> None:
        stages = range(self.model.num_stages)
        for s in stages:
            self.cp.add(self.time >= self.loads.forward(s) + self.loads.backward(s))
            for transfer in self.loads.transfer(s):
                self.cp.add(self.time >= transfer)
        for s, count in enumerate(self.model.problem.memory.in_flight):
            trip: Linear = self.loads.forward(s) + self.loads.backward(s)
            linked: list[Any] = []
            for t in stages[s + 1 :]:
                trip = trip + self.loads.forward(t) + self.loads.backward(t)
                for hop, kind in (((t - 1, t), "forward"), ((t, t - 1), "backward")):
                    trip = trip + self.loads.hop(hop, kind)
                    linked.append(self.loads.linked(hop, kind))
                self._enforce(count * self.time >= trip, linked)

    def _flush(self) -> None:
        m = self.model.problem.num_microbatches
        for s in range(self.model.num_stages):
            self.cp.add(self.time >= m * (self.loads.forward(s) + self.loads.backward(s)))

    def add_path(self, path: Path) -> bool:
        """The makespan is at least this path's sum, wherever its hops exist; False if known."""
        if path in self.paths:
            return False
        self.paths.add(path)
        total: Linear = 0
        for s in range(self.model.num_stages):
            total = total + path.forward[s] * self.loads.forward(s)
            total = total + path.backward[s] * self.loads.backward(s)
        linked = []
        for hop, kind, count in path.hops:
            total = total + count * self.loads.hop(hop, kind)
            linked.append(self.loads.linked(hop, kind))
        self._enforce(self.time >= total, linked)
        return True

    def forbid(self, stages: tuple[int, ...]) -> None:
        """Not this assignment: rounding of bytes let it through."""
        self.x.clause(part for v, s in enumerate(stages) for part in self.x.elsewhere(v, s))

    def _enforce(self, constraint: Any, literals: Iterable[Any]) -> None:
        conditions = [literal for literal in literals if literal is not True]
        if any(literal is False for literal in conditions):
            return
        added = self.cp.add(constraint)
        if conditions:
            added.only_enforce_if(conditions)

    def solve(
        self,
        budget: Budget,
        seed: int,
        offer: Callable[[tuple[int, ...]], object],
        bounded: Callable[[float], None] | None = None,
        *,
        first: bool = False,
    ) -> tuple[float, tuple[int, ...] | None]:
        """(bound in seconds, assignment of groups).

        The bound is infinite when nothing satisfies the model; there is no assignment when none
        was found in time.  Every solution on the way is offered, `bounded` is told of better
        bounds.  With `first` the first solution ends the search.
        """
        if not self.x.possible:
            return math.inf, None
        solver = solver_for(budget, seed=seed)
        solver.parameters.stop_after_first_solution = first
        if bounded is not None:
            solver.best_bound_callback = lambda bound: bounded(bound / self.scale)
        status = solver.solve(self.cp, self._callback(offer))
        if not (first and status == self._cp_model.FEASIBLE):
            noticed(budget, solver, status)
        if status == self._cp_model.INFEASIBLE:
            return math.inf, None
        bound = solver.best_objective_bound / self.scale
        if status not in (self._cp_model.OPTIMAL, self._cp_model.FEASIBLE):
            return bound, None
        return bound, self.x.read(solver.boolean_value)

    def _callback(self, offer: Callable[[tuple[int, ...]], object]) -> Any:
        thresholds = self.x

        class Offer(self._cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
            def on_solution_callback(self) -> None:
                offer(thresholds.read(self.boolean_value))

        return Offer()
