"""Borders of modules: which of them a cut divides, and cuts that divide none.

A *unit* is one run of a module's ops in the order of the model's own code (a module that is called
twice has two), if it takes no more seconds than a stage has on average: larger ones have to be
divided.  Of units inside each other each counts, so a cut between attention and MLP divides one
module, and a cut inside the attention two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise

from pdcompile.ir.graph import OpGraph
from pdcompile.passes.form.module_tree import ancestors
from pdcompile.problem import Item, PartitionProblem


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that a stage could hold: its items that cost something, ascending."""

    path: str
    items: tuple[int, ...]


def units(graph: OpGraph, problem: PartitionProblem, most_seconds: float) -> tuple[Unit, ...]:
    """Modules of at most so many seconds, forward and backward, that are more than one item."""
    item_of = {name: i for i, item in enumerate(problem.items) for name in item.ops}
    paths = [ancestors(op.module_path) for op in graph.ops]
    found = []
    for depth in range(max(map(len, paths), default=0)):
        at = [path[depth] if depth < len(path) else "" for path in paths]
        for path, run in groupby(range(len(at)), at.__getitem__):
            if not path:
                continue
            costs = [(graph.ops[i].name, graph.ops[i].cost) for i in run]
            busy = {name: c.forward_seconds + c.backward_seconds for name, c in costs if c}
            items = {item_of[name] for name, seconds in busy.items() if seconds > 0}
            if len(items) > 1 and sum(busy.values()) <= most_seconds:
                found.append(Unit(path, tuple(sorted(items))))
    return tuple(found)


def outermost(parts: Sequence[Unit]) -> list[Unit]:
    """Those that lie inside of no other one."""
    found: list[Unit] = []
    for unit in sorted(parts, key=lambda one: (one.items[0], -one.items[-1])):
        if not found or unit.items[0] > found[-1].items[-1]:
            found.append(unit)
    return found


def divided(parts: Sequence[Unit], stage_of: Sequence[int]) -> int:
    """Number of times that cuts divide a unit: of one on three stages, twice."""
    return sum(len({stage_of[i] for i in unit.items}) - 1 for unit in parts)


def divided_before(parts: Sequence[Unit], num_items: int) -> list[int]:
    """For each position how many units a cut before that item divides."""
    change = [0] * (num_items + 2)
    for unit in parts:
        change[unit.items[0] + 1] += 1
        change[unit.items[-1] + 1] -= 1
    return list(accumulate(change[: num_items + 1]))


def simple_cuts(
    parts: Sequence[Unit], problem: PartitionProblem, stages: int, most: int
) -> Iterator[tuple[int, ...]]:
    """Boundaries that people choose: equally many blocks a stage, and equal shares of seconds and
    of parameters, at borders that divide nothing and at those of blocks alone; and at most so many
    that `rebalanced` comes by at those of blocks."""
    before, n = divided_before(parts, len(problem.items)), len(problem.items)
    seconds = list(accumulate(map(_seconds, problem.items), initial=0.0))
    borders = [[p for p in range(1, n) if not before[p]]]
    outer = blocks(parts)
    if len(outer) >= stages:
        begins, end = [unit.items[0] for unit in outer], outer[-1].items[-1] + 1
        ends = [unit.items[-1] + 1 for unit in outer]
        ends = [a for a, b in zip(ends, (*begins[1:], n), strict=True) if seconds[b] > seconds[a]]
        borders.append([p for p in sorted({*begins, *ends}) if 0 < p < n])
        for first, last in ((0, 0), (1, 1), (1, 0), (0, 1)):  # does embedding count, does the head?
            edges = [0] * first + begins + [end] * last
            for extra in (0, stages - 1):  # of uneven shares the larger ones last, or first
                cut = tuple(edges[(len(edges) * s + extra) // stages] for s in range(1, stages))
                if cut[0] > 0 and cut[-1] < n:
                    yield cut
    for weigh in (_seconds, _forward, _parameters):
        total = list(accumulate(map(weigh, problem.items), initial=0.0))
        for places in borders:
            found = balanced(total, places, stages)
            if found is not None:
                yield found
    for places in borders[1:]:
        yield from islice(rebalanced(seconds, places, stages), most)


def blocks(parts: Sequence[Unit]) -> list[Unit]:
    """The model's blocks: the outermost units with a number as their name."""
    return outermost([unit for unit in parts if unit.path.rpartition(".")[2].isdecimal()])


def balanced(total: Sequence[float], borders: Sequence[int], stages: int) -> tuple[int, ...] | None:
    """Boundaries at `borders` that keep the largest share least; `total`: sums up to each item.

    Searches the least share by bisection: the greedy cut with shares of at most so much shows
    whether it is enough.
    """
    low, high = total[-1] / stages, total[-1]
    best = _greedy(total, borders, stages, high)
    for _ in range(40):
        share = (low + high) / 2
        found = _greedy(total, borders, stages, share)
        if found is None:
            low = share
        else:
            high, best = share, found
    return best


def rebalanced(
    total: Sequence[float], borders: Sequence[int], stages: int
) -> Iterator[tuple[int, ...]]:
    """Equal shares, and cuts that others come by from there (torch's proposed `auto_partition`):
    of each the largest share gives what is between its first borders to the stages before it, or
    between its last ones to those after it, which are balanced again."""
    first = balanced(total, borders, stages)
    waiting = deque(() if first is None else (first,))
    seen = set(waiting)
    while waiting:
        cut = waiting.popleft()
        yield cut
        for moved in _moved(total, borders, cut):
            if moved not in seen:
                seen.add(moved)
                waiting.append(moved)


def _moved(
    total: Sequence[float], borders: Sequence[int], cut: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    ends = (0, *cut, len(total) - 1)
    shares = [total[b] - total[a] for a, b in pairwise(ends)]
    s = shares.index(max(shares))
    inside = [p for p in borders if ends[s] < p < ends[s + 1]]
    if inside and s > 0:
        at = inside[0]
        front = balanced(total[: at + 1], [p for p in borders if p < at], s)
        if front is not None:
            yield (*front, at, *cut[s:])
    if inside and s < len(shares) - 1:
        at = inside[-1]
        rest = [sum_to - total[at] for sum_to in total[at:]]
        back = balanced(rest, [p - at for p in borders if p > at], len(shares) - 1 - s)
        if back is not None:
            yield (*cut[:s], at, *(at + p for p in back))


def _greedy(
    total: Sequence[float], borders: Sequence[int], stages: int, share: float
) -> tuple[int, ...] | None:
    """The cut whose shares are each as large as may be; None where one would be too large."""
    sums, cut = [total[p] for p in borders], []
    k, start = 0, 0.0
    for left in range(stages - 1, 0, -1):
        furthest = bisect_right(sums, start + share * (1 + 1e-9)) - 1
        at = min(furthest, len(borders) - left)  # as many are left for the other stages
        if at < k:
            return None
        cut.append(borders[at])
        start, k = sums[at], at + 1
    return tuple(cut) if total[-1] - start <= share * (1 + 1e-9) else None


def _seconds(item: Item) -> float:
    return item.forward_seconds + item.backward_seconds


def _forward(item: Item) -> float:
    return item.forward_seconds


def _parameters(item: Item) -> float:
    return item.parameter_bytes
