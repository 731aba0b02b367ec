"""The integer program of a partition for CP-SAT: loads, and what to minimise.

What a stage pays follows from the `thresholds` of its groups; each expression holds at least what
the assignment costs, and a solver that minimises never wants it higher.  For a flow e that starts
at stage p and has sinks on other stages:

    received(e, s)   a sink is on s and s ≠ p
    leaves(e, s)     p = s and a sink is on a later stage

Seconds become integers floored at a power-of-two scale: the integer objective never exceeds
scale · true objective, so a bound of the solver's is a bound on the truth.  What the integer model
leaves out (how many stages receive one value, gradients that a stage passes on, the order of
messages in a half-duplex link, faster links next door than on the way of a long hop) only makes it
smaller.  The makespan is a longest path: a path of one assignment
is a linear lower bound for all, so paths are added until the bound meets the best plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeAlias

from pdcompile.cluster import slowest
from pdcompile.passes.partition.bounds import crude_upper
from pdcompile.passes.partition.budget import Budget, OutOfTimeError, minimize
from pdcompile.passes.partition.model import Flow, Model
from pdcompile.passes.partition.thresholds import Literal, Thresholds, negated
from pdcompile.plan.evaluate import Evaluation
from pdcompile.plan.makespan import Path
from pdcompile.plan.wires import Direction, StagePair
from pdcompile.schedule.registry import PARTS

Linear: TypeAlias = Any  # an expression of ortools, which have no useful static type
BITS = 34  # of the largest sums: products with a few hundred microbatches stay below 2**63


class Loads:
    """Expressions in integer units (seconds · scale, floored; no more than any limit needs)."""

    def __init__(self, cp: Any, model: Model, x: Thresholds, scale: float):
        self.cp, self.model, self.x, self.scale = cp, model, x, scale
        self.stages = model.problem.stages
        # Made once each: a flow's literal is shared by all who ask.
        self.received = cache(self._received)
        self.leaves = cache(self._leaves)
        self.source = cache(self._source)
        self.pair = cache(self._pair)
        self.linked = cache(self._linked)
        self.hop = cache(self._hop)
        self.forward = cache(lambda s: self._work(s, self.model.forward))
        self.backward = cache(lambda s: self._work(s, self.model.backward))

    def units(self, seconds: float) -> int:
        return min(math.floor(seconds * self.scale), 1 << BITS)

    def transfer(self, stage: int) -> list[Linear]:
        """Seconds sent and received by the stage; their sum when links are half duplex."""
        link, before = self.stages[stage], self.stages[max(stage - 1, 0)]
        sent: Linear = 0
        received: Linear = 0
        for e, flow in enumerate(self.model.flows):
            out = self.units(flow.forward_seconds(link))
            back_in = self.units(flow.backward_seconds(link))
            into = self.units(flow.forward_seconds(before))
            back_out = self.units(flow.backward_seconds(before))
            if out or back_in:
                literal = self.leaves(e, stage)
                sent, received = sent + out * literal, received + back_in * literal
            if into or back_out:
                literal = self.received(e, stage)
                sent, received = sent + back_out * literal, received + into * literal
        full = link.full_duplex and before.full_duplex
        parts = [sent, received] if full else [sent + received]
        return [part for part in parts if not isinstance(part, int)]

    def limit_memory(self) -> None:
        """`Holding`'s formula for every stage with a limit; bytes floored to units."""
        model = self.model
        for s, stage in enumerate(self.stages):
            if stage.memory_bytes is None:
                continue
            unit = 2 ** max(0, stage.memory_bytes.bit_length() - BITS)
            most = -(-stage.memory_bytes // unit)

            def units(size: float, unit: int = unit, most: int = most) -> int:
                """Units, at most one more than there are: products of whole models stay small."""
                return min(math.floor(size) // unit, most + 1)

            held = model.problem.holding(s)
            total: Linear = 0
            largest = units(max(model.workspace_bytes))
            workspace = self.cp.new_int_var(0, largest, f"workspace{s}")
            for v in range(model.num_groups):
                if not self.x.can(v, s):
                    continue
                own = math.floor(model.fixed_bytes(v, s)) + held.saved * model.saved_bytes[v]
                total = total + units(own) * self.x.at(v, s)
                if size := units(model.workspace_bytes[v]):
                    self.cp.add(workspace >= size * self.x.at(v, s))
            for e, flow in enumerate(model.flows):
                if size := units(flow.received_bytes * held.received):
                    total = total + size * self.received(e, s)
                if size := units(flow.returned_bytes * held.returned):
                    total = total + size * self.leaves(e, s)
            for c, copy in enumerate(model.copies):
                absent = [self.x.elsewhere(v, s) for v in copy.ends]
                here = self.x.implied(f"held{c}_{s}", absent)
                total = total + units(model.held_bytes(copy, s)) * here
                if size := units(model.updated_bytes(copy, s)):
                    earlier = [negated(self.x.from_stage(v, s)) for v in copy.ends]
                    cases = [[*one, *earlier] for one in absent]
                    total = total + size * self.x.implied(f"updated{c}_{s}", cases)
            self.cp.add(total + workspace <= most)

    def _work(self, stage: int, seconds: tuple[float, ...]) -> Linear:
        speed = self.stages[stage].speed
        terms = [
            (units, v)
            for v, own in enumerate(seconds)
            if self.x.can(v, stage) and (units := self.units(own / speed))
        ]
        return sum(units * self.x.at(v, stage) for units, v in terms)

    # -- flows and stages --------------------------------------------------------------------

    def _source(self, e: int, stage: int) -> Literal:
        """The flow starts on this stage or later: all its sources are."""
        sources = self.model.flows[e].sources
        parts = [self.x.from_stage(v, stage) for v in sources]
        if len(parts) == 1 or any(part is False for part in parts):
            return parts[0] if len(parts) == 1 else False
        if all(part is True for part in parts):
            return True
        literal = self.cp.new_bool_var(f"source{e}_{stage}")
        for part in parts:
            self.x.clause([negated(literal), part])
        self.x.clause([literal, *(negated(part) for part in parts)])
        return literal

    def _not_source(self, e: int, stage: int) -> list[Literal]:
        """One of these holds unless the flow starts on the stage."""
        return [negated(self.source(e, stage)), self.source(e, stage + 1)]

    def _received(self, e: int, stage: int) -> Literal:
        earlier = self.source(e, stage)  # negated: the flow starts before the stage
        sinks = self.model.flows[e].sinks
        cases = [[*self.x.elsewhere(v, stage), earlier] for v in sinks]
        return self.x.implied(f"received{e}_{stage}", cases)

    def _leaves(self, e: int, stage: int) -> Literal:
        here = self._not_source(e, stage)
        later = [negated(self.x.from_stage(v, stage + 1)) for v in self.model.flows[e].sinks]
        return self.x.implied(f"leaves{e}_{stage}", [[*here, part] for part in later])

    # -- hops between two stages ---------------------------------------------------------------

    def _pair(self, e: int, near: int, far: int) -> Literal:
        """The flow starts on `near` and has a sink on `far`."""
        here = self._not_source(e, near)
        cases = [[*here, *self.x.elsewhere(v, far)] for v in self.model.flows[e].sinks]
        return self.x.implied(f"pair{e}_{near}_{far}", cases)

    def _carries(self, hop: StagePair, kind: Direction, flow: Flow) -> bool:
        """True if the flow uses the hop whenever it joins the two stages."""
        if flow.tied != (kind == "final"):
            return False
        # A gradient's chain may visit a stage in between; next door it cannot.
        direct = abs(hop[0] - hop[1]) == 1 or len(set(flow.sources) | set(flow.sinks)) == 2
        return hop[0] < hop[1] or (flow.backward_messages > 0 and direct)

    def _hop(self, hop: StagePair, kind: Direction) -> Linear:
        """Seconds of everything that one hop carries, at least."""
        near, far = min(hop), max(hop)
        link = slowest(self.stages[near:far])
        total: Linear = 0
        for e, flow in enumerate(self.model.flows):
            if self._carries(hop, kind, flow):
                seconds = flow.backward_seconds if hop[0] > hop[1] else flow.forward_seconds
                once = self.model.problem.num_microbatches if kind == "final" else 1
                if units := self.units(seconds(link) * once):
                    total = total + units * self.pair(e, near, far)
        return total

    def _linked(self, hop: StagePair, kind: Direction) -> Literal:
        """True if something that compute waits for takes the hop, at least."""
        near, far = min(hop), max(hop)
        carried = (e for e, one in enumerate(self.model.flows) if self._carries(hop, kind, one))
        cases = [[negated(self.pair(e, near, far))] for e in carried]
        return self.x.implied(f"linked{near}_{far}_{kind}", cases)


class IntegerProgram:
    """One model for one upper bound; `solve` may be called again after `add_path`."""

    def __init__(self, model: Model, upper: float):
        from ortools.sat.python import cp_model

        self.model = model
        self.scale = math.ldexp(1.0, BITS - math.frexp(upper)[1])
        self.cp = cp_model.CpModel()
        self.paths: set[Path] = set()
        self.x = Thresholds.of(self.cp, model, upper)
        self.loads = Loads(self.cp, model, self.x, self.scale)
        self.time = self.cp.new_int_var(0, self.loads.units(upper), "time")
        if self.x.possible:
            self.loads.limit_memory()
            if model.problem.objective == "bottleneck":
                self._bottleneck()
            else:
                self._flush()
        self.cp.minimize(self.time)

    def below(self, seconds: float) -> None:
        """Only assignments that the relaxation puts at or below this remain."""
        self.cp.add(self.time <= self.loads.units(seconds))

    def _bottleneck(self) -> None:
        stages = range(self.model.num_stages)
        for s in stages:
            self.cp.add(self.time >= self.loads.forward(s) + self.loads.backward(s))
            for transfer in self.loads.transfer(s):
                self.cp.add(self.time >= transfer)
        in_flight = self.model.problem.in_flight
        for s in range(len(in_flight)):  # `period` of plan/times.py
            trip: Linear = self.loads.forward(s) + self.loads.backward(s)
            linked: list[Any] = []
            for t in stages[s + 1 :]:
                trip = trip + self.loads.forward(t) + self.loads.backward(t)
                for hop, kind in (((t - 1, t), "forward"), ((t, t - 1), "backward")):
                    trip = trip + self.loads.hop(hop, kind)
                    linked.append(self.loads.linked(hop, kind))
                apart = in_flight[s] - in_flight[t] + 1
                self._enforce(apart * self.time >= trip, linked)

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
            total = total + PARTS * path.forward[s] * self.loads.forward(s)
            total = total + round(PARTS * path.backward[s]) * self.loads.backward(s)
        linked = []
        for hop, kind, count in path.hops:
            total = total + PARTS * count * self.loads.hop(hop, kind)
            linked.append(self.loads.linked(hop, kind))
        self._enforce(PARTS * self.time >= total, linked)
        return True

    def forbid(self, stages: tuple[int, ...]) -> None:
        """Forbid this assignment: rounding of bytes let it through."""
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
        offer: Callable[[tuple[int, ...]], object] = lambda _: None,
        bounded: Callable[[float], None] = lambda _: None,
        *,
        first: bool = False,
    ) -> tuple[float, tuple[int, ...] | None]:
        """(bound in seconds, assignment of groups).

        The bound is infinite when nothing satisfies the model; there is no assignment when none
        was found in time.  Every solution on the way is offered, and `bounded` called with
        better bounds.  With `first` the first solution ends the search.
        """
        if not self.x.possible:
            return math.inf, None
        found: tuple[int, ...] | None = None

        def on_solution(value: Callable[[Any], bool]) -> bool:
            nonlocal found
            found = self.x.read(value)
            offer(found)
            return first

        solved = minimize(
            self.cp, budget, on_solution, seed=seed,
            on_bound=lambda units: bounded(units / self.scale),
        )  # fmt: skip
        return math.inf if solved.infeasible else solved.bound / self.scale, found


ATTEMPTS = 20  # solutions that fit only by rounding, after which the search is given up


def any_assignment(model: Model, budget: Budget, seed: int) -> tuple[int, ...] | None:
    """The stages of the groups in some assignment that breaks nothing; None: there is none.

    Raises:
        OutOfTimeError: the budget ended first.
    """
    program = IntegerProgram(model, crude_upper(model))
    for _ in range(ATTEMPTS):  # rounding of bytes can let through what does not fit
        bound, groups = program.solve(budget, seed, first=True)
        if bound == math.inf:
            return None
        if groups is None:
            break
        if not any(Evaluation(model.problem, model.items_of(groups)).violations()):
            return groups
        program.forbid(groups)
    raise OutOfTimeError
