"""Lower bound for ranks that hold several stages, for any cut: a linear program over orders.

The order of a place's tasks is given.  From one of them to a later one it works on all that lies
between, so for every pair

    T ≥ what the first one waits for + the tasks from one to the other + what waits for the last.

The first forward of a stage waits for those of all earlier stages, its first backward for all
forwards and the backwards of later ones; after its last forward come those of later stages and all
backwards, after its last backward those of earlier stages, and after its last gradients their
reduction.  Each is a sum over stages of their F, W and bytes.  Any weights of such inequalities
make one bound of them: a group adds at least what it does on the cheapest stage.  The weights that
are best if all groups were alike are the duals of a linear program, and its answer says how much
work each stage should have (`shares`).

Stages that hold a group of the heaviest path of values with gradients wait for each other along
it.  Of others, with what is beside the path, nobody is said to wait: all of them between the same
two that hold some of it have together what lies beside one cut, so at most every second stage
counts for less.  What they wait for themselves is short by what lies beside a group of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pdcompile.passes.partition.space.line import Array, heaviest_path, sides, with_gradients
from pdcompile.passes.partition.space.pipelines import PreparedProblem
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.problem.space import Setting
from pdcompile.schedule import Action
from pdcompile.schedule.registry import StageWork, Task, kind_of

NOTHING = 1e-3  # of all work, that groups may do which no gradient passes

BYTES = 2  # the row of bytes that are reduced, behind those of seconds of forward and of backward


class _Row(NamedTuple):
    """Counts of the F, W and bytes of every stage, how often each counts: [3, stages]."""

    around: Array  # what is waited for, before and after
    tasks: Array


@dataclass
class OrderProgram:
    """All stages of one setting on the places of a schedule.

    Args:
        replicas: of each place.
        placement: the place of every stage.
        again: whether every stage runs its forward a second time.
    """

    prepared: PreparedProblem
    setting: Setting
    seats: Seats
    replicas: int
    placement: Sequence[int]
    again: bool = False
    _speeds: Array = field(init=False)

    def __post_init__(self) -> None:
        self._speeds = np.array(
            [self.seats.speed(place * self.replicas, self.replicas) for place in self.placement]
        )

    @cached_property
    def bound(self) -> float:
        """Seconds of a minibatch that no cut is below whose stages all hold something that a
        gradient passes; 0 where what none passes takes long."""
        slack = _slack(self.prepared)
        if slack is None:
            return 0.0
        weights, total = self._weights, float(self._weights.sum())
        if not total:
            return 0.0
        around, tasks = (
            np.tensordot(weights, np.array(part), 1) for part in zip(*self._rows, strict=True)
        )
        model = self.prepared.whole
        groups = np.array([model.forward, model.backward, model.trainable_bytes], dtype=float)
        least = (groups.T @ (around + tasks)).min(axis=1).sum()
        lost = np.sort((self._beside @ around[:BYTES]).max(axis=0))[::-1]
        least -= lost[: (len(lost) + 1) // 2].sum()
        seconds = float(least) / total - slack / float(self._speeds.min())
        return max(0.0, seconds) * (1 - 1e-9)

    @cached_property
    def _beside(self) -> Array:
        """[j]: seconds of forward and of backward that may be on either side of a place."""
        path, model = self.prepared.path(self.prepared.whole.num_groups), self.prepared.whole
        return np.array([path.across(row) for row in (model.forward, model.backward)]).T

    @property
    def shares(self) -> Array:
        """Share of all work of each stage in the answer of the linear program."""
        return self._solved[1]

    @property
    def _weights(self) -> Array:
        return self._solved[0]

    @cached_property
    def _solved(self) -> tuple[Array, Array]:
        """Weights of the rows, and shares of the stages, for groups that are all alike."""
        from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

        model = self.prepared.whole
        amounts = np.array([sum(model.forward), sum(model.backward), sum(model.trainable_bytes)])
        amounts = amounts / (amounts[:BYTES].sum() or 1.0)  # so that it is about 1
        solver = pywraplp.Solver.CreateSolver("GLOP")
        seconds = solver.NumVar(0.0, solver.infinity(), "")
        shares = [solver.NumVar(0.0, 1.0, "") for _ in self.placement]
        whole = solver.RowConstraint(1.0, 1.0, "")
        for share in shares:
            whole.SetCoefficient(share, 1.0)
        rows = []
        for row in self._rows:
            found = solver.RowConstraint(-solver.infinity(), 0.0, "")
            found.SetCoefficient(seconds, -1.0)
            each = amounts @ (row.around + row.tasks)
            for s in np.flatnonzero(each):
                found.SetCoefficient(shares[s], float(each[s]))
            rows.append(found)
        solver.Minimize(seconds)
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return np.zeros(len(rows)), np.full(len(shares), 1 / len(shares))
        weights = np.maximum([-row.dual_value() for row in rows], 0.0)
        return weights, np.array([share.solution_value() for share in shares])

    # -- rows ----------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> list[_Row]:
        return [row for place in sorted(set(self.placement)) for row in self._of_place(place)]

    def _of_place(self, place: int) -> Iterator[_Row]:
        kind, count = kind_of(self.setting.schedule), len(self.placement)
        share = -(-self.setting.num_microbatches // self.replicas)
        held = [s for s in range(count) if self.placement[s] == place]
        work = [StageWork(s, range(share), num_stages=count) for s in held]
        tasks = [task for task in kind.order(work) if task.action is not Action.STEP]
        spent = self._spent(tasks)
        for first, before in self._heads(held, tasks):
            for last, after in self._tails(held, tasks):
                if first <= last:
                    yield _Row(before + after[0], spent[last + 1] - spent[first] + after[1])

    def _spent(self, tasks: Sequence[Task]) -> Array:
        """[n]: what the first n tasks count."""
        found = np.zeros((len(tasks) + 1, 3, len(self.placement)))
        for n, task in enumerate(tasks, start=1):
            found[n, :BYTES, task.stage] = self._seconds(task.action) / self._speeds[task.stage]
        return found.cumsum(0)

    def _seconds(self, action: Action) -> tuple[float, float]:
        """Times that a task counts F and W."""
        first = kind_of(self.setting.schedule).halves(1.0)[0]
        if action is Action.FORWARD:
            return 1.0, 0.0
        if action is Action.BACKWARD_WEIGHT:
            return 0.0, 1.0 - first
        return float(self.again), 1.0 if action is Action.BACKWARD else first

    def _passing(self, action: Action, begin: int = 0, end: int | None = None) -> Array:
        """One microbatch through the stages from `begin` up to `end`."""
        found = np.zeros((3, len(self.placement)))
        found[:BYTES, begin:end] = np.array(self._seconds(action))[:, None]
        return found / self._speeds

    def _home(self, begin: int = 0, end: int | None = None) -> Array:
        """The same of what the stage before waits for in a backward."""
        kind = kind_of(self.setting.schedule)
        splits = kind.splits_backward
        return self._passing(Action.BACKWARD_INPUT if splits else Action.BACKWARD, begin, end)

    def _heads(self, held: Sequence[int], tasks: Sequence[Task]) -> Iterator[tuple[int, Array]]:
        """Tasks of a place, and what surely ran before them elsewhere."""
        for s in held:
            forwards, homeward, _ = _tasks_of(s, tasks)
            yield forwards[0], self._passing(Action.FORWARD, 0, s)
            yield homeward[0], self._passing(Action.FORWARD) + self._home(s + 1)

    def _tails(
        self, held: Sequence[int], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, tuple[Array, Array]]]:
        """Tasks of a place, and what surely runs after them: elsewhere, and of their own stage."""
        none = np.zeros((3, len(self.placement)))
        yield len(tasks) - 1, (none, none)
        for s in held:
            forwards, homeward, ended = _tasks_of(s, tasks)
            yield forwards[-1], (self._passing(Action.FORWARD, s + 1) + self._home(), none)
            yield homeward[-1], (self._home(0, s), none)
            if self.replicas > 1:
                r = self.replicas
                link = self.seats.ring(self.placement[s] * r, r)
                reduced = none.copy()
                reduced[BYTES, s] = 2 * (r - 1) / r / link.bytes_per_second
                yield ended, (none, reduced)


def _tasks_of(s: int, tasks: Sequence[Task]) -> tuple[list[int], list[int], int]:
    """Tasks of a stage: forwards, those that the stage before waits for, the last backward."""
    own = [(n, task.action) for n, task in enumerate(tasks) if task.stage == s]
    forwards = [n for n, action in own if action is Action.FORWARD]
    later = [n for n, action in own if action is not Action.FORWARD]
    homeward = [n for n, action in own if action in (Action.BACKWARD, Action.BACKWARD_INPUT)]
    return forwards, homeward, later[-1]


def _slack(prepared: PreparedProblem) -> float | None:
    """Seconds by which stages without the path may wait for less, of speed 1, once before and once
    after; None where work that no gradient passes is more than nothing.

    A stage with a group that lies between two places of the path waits, there and back, for all of
    the path but what is between these two.
    """
    model, path = prepared.whole, heaviest_path(prepared.whole)
    size, number = len(path), {v: n for n, v in enumerate(path, start=1)}
    carried = [(flow.sources[0], sink) for flow in with_gradients(model) for sink in flow.sinks]
    low, high = sides(model.num_groups, model.arcs, number, size)
    near_low, near_high = sides(model.num_groups, carried, number, size)
    outside = (near_low == 0) | (near_high > size)
    outside[list(path)] = False
    aside = ~outside
    aside[list(path)] = False
    rows = np.array([model.forward, model.backward])
    if rows[:, outside].sum() > NOTHING * rows.sum():
        return None
    most = 0.0
    for row in rows:
        before = np.bincount(high, row, size + 2).cumsum()[near_low]
        behind = np.bincount(low, row, size + 2)[::-1].cumsum()[::-1][near_high]
        between = (row.sum() - before - behind)[aside]
        most = max(most, float(between.max(initial=0.0)))
    return 2 * most
