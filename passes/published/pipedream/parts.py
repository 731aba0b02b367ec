"""Parts: a plan as nested stages between states, read back from the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdcompile.passes.published.pipedream.recursion import Table
from pdcompile.passes.published.pipedream.threshold import Cut


@dataclass(frozen=True, slots=True)
class Part:
    """States i → j on `replicas` components, and the pipeline inside each (none in a worker)."""

    i: int
    j: int
    replicas: int
    inner: tuple[Part, ...] = ()


def build(stages: Sequence[Cut], tables: Sequence[Table], budgets: Sequence[float]) -> list[Part]:
    """The outermost stages with their insides; `budgets`: seconds that a component may take.

    Every inside takes the fewest components that its budget allows, which leaves workers idle
    where they would change nothing.
    """
    return [
        Part(stage.i, stage.j, stage.replicas, _inside(tables, stage.i, stage.j, budget))
        for stage, budget in zip(stages, budgets, strict=True)
    ]


def spare(seconds: float, reduced: float, replicas: int, target: float) -> float:
    """Seconds that a component may take for its stage to stay within the target."""
    return max(seconds, target * replicas - reduced)


def _inside(tables: Sequence[Table], i: int, j: int, budget: float) -> tuple[Part, ...]:
    if not tables:
        return ()
    table = tables[-1]
    best = table.best
    budget = max(budget, float(best[-1][i, j]))
    count = next(m for m in range(1, len(best)) if best[m][i, j] <= budget)
    return _pipeline(tables, i, j, count, budget)


def _pipeline(
    tables: Sequence[Table], i: int, j: int, count: int, budget: float
) -> tuple[Part, ...]:
    """Stages of i → j within the budget, on up to `count` components of the last table."""
    table = tables[-1]
    level, segments, best = table.level, table.segments, table.best
    while count > 1 and best[count - 1][i, j] <= budget:
        count -= 1
    parameters = segments.parameters
    single = 1 if level.straight else count
    for m in range(1, single + 1):
        stage = float(level.first(table.seconds[i, j], parameters[i, j], m))
        if stage <= budget:
            reduced = float(level.first(parameters[i, j] * 0, parameters[i, j], m)) * m
            inner = spare(float(table.seconds[i, j]), reduced, m, budget)
            return (Part(i, j, m, _inside(tables[:-1], i, j, inner)),)
    for m in range(1, min(single, count - 1) + 1):
        edge = level.boundary(segments.cut, m)
        stages = level.added(table.seconds[:, j], parameters[:, j], m)
        worst = np.maximum(np.maximum(stages, edge), np.maximum(edge[j], best[count - m][i]))
        k = int(worst.argmin())
        if worst[k] <= budget:
            reduced = float(level.added(parameters[k, j] * 0, parameters[k, j], m)) * m
            inner = spare(float(table.seconds[k, j]), reduced, m, budget)
            last = Part(k, j, m, _inside(tables[:-1], k, j, inner))
            return (*_pipeline(tables, i, k, count - m, budget), last)
    raise AssertionError(f"no way back through the table from {j} to {i}")  # pragma: no cover
