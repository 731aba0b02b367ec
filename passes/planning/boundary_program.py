"""Boundaries of least weight with no stage above some load: a dynamic program over positions.

A position is a place in the order of the model's code; the weight of a cut there is how many
modules it divides and then the bytes that cross it.  A value that is read several stages later
counts at each boundary; what is sent exactly, the evaluator says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.planning.module_borders import Unit, divided_before
from pdcompile.plan.evaluate import Evaluation

Numbers = NDArray[np.int64]
NEVER = int(np.iinfo(np.int64).max) // 4
MOST = 60_000  # positions x stages; of more positions those of the least weight are used
ROUNDING = 1 + 1e-12


class BoundaryProgram:
    """Cuts of the items of one plan for its stages; what stays empty there stays empty."""

    def __init__(self, plan: Evaluation, units: Sequence[Unit]) -> None:
        self.plan, self.num_items = plan, len(plan.problem.items)
        self.stages = sorted(set(plan.stage_of))
        weight = _weights(plan, units)
        free = [p for p in range(1, self.num_items) if weight[p] < NEVER]
        most = max(MOST // len(self.stages), 2 * len(self.stages))
        if len(free) > most:
            free = sorted(sorted(free, key=lambda p: (int(weight[p]), p))[:most])
        self.positions = np.array([0, *free, self.num_items])
        self.weight = weight[self.positions]
        self._busy = [_busy(plan, s) for s in self.stages]
        self._begin = [self._allowed(s) for s in self.stages]

    def heaviest(self) -> float:
        """Seconds of a microbatch on the stage of the plan that has most, without transfers."""
        loads = dict.fromkeys(self.stages, 0.0)
        rows = dict(zip(self.stages, self._busy, strict=True))
        for i, s in enumerate(self.plan.stage_of):
            loads[s] += float(rows[s][i + 1] - rows[s][i])
        return max(loads.values())

    def cut(self, load: float) -> tuple[int, tuple[int, ...]] | None:
        """(weight, stage of every item) where no stage has more seconds than `load`."""
        least = np.full(len(self.positions), NEVER)
        least[0] = 0
        tables, windows = [], []
        for busy, begin in zip(self._busy, self._begin, strict=True):
            sums = busy[self.positions]
            tables.append(least)
            windows.append(np.maximum(begin, np.searchsorted(sums, sums - load * ROUNDING)))
            least = np.minimum(_least_between(least, windows[-1]) + self.weight, NEVER)
        if least[-1] >= NEVER:
            return None
        end, boundaries = len(self.positions) - 1, []
        for table, window in zip(reversed(tables), reversed(windows), strict=True):
            end = int(window[end]) + int(np.argmin(table[window[end] : end]))
            boundaries.append(int(self.positions[end]))
        return int(least[-1]), self.assigned(boundaries[-2::-1])

    def assigned(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """The stage of every item where stages begin at these positions, from the second on."""
        runs = pairwise((0, *boundaries, self.num_items))
        return tuple(s for s, (a, b) in zip(self.stages, runs, strict=True) for _ in range(a, b))

    def _allowed(self, stage: int) -> Numbers:
        """For a stage that ends at each position the first one at which it may begin."""
        problem, n = self.plan.problem, self.num_items
        after = np.zeros(n + 1, dtype=np.int64)  # by its end
        for a, b in problem.apart:
            after[max(a, b) + 1] = max(after[max(a, b) + 1], min(a, b) + 1)
        last = len(problem.stages) - 1
        pinned = ((i, self.stages[-1] if s == last else s) for i, s in problem.pins)
        barred = [i for i, s in pinned if s != stage]
        for i in (*barred, *(i for i, s in problem.forbidden if s == stage)):
            after[i + 1] = i + 1
        found = np.maximum.accumulate(after)[self.positions]
        begin: Numbers = np.searchsorted(self.positions, found).astype(np.int64)
        held = _held(self.plan, stage)
        if held is not None:
            sums, room = held[0][self.positions], held[1]
            begin = np.maximum(begin, np.searchsorted(sums, sums - room))
        return begin


def _busy(plan: Evaluation, stage: int) -> NDArray[np.float64]:
    """Seconds of the items before each position, if they ran on that stage."""
    on = plan.deployment
    times = 1 + on.recompute[stage]
    items = plan.problem.items
    seconds = [times * item.forward_seconds + item.backward_seconds for item in items]
    width = on.speeds[stage] * len(on.ranks[stage])
    return np.concatenate([[0.0], np.cumsum(seconds)]) / width


def _held(plan: Evaluation, stage: int) -> tuple[NDArray[np.float64], float] | None:
    """(bytes of the items before each position, room for them); None where it has no limit.

    What does not add up over items (what is received, shared parameters, transients) is taken to
    be as in the plan.
    """
    on = plan.deployment
    limit, ranks = on.limits[stage], on.ranks[stage]
    if limit is None or sum(one == ranks for one in on.ranks) > 1:
        return None
    holding, items = on.holdings[stage], plan.problem.items
    factor = holding.versions + holding.gradient_buffers + holding.optimizer_factor
    held = [
        factor * item.trainable_bytes
        + (item.parameter_bytes - item.trainable_bytes)
        + holding.saved * item.saved_bytes
        for item in items
    ]
    own = sum(size for size, s in zip(held, plan.stage_of, strict=True) if s == stage)
    return np.concatenate([[0.0], np.cumsum(held)]), limit - (plan.needed(stage) - own)


def _weights(plan: Evaluation, units: Sequence[Unit]) -> Numbers:
    """Of a cut before each item, and 0 at both ends."""
    problem, n = plan.problem, len(plan.problem.items)
    change = np.zeros(n + 2, dtype=np.int64)
    for value in problem.traffic:
        size = value.forward_bytes + value.backward_bytes
        change[value.producer + 1] += size
        change[max(value.consumers, default=value.producer) + 1] -= size
    crossing = np.cumsum(change)[: n + 1]
    most = int(crossing.max()) * len(plan.stages) + 1
    found = np.array(divided_before(units, n), dtype=np.int64) * most + crossing
    for group in problem.together:
        found[min(group) + 1 : max(group) + 1] = NEVER
    found[0] = found[n] = 0
    return found


def _least_between(values: Numbers, first: Numbers) -> Numbers:
    """For each position the least of the values from the given one up to the one before it."""
    n = len(values)
    rows = [values]
    while 2 ** len(rows) <= n:
        half = 2 ** (len(rows) - 1)
        shifted = np.full(n, NEVER)
        shifted[: n - half] = rows[-1][half:]
        rows.append(np.minimum(rows[-1], shifted))
    table = np.stack(rows)
    ends = np.arange(n)
    length = np.maximum(ends - first, 0)
    level = np.where(length > 0, np.log2(np.maximum(length, 1)).astype(np.int64), 0)
    left = table[level, np.minimum(first, n - 1)]
    right = table[level, np.maximum(ends - (1 << level), 0)]
    return np.where(length > 0, np.minimum(left, right), NEVER)
