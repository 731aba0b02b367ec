"""Exact dynamic program over all ideals (down-closed sets) of the groups, when they are few.

Every contiguous pipeline is a chain of ideals, and every chain of ideals is one; the best chain
is found from the loads of all pairs I ⊂ J.  For such a pair, a value with pins P is paid by
J \\ I unless J \\ I holds none of P, which is |P ∩ I| = |P ∩ J|, or all of P, which is
P ∩ I = ∅ and P ⊆ J.  Both are products of an indicator of I with one of J, so that the loads of
a block of pairs are one product of matrices; integers below 2^52 keep it exact in floats.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.placement.integers import NEVER, Ints, integers
from pdcompile.passes.partition.placement.loads import Placement, neighbours
from pdcompile.placement import LoadProblem

BLOCK = 256  # ideals whose loads are computed at once
Floats = npt.NDArray[np.float64]


def all_ideals(problem: LoadProblem, limit: int) -> list[int] | None:
    """Every ideal as a bit mask, smaller ones first; None when there are more than `limit`."""
    before, after = neighbours(problem)
    needs = [sum(1 << u for u in parents) for parents in before]
    ready_of = {0: [v for v, parents in enumerate(before) if not parents]}
    found, layer = [0], [0]
    while layer:
        following: dict[int, list[int]] = {}
        for ideal in layer:
            ready = ready_of.pop(ideal)
            for v in ready:
                larger = ideal | 1 << v
                if larger not in following:
                    opened = [u for u in after[v] if needs[u] & ~larger == 0]
                    following[larger] = [u for u in ready if u != v] + opened
            if len(found) + len(following) > limit:
                return None
        ready_of = following
        layer = sorted(following)
        found += layer
    return found


@dataclass(frozen=True, slots=True)
class Chain:
    """`bound` ≤ the least objective (inf: there is no placement); the placement that reaches it
    but for rounding, None when there is none.  `exact_memory`: sizes are whole numbers, hence
    the placement fits; otherwise it fits but for rounding."""

    bound: float
    placement: Placement | None
    exact_memory: bool


def best_chain(
    problem: LoadProblem, ideals: list[int], budget: Budget, upper: float = math.inf
) -> Chain | None:
    """The best placement over chains of the given ideals (∅ and all groups among them).

    With `upper`, the objective of a known placement, pairs further apart than that are left
    out.  None when the budget ran out.
    """
    table = _Pairs(problem, ideals, upper)
    ideals = table.ideals
    blocks: list[tuple[int, int, int, list[Floats]]] = []
    for begin in range(0, len(ideals), BLOCK):
        if budget.late:
            return None
        end = min(len(ideals), begin + BLOCK)
        low = table.low(begin)
        blocks.append((low, begin, end, table.loads(low, begin, end)))
    counts = [min(kind.count, len(problem.sizes)) for kind in problem.classes]
    start = np.full(len(ideals), float(NEVER))
    start[0] = 0
    value: dict[tuple[int, ...], Floats] = {(0,) * len(counts): start}
    came: dict[tuple[int, ...], tuple[Ints, Ints]] = {}
    for state in itertools.product(*(range(count + 1) for count in counts)):
        if state in value:
            continue
        if budget.late:
            return None
        least = np.full(len(ideals), float(NEVER))
        cut, chosen = (np.zeros(len(ideals), dtype=np.int64) for _ in range(2))
        for low, begin, end, loads in blocks:
            for c, load in enumerate(loads):
                if state[c]:
                    previous = value[_less(state, c)][low:end]
                    reached = np.maximum(previous[:, None], load)
                    where = reached.argmin(axis=0)
                    best = reached[where, np.arange(end - begin)]
                    better = best < least[begin:end]
                    least[begin:end][better] = best[better]
                    cut[begin:end][better] = where[better] + low
                    chosen[begin:end][better] = c
        value[state], came[state] = least, (cut, chosen)
    final = tuple(counts)
    exact = table.ints.exact_sizes
    if value[final][-1] >= NEVER:
        return Chain(math.inf, None, exact)
    bound = table.ints.time(int(value[final][-1]))
    return Chain(bound, _trace(len(problem.sizes), ideals, final, came), exact)


def _trace(
    groups: int,
    ideals: list[int],
    state: tuple[int, ...],
    came: dict[tuple[int, ...], tuple[Ints, Ints]],
) -> Placement:
    at = len(ideals) - 1
    stages: list[tuple[int, int]] = []
    while any(state):
        cut, chosen = came[state]
        i, c = int(cut[at]), int(chosen[at])
        if i != at:
            stages.append((ideals[at] & ~ideals[i], c))
        state, at = _less(state, c), i
    stages.reverse()
    stage_of = [0] * groups
    for s, (mask, _) in enumerate(stages):
        for v in range(groups):
            if mask >> v & 1:
                stage_of[v] = s
    return Placement(tuple(stage_of), tuple(c for _, c in stages))


def _less(state: tuple[int, ...], c: int) -> tuple[int, ...]:
    return (*state[:c], state[c] - 1, *state[c + 1 :])


class _Pairs:
    """Loads of pairs of ideals.  Ideals are sorted by least work, which grows with inclusion, so
    that those within reach of a block lie side by side."""

    def __init__(self, problem: LoadProblem, ideals: list[int], upper: float) -> None:
        self.problem = problem
        self.ints = integers(problem, sizes_up=False)
        n, width = len(problem.sizes), (len(problem.sizes) + 7) // 8
        raw = b"".join(mask.to_bytes(width, "little") for mask in ideals)
        packed = np.frombuffer(raw, dtype=np.uint8).reshape(len(ideals), width)
        held = np.unpackbits(packed, axis=1, bitorder="little")[:, :n].astype(np.float64)
        least = np.where(self.ints.supported, self.ints.seconds, NEVER).min(axis=0)
        work = held @ np.where(least < NEVER, least, 0).astype(np.float64)
        order = np.lexsort((held.sum(axis=1), work))
        self.ideals = [ideals[i] for i in order]
        self.least, self.held = work[order], held[order]
        self.reach = np.ldexp(upper, self.ints.shift) * (1 + 1e-12)
        self.size = self.held.sum(axis=1)
        self.work = [self.held @ row.astype(np.float64) for row in self.ints.seconds]
        self.barred = [self.held @ (~row).astype(np.float64) for row in self.ints.supported]
        self.bytes = self.held @ self.ints.sizes.astype(np.float64)
        self.costs = self.ints.costs.astype(np.float64)
        none, whole, level, weight = [], [], [], []
        for pins, cost in zip(problem.pins, self.costs, strict=True):
            count = self.held[:, list(pins)].sum(axis=1)
            none.append(count == 0)
            whole.append(count == len(pins))
            for number in range(len(pins) + 1):
                level.append(count == number)
                weight.append(cost)
        self.none, self.whole = _columns(none, len(ideals)), _columns(whole, len(ideals))
        self.level, self.weight = _columns(level, len(ideals)), np.array(weight)

    def low(self, begin: int) -> int:
        """The first ideal that a stage ending in `begin` or later can start from."""
        return int(np.searchsorted(self.least, self.least[begin] - self.reach))

    def loads(self, low: int, begin: int, end: int) -> list[Floats]:
        """[class][I, J]: load of J \\ I for J in begin..end and I in low..end."""
        to, rows = slice(begin, end), slice(low, end)
        inside = self.held[rows] @ self.held[to].T == self.size[rows, None]
        moved = self.costs.sum() - self.level[rows] @ (self.level[to] * self.weight).T
        moved -= self.none[rows] @ (self.whole[to] * self.costs).T
        held = self.bytes[None, to] - self.bytes[rows, None]
        tables = []
        for c, kind in enumerate(self.problem.classes):
            table = self.work[c][None, to] - self.work[c][rows, None]
            if kind.transfers:
                table = table + moved
            wrong = ~inside | (self.barred[c][None, to] > self.barred[c][rows, None])
            if (limit := self.ints.limits[c]) is not None:
                wrong |= held > limit
            table[wrong] = NEVER
            table[np.arange(begin - low, end - low), np.arange(end - begin)] = 0
            tables.append(table)
        return tables


def _columns(columns: list[npt.NDArray[np.bool_]], rows: int) -> Floats:
    if not columns:
        return np.zeros((rows, 0))
    return np.stack(columns, axis=1).astype(np.float64)
