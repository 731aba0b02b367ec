"""Exact dynamic program over all ideals (down-closed sets) of the groups, when they are few.

Every contiguous pipeline is a chain of ideals, and every chain of ideals is one; the best chain
is found from the loads of pairs I ⊂ J (`pairs`).  A known placement narrows that: with loads up
to its objective, the devices used so far hold a limited amount of work, and so do the others,
so that few ideals can follow each number of devices.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdcompile.errors import PlanError
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.published.placement.integers import NEVER, Ints
from pdcompile.passes.published.placement.loads import Placement, neighbours
from pdcompile.passes.published.placement.pairs import BLOCK, Floats, Pairs
from pdcompile.passes.published.placement_file import LoadProblem


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
    but for rounding, None when there is none.  Where sizes are no whole numbers, it fits but for
    rounding too."""

    bound: float
    placement: Placement | None


def best_chain(
    problem: LoadProblem,
    ideals: list[int],
    budget: Budget,
    upper: float = math.inf,
    most: float = math.inf,
) -> Chain | None:
    """The best placement over chains of the given ideals (∅ and all groups among them).

    With `upper`, the objective of a known placement, only loads up to that count.  None when the
    budget ran out or more than `most` pairs had to be looked at.
    """
    program = _Program(problem, ideals, upper)
    number = len(program.pairs.ideals)
    for begin in range(0, number, BLOCK):
        if budget.late or program.looked > most:
            return None
        program.advance(begin, min(number, begin + BLOCK))
    return program.result()


def promising(problem: LoadProblem, ideals: list[int], number: int) -> list[int]:
    """About `number` of the ideals: of those with like work the ones that cut the least cost.

    A chain of them is a placement, hence a good upper bound, found at little cost.
    """
    pairs = Pairs(problem, ideals)
    count, full = pairs.count, pairs.full[:, None]
    cut = pairs.costs @ ((count > 0) & (count < full))
    size = len(ideals)
    kept = {0, size - 1}
    width = max(1, round(size / number)) * 16
    for begin in range(0, size, width):
        best = np.argsort(cut[begin : begin + width], kind="stable")[:16]
        kept.update((best + begin).tolist())
    return [pairs.ideals[i] for i in sorted(kept)]


