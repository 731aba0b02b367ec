"""Lower bound on a flush for any cut, and the shares of the work that a good cut has.

The order of a schedule is given, so a chain of tasks in which each waits for the one before it is
as long in every plan whose stages wait for their neighbours: T ≥ Σ_s c_s F_s + d_s W_s + its hops,
where c_s and d_s count how often it runs stage s forward and backward.  Any mixture of such chains
bounds T as well, and each group adds at least what it does on the cheapest stage.  The mixture that
is best if all groups were alike is the dual of a linear program: the least T and the share x_s of
all work of each stage such that T is no less than any chain.  There are too many chains to list
them: the critical one of the best shares so far is added until none is longer (cutting planes:
Kelley, 1960).  Equal shares are seldom best: with as many microbatches as stages the first stage
does up to one and a half times as much as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.budget import Late, handle_interrupts
from pdcompile.plan.makespan import Path
from pdcompile.plan.times import PipelineTimes

Array = NDArray[np.float64]
CLOSE = 1e-4  # relative: where the rounds end
ROUNDS = 150
STEP = 0.5  # of the way from the best shares to those of the linear program, every other time


@dataclass(frozen=True)
class Row:
    """Stages of one schedule that pass every microbatch on to the next one.

    Args:
        num_microbatches: of one replica.
        ranks: of each stage; empty: one of its own.
        hops: seconds of a message to the next stage and of its gradient back, at least.
        again: whether every stage runs its forward a second time.
    """

    schedule: str
    num_microbatches: int
    warmup: tuple[int, ...]
    speeds: tuple[float, ...]
    hops: tuple[tuple[float, float], ...]
    ranks: tuple[int, ...] = ()
    again: bool = False

    def critical(self, forward: Array, backward: Array) -> Path:
        """A longest chain where the stages take so many seconds."""
        there = {(s, s + 1): ahead for s, (ahead, _) in enumerate(self.hops)}
        back = {(s + 1, s): home for s, (_, home) in enumerate(self.hops)}
        both = backward + forward if self.again else backward
        times = PipelineTimes.of_hops(
            forward.tolist(), both.tolist(), there, back, schedule=self.schedule,
            again=forward.tolist() if self.again else (), ranks=self.ranks,
        )  # fmt: skip
        return times.critical_path(self.warmup, self.num_microbatches)


@dataclass(frozen=True)
class AnyCut:
    """The best mixture of chains: how often F and W of each stage count, and seconds of its hops.

    `shares`: of all work, of each stage, where T is least.
    """

    forward: Array  # of one second at the stage's speed
    backward: Array
    hops: float
    shares: Array

    def each(
        self, forward: Sequence[float], backward: Sequence[float], ranges: Array | None = None
    ) -> Array:
        """Seconds that every group adds at least, on one of the stages where it may be.

        Args:
            ranges: [2, groups], the first and the last stage of each; None: any.
        """
        table = np.outer(self.forward, forward) + np.outer(self.backward, backward)
        if ranges is not None:
            stages = np.arange(len(self.shares))[:, None]
            table = np.where((ranges[0] <= stages) & (stages <= ranges[1]), table, np.inf)
        found: Array = table.min(0)
        return found


def any_cut(row: Row, forward: float, backward: float, late: Late) -> AnyCut:
    """The mixture for so many seconds of forward and backward in all, at speed 1."""
    from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

    count, speeds = len(row.speeds), np.array(row.speeds)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    seconds = solver.NumVar(0.0, solver.infinity(), "")
    parts = [solver.NumVar(0.0, 1.0, "") for _ in range(count)]
    whole = solver.RowConstraint(1.0, 1.0, "")
    for part in parts:
        whole.SetCoefficient(part, 1.0)
    solver.Minimize(seconds)
    shares = center = speeds / speeds.sum()
    best, chains, rows = np.inf, list[tuple[Array, Array, float]](), []
    for n in range(ROUNDS):
        path = row.critical(shares * forward / speeds, shares * backward / speeds)
        chain = _counts(path, row)
        each = (chain[0] * forward + chain[1] * backward) / speeds
        length = float(each @ shares) + chain[2]
        if length <= best:
            best, center = length, shares
        chains.append(chain)
        rows.append(solver.RowConstraint(-solver.infinity(), -chain[2], ""))
        rows[-1].SetCoefficient(seconds, -1.0)
        for s in np.flatnonzero(each):
            rows[-1].SetCoefficient(parts[s], float(each[s]))
        status = solver.Solve()
        handle_interrupts()
        if status != pywraplp.Solver.OPTIMAL:
            break
        shares = np.array([part.solution_value() for part in parts])
        if best - seconds.solution_value() <= CLOSE * best or late():
            break
        if n % 2:
            shares = (1 - STEP) * center + STEP * shares
    weights = np.maximum([-one.dual_value() for one in rows], 0.0)
    weights = weights / weights.sum() if weights.sum() else np.full(len(rows), 1 / len(rows))
    ahead, home, hops = (
        np.tensordot(weights, np.array(each), 1) for each in zip(*chains, strict=True)
    )
    return AnyCut(ahead / speeds, home / speeds, float(hops), center)


def _counts(path: Path, row: Row) -> tuple[Array, Array, float]:
    """F and W of each stage on a chain, and seconds of its hops."""
    forward, backward = np.array(path.forward, dtype=float), np.array(path.backward)
    hops = sum(count * row.hops[min(hop)][hop[0] > hop[1]] for hop, _, count in path.hops)
    return forward + row.again * backward, backward, float(hops)
