"""Stages with all their choices of variants, as far as a better plan could have them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pdcompile.passes.partition.chain_program import Ints
from pdcompile.passes.partition.lattice import members
from pdcompile.passes.published.piper import frontier
from pdcompile.passes.published.piper.model import Floats
from pdcompile.passes.published.piper.segments import Space, Table, entered, left

POINTS = 1_500  # sums of variants that a stage may have; more are thinned


def exact_table(
    space: Space,
    relaxed: Table,
    rows: dict[int, Ints],
    threshold: float,
    most: int,
    late: Callable[[], bool],
) -> tuple[Table, Table | None]:
    """Two tables of the stages that `rows` (by width) of `relaxed` leaves, at this threshold.

    The first is achievable, the second optimistic: they differ where a stage has more choices
    than `most`, or where time ran out.  There the optimistic one is `relaxed`'s.  It is None where
    they do not differ.
    """
    problem = space.problem
    widest = np.zeros(len(relaxed.start), dtype=np.int64)
    for width, which in sorted(rows.items()):
        widest[which] = width
    real: list[tuple[int, Floats, Floats]] = []
    hoped: list[tuple[int, Floats, Floats]] = []
    complete = True
    stages = np.flatnonzero(widest)
    stages = stages[np.argsort(relaxed.before[stages], kind="stable")]
    starts = np.searchsorted(relaxed.before[stages], np.arange(len(space.masks) + 1))
    for i in range(len(space.masks)):
        mine = stages[starts[i] : starts[i + 1]]
        if not len(mine):
            continue
        if late():
            complete = False
            hoped += [(k, *relaxed.steps(k)) for k in mine.tolist()]
            continue
        row_at = dict(zip(relaxed.after[mine].tolist(), mine.tolist(), strict=True))
        budget = threshold * int(widest[mine].max())
        wanted = _below(space, i, relaxed.after[mine])
        for j, points, whole in _row(space, relaxed, i, wanted, set(row_at), budget, most):
            k = row_at[j]
            steps = frontier.stairs(points, problem.memory_bytes, problem.devices + 1)
            if len(steps[0]):
                real.append((k, *steps))
            if not whole:
                complete = False
                hoped.append((k, *relaxed.steps(k)))
            elif len(steps[0]):
                hoped.append((k, *steps))
    return _table(relaxed, real), None if complete else _table(relaxed, hoped)


def _below(space: Space, i: int, ends: Ints) -> list[int]:
    """States after i that lie below one of `ends`, or are one; ascending."""
    found: set[int] = set()
    waiting = ends.tolist()
    while waiting:
        j = waiting.pop()
        if j not in found:
            found.add(j)
            waiting += [h for h in space.covers(j) if space.inside(i, h)]
    return sorted(found)


def _row(
    space: Space,
    relaxed: Table,
    i: int,
    wanted: list[int],
    asked: set[int],
    budget: float,
    most: int,
) -> list[tuple[int, Floats, bool]]:
    """(j, points, are they all) for every state j of `asked` that a stage from i can reach.

    A stage's points are those of a stage one node smaller, each with every variant of that node.
    """
    menu, problem = relaxed.menu, space.problem
    rows = [entered(problem, item, space.masks[i]) for item in menu.items]
    reached: dict[int, tuple[Floats, bool]] = {i: (frontier.EMPTY, True)}
    found = []
    for j in wanted:
        below = [h for h in space.covers(j) if h == i or space.inside(i, h)]
        if any(h not in reached for h in below):
            continue  # a part of it is too much already
        start, whole = reached[below[0]]
        nodes = members(space.masks[j] & ~space.masks[below[0]])
        points, kept = _extend(space, relaxed, start, nodes, rows, budget, most)
        if not points.shape[1]:
            continue
        reached[j] = points, whole and kept
        if menu.uneven and j in asked:
            nodes = members(space.masks[j] & ~space.masks[i])
            at_end = list(rows)
            for v in nodes:
                item, options = menu.items[v], rows[v]
                if item is not None and options is not None:
                    at_end[v] = left(problem, item, options, space.masks[j])
            points, kept = _extend(space, relaxed, frontier.EMPTY, nodes, at_end, budget, most)
            found.append((j, points, kept))
        elif j in asked:
            found.append((j, *reached[j]))
    return found


def _extend(
    space: Space,
    relaxed: Table,
    points: Floats,
    nodes: list[int],
    rows: list[Floats | None],
    budget: float,
    most: int,
) -> tuple[Floats, bool]:
    whole = True
    for v in nodes:
        options = rows[v]
        if options is None:
            return points[:, :0], whole
        points = frontier.extend(points, options, space.problem.memory_bytes, budget)
        if points.shape[1] > most:
            points, whole = frontier.thin(points, most), False
    return points, whole


def _table(relaxed: Table, parts: list[tuple[int, Floats, Floats]]) -> Table:
    rows = np.array([k for k, _, _ in parts], dtype=np.int64)
    ends = np.cumsum([len(seconds) for _, seconds, _ in parts], dtype=np.int64)
    nothing = np.zeros(0)
    return Table(
        relaxed.menu,
        relaxed.before[rows],
        relaxed.after[rows],
        relaxed.cut[rows],
        relaxed.resent[rows],
        np.r_[0, ends][:-1].astype(np.int64),
        ends,
        np.concatenate([nothing, *(seconds for _, seconds, _ in parts)]),
        np.concatenate([nothing, *(flights for _, _, flights in parts)]),
    )