class _Program:
    """value[devices used of each class][I]: the least largest load that leads to I, or NEVER."""

    def __init__(self, problem: LoadProblem, ideals: list[int], upper: float) -> None:
        self.problem = problem
        self.pairs = Pairs(problem, ideals)
        self.looked = 0
        n = len(problem.sizes)
        self.top = NEVER - 1 if math.isinf(upper) else self.pairs.ints.units(upper)
        self.counts = [min(kind.count, n) for kind in problem.classes]
        self.states = list(itertools.product(*(range(count + 1) for count in self.counts)))
        self.share = [self._share(c) for c in range(len(self.counts))]
        useful = np.zeros(len(ideals), dtype=np.bool_)
        useful[[0, -1]] = True
        for state in self.states:
            useful |= self._useful(state)
        if not useful.all():
            self.pairs.keep(useful)
        self.useful = {state: self._useful(state) for state in self.states}
        self.window = {state: _span_of(mask) for state, mask in self.useful.items()}
        size = len(self.pairs.ideals)
        self.value = {state: np.full(size, float(NEVER)) for state in self.states}
        self.value[self.states[0]][0] = 0.0

    def _share(self, c: int) -> float:
        """The most least work (see `Pairs.least`) that a device of class c does within `top`."""
        ints = self.pairs.ints
        if not self.counts[c]:
            return 0.0
        runs = ints.supported[c] & (self.pairs.each > 0)  # then seconds are positive too
        if self.top >= NEVER - 1 or not runs.any():
            return float(NEVER) if runs.any() else 0.0
        ratio = float((self.pairs.each[runs] / ints.seconds[c][runs]).max())
        return ratio * self.top * (1 + 1e-12) + 1

    def _useful(self, state: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """The ideals that can follow these devices: they, and the others, can do the work, and
        have the memory."""
        pairs, ints = self.pairs, self.pairs.ints
        rest = [count - n for count, n in zip(self.counts, state, strict=True)]
        before, after = (
            sum(n * share for n, share in zip(used, self.share, strict=True))
            for used in (state, rest)
        )
        useful = (pairs.least <= before) & (pairs.least[-1] - pairs.least <= after)
        for used, held in ((state, pairs.sizes), (rest, pairs.sizes[-1] - pairs.sizes)):
            limits = [limit for n, limit in zip(used, ints.limits, strict=True) if n]
            if None not in limits:
                room = sum(n * limit for n, limit in zip(used, ints.limits, strict=True) if limit)
                useful &= held <= room
        return np.asarray(useful)

    def advance(self, begin: int, end: int) -> None:
        """The values of ideals begin … end − 1, those of all before being final."""
        wanted = [
            s for s in self.states[1:] if self.window[s][0] < end and self.window[s][1] > begin
        ]
        if not wanted:
            return
        spans: list[tuple[int, int]] = []
        for state in wanted:
            spans += [
                span for c in range(len(self.counts)) if (span := self._span(state, c, begin, end))
            ]
        tables = []
        for low, high in _merged(spans):
            rows = self._reached(low, high, begin)
            if len(rows):
                tables.append((rows, self.pairs.loads(rows, begin, end)))
        self.looked += sum(len(rows) for rows, _ in tables) * (end - begin)
        for state in wanted:
            for c in range(len(self.counts)):
                span = self._span(state, c, begin, end)
                if span is None:
                    continue
                for rows, loads in tables:
                    first, last = np.searchsorted(rows, span)
                    if first < last:
                        self._relax(state, c, rows[first:last], loads[c][first:last], begin, end)

    def _span(self, state: tuple[int, ...], c: int, begin: int, end: int) -> tuple[int, int] | None:
        """Ideals from which a device of class c, the last of `state`, may lead to the block."""
        if not state[c]:
            return None
        low, high = self.window[_less(state, c)]
        near = self.pairs.least[begin] - self.share[c]
        low = max(low, int(np.searchsorted(self.pairs.least, near, side="left")))
        return (low, min(high, end)) if low < min(high, end) else None

    def _reached(self, low: int, high: int, begin: int) -> Ints:
        """Those of low … high − 1 that some chain leads to; inside the block, all."""
        reached = np.zeros(high - low, dtype=np.bool_)
        for state in self.states:
            if self.window[state][0] < high and self.window[state][1] > low:
                reached |= self.value[state][low:high] <= self.top
        reached[max(0, begin - low) :] = True
        return np.flatnonzero(reached) + low

    def _relax(
        self, state: tuple[int, ...], c: int, rows: Ints, load: Floats, begin: int, end: int
    ) -> None:
        best = np.maximum(self.value[_less(state, c)][rows][:, None], load).min(axis=0)
        best[~self.useful[state][begin:end] | (best > self.top)] = NEVER
        value = self.value[state][begin:end]
        np.minimum(value, best, out=value)

    def result(self) -> Chain:
        state, at = tuple(self.counts), len(self.pairs.ideals) - 1
        value = self.value[state][at]
        if value > self.top:
            free = self.top >= NEVER - 1
            return Chain(math.inf if free else self.pairs.ints.time(self.top + 1), None)
        bound = self.pairs.ints.time(int(value))
        stages: list[tuple[int, int]] = []
        while any(state):
            i, c = self._before(state, at)
            if i != at:
                stages.append((self.pairs.ideals[at] & ~self.pairs.ideals[i], c))
            state, at = _less(state, c), i
        stages.reverse()
        stage_of = [0] * len(self.problem.sizes)
        for s, (mask, _) in enumerate(stages):
            for v in range(len(stage_of)):
                if mask >> v & 1:
                    stage_of[v] = s
        return Chain(bound, Placement(tuple(stage_of), tuple(c for _, c in stages)))

    def _before(self, state: tuple[int, ...], at: int) -> tuple[int, int]:
        """(I, class) of the last stage of a best chain with these devices that leads to `at`.

        Looked for again, because remembering it for every entry would take longer.
        """
        value = self.value[state][at]
        for c, count in enumerate(state):
            if not count:
                continue
            rows = np.flatnonzero(self.value[_less(state, c)][: at + 1] <= value)
            if not len(rows):
                continue
            hits = np.flatnonzero(self.pairs.loads(rows, at, at + 1)[c][:, 0] <= value)
            if len(hits):
                return int(rows[hits[0]]), c
        raise PlanError("a value of the table has no origin", remedy="report this file")


def _span_of(mask: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """The smallest range with all that is true."""
    where = np.flatnonzero(mask)
    return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping ranges as one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found


def _less(state: tuple[int, ...], c: int) -> tuple[int, ...]:
    return (*state[:c], state[c] - 1, *state[c + 1 :])
