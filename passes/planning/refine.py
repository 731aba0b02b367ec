"""Refine: planned stages are timed once, op costs rescaled by what was found, and solved again.

A stage is not the sum of its ops: each op was measured alone, with its operands in the caches and
one call of autograd to itself.  One factor takes out what all stages have in common.  What is left
in one stage goes to that stage's ops as far as it is more than chance: nearly all of a large
difference, little of a small one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pdcompile.ir.graph import Op, OpGraph
from pdcompile.passes.coarsen.items import op_seconds
from pdcompile.passes.profile.stage_times import StageTimes
from pdcompile.plan import Plan

TOLERANCE = 0.10  # of a stage's time: below it the costs are good enough
ROUNDS = 2  # of measuring all stages
COUNTS = 0.05  # of the slowest stage: errors of shorter stages decide nothing
LEAST, MOST = 0.25, 4.0  # factors beyond are no calibration any more
CHANCE = 0.10  # what two measurements of a stage may differ by

Measure = Callable[[Plan], Sequence[StageTimes]]
Solve = Callable[[OpGraph], Plan]


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors of op costs: of every op, of the ops of each measured stage besides, and `of` each op
    by its name the product."""

    common: float
    stages: tuple[float, ...]
    of: Mapping[str, float]

    def __str__(self) -> str:
        stages = ", ".join(f"{factor:.2f}" for factor in self.stages)
        return f"x {self.common:.2f}, by stage x {stages}"


@dataclass(frozen=True, slots=True)
class Round:
    """One plan whose stages were measured: seconds of forward and backward, stage by stage."""

    predicted_seconds: tuple[float, ...]
    measured_seconds: tuple[float, ...]
    scale: Scale | None = None  # None: the costs were good enough
    cached: bool = False  # all stages had been measured before

    @property
    def errors(self) -> tuple[float, ...]:
        """Errors of the forecast, as a fraction of what was measured."""
        pairs = zip(self.predicted_seconds, self.measured_seconds, strict=True)
        return tuple(p / max(m, 1e-12) - 1 for p, m in pairs)

    @property
    def worst(self) -> float:
        """The largest error of a stage that counts, without its sign."""
        least = COUNTS * max(self.measured_seconds)
        pairs = zip(self.errors, self.measured_seconds, strict=True)
        return max(abs(error) for error, seconds in pairs if seconds >= least)


@dataclass(frozen=True, slots=True)
class Refined:
    """The plan in the end, the graph with the costs that it was made with, and what was done."""

    plan: Plan
    graph: OpGraph
    rounds: tuple[Round, ...]

    def __str__(self) -> str:
        parts = []
        for this, after in pairwise((*self.rounds, None)):
            assert this is not None
            measured = ", ".join(f"{seconds * 1e3:.3g}" for seconds in this.measured_seconds)
            errors = ", ".join(f"{100 * error:+.0f} %" for error in this.errors)
            when = " before (from the cache)" if this.cached else ""
            parts.append(f"stages measured{when}: {measured} ms; the forecast was off by {errors}")
            if this.scale is not None:
                parts.append(f"op costs rescaled: {this.scale}")
                parts.append("another cut is better now" if after else "planned again with them")
        return "; ".join(parts)


def refine(plan: Plan, graph: OpGraph, measure: Measure, solve: Solve) -> Refined:
    """Measure and solve again until the forecast is good enough or the plan stays.

    Args:
        graph: with the costs that the plan was made with.
        measure: times every stage of a plan, on the device that the costs are of.
        solve: the plan of a graph with other costs.
    """
    rounds: list[Round] = []
    while len(rounds) < ROUNDS:
        cut = [stage.ops for stage in plan.stages]
        times = measure(plan)
        found = compared(graph, cut, times)
        if found.worst < TOLERANCE:
            rounds.append(found)
            break
        scale = rescale(graph, cut, times)
        rounds.append(replace(found, scale=scale))
        graph = rescaled(graph, scale.of)
        plan = solve(graph)
        if [stage.ops for stage in plan.stages] == cut:
            break
    return Refined(plan, graph, tuple(rounds))


def compared(graph: OpGraph, cut: Sequence[Sequence[str]], times: Sequence[StageTimes]) -> Round:
    """Sums of the ops' costs beside what was measured of the stages that they make up."""
    seconds = {op.name: op_seconds(op) for op in graph.ops}
    predicted = tuple(math.fsum(seconds[name] for name in names) for names in cut)
    cached = all(one.cached for one in times)
    return Round(predicted, tuple(one.seconds for one in times), cached=cached)


def rescale(graph: OpGraph, cut: Sequence[Sequence[str]], times: Sequence[StageTimes]) -> Scale:
    """Factors for the costs of a graph, from the measured stages of one cut."""
    found = compared(graph, cut, times)
    pairs = [*zip(found.predicted_seconds, found.measured_seconds, strict=True)]
    predicted, measured = map(math.fsum, zip(*pairs, strict=True))
    common = _bounded(measured / predicted) if predicted and measured else 1.0
    stages = [_beyond_chance(m / (common * p)) if p and m else 1.0 for p, m in pairs]
    of = {
        name: _bounded(common * factor)
        for names, factor in zip(cut, stages, strict=True)
        for name in names
    }
    return Scale(common, tuple(stages), of)


def rescaled(graph: OpGraph, factors: Mapping[str, float]) -> OpGraph:
    """The graph with each op's seconds times its factor; ops without one stay."""
    return replace(graph, ops=tuple(_rescaled(op, factors.get(op.name, 1.0)) for op in graph.ops))


def _rescaled(op: Op, factor: float) -> Op:
    if op.cost is None:
        return op
    forward, backward = op.cost.forward_seconds * factor, op.cost.backward_seconds * factor
    return replace(op, cost=replace(op.cost, forward_seconds=forward, backward_seconds=backward))


def _beyond_chance(ratio: float) -> float:
    """The part of a ratio that is kept: its logarithm times signal / (signal + noise)."""
    found = math.log(ratio)
    return _bounded(math.exp(found * found**2 / (found**2 + CHANCE**2)))


def _bounded(factor: float) -> float:
    return min(max(factor, LEAST), MOST)
