r"""Exact dynamic program over all ideals (down-closed sets) of the groups, when they are few.

Every contiguous pipeline is a chain of ideals, and every chain of ideals is one; the best chain
is found from the loads of pairs I ⊂ J.  A known placement narrows that: with loads up to its
objective, the devices used so far hold a limited amount of work, and so do the others, so that few
ideals can follow each number of devices.

A value with pins P is paid by J \ I unless the stage holds none of P, which is |P ∩ I| = |P ∩ J|,
or all of P, which is P ∩ I = ∅ and P ⊆ J.  Both are products of an indicator of I with one of J,
so that the loads of a block of pairs are one product of matrices, with columns for the values
alone that differ both among the I and among the J of the block.

Every time is multiplied by one power of two, which is exact, and rounded down to an integer below
2^52, which floats add exactly.  The integer load of a placement is then at most its true load times
that power, whatever the placement: minimal integer loads are lower bounds, without a tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.published.chain_program import membership
from benchmarks.published.placement.placements import Placement, neighbours
from benchmarks.published.placement_model import LoadProblem
from pdcompile.errors import PlanError
from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.budget import Budget

Ints = npt.NDArray[np.int64]
BITS = 52  # sums stay exact in 64-bit integers and in 64-bit floats alike
NEVER = 1 << 60  # more than any sum, twice of it does not overflow


@dataclass(frozen=True, slots=True)
class Integers:
    seconds: tuple[Ints, ...]  # [class][group]; 0 where not supported
    supported: tuple[npt.NDArray[np.bool_], ...]
    costs: Ints
    sizes: Ints
    limits: tuple[int | None, ...]  # [class]; None where everything fits
    shift: int  # integer time = time · 2^shift, rounded down

    def units(self, value: float) -> int:
        return math.floor(math.ldexp(value, self.shift))

    def time(self, value: int) -> float:
        return math.ldexp(value, -self.shift)


def integers(problem: LoadProblem) -> Integers:
    """Sizes round down, too: what does not fit does not fit exactly."""
    finite = [
        [row[c] if math.isfinite(row[c]) else 0.0 for row in problem.seconds]
        for c in range(len(problem.classes))
    ]
    largest = max((math.fsum(row) for row in finite), default=0.0) + math.fsum(problem.costs)
    shift = BITS - math.frexp(largest)[1]
    sizes, limits = _sizes(problem)
    return Integers(
        tuple(_floored(row, shift) for row in finite),
        tuple(
            np.array([math.isfinite(row[c]) for row in problem.seconds], dtype=np.bool_)
            for c in range(len(problem.classes))
        ),
        _floored(list(problem.costs), shift),
        sizes,
        limits,
        shift,
    )


def _floored(values: list[float], shift: int) -> Ints:
    return np.array([math.floor(math.ldexp(value, shift)) for value in values], dtype=np.int64)


def _sizes(problem: LoadProblem) -> tuple[Ints, tuple[int | None, ...]]:
    total = math.fsum(problem.sizes)
    exact = total < 2**BITS and all(size.is_integer() for size in problem.sizes)
    shift = 0 if exact else BITS - math.frexp(total)[1] - 1
    limits = tuple(
        None if kind.memory >= total else math.floor(math.ldexp(kind.memory, shift))
        for kind in problem.classes
    )
    return _floored(list(problem.sizes), shift), limits


BLOCK = 256  # ideals J whose loads are computed at once
Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


class IdealPairs:
    """Ideals are sorted by `least`, the summed least time over classes, which grows with
    inclusion: no ideal comes before a part of it, and those within reach lie side by side."""

    def __init__(self, problem: LoadProblem, ideals: Sequence[int]) -> None:
        self.problem = problem
        self.ints = integers(problem)
        present = [c for c, kind in enumerate(problem.classes) if kind.count]
        seconds = [np.where(self.ints.supported[c], self.ints.seconds[c], NEVER) for c in present]
        each = np.min(seconds, axis=0)
        self.each: Ints = np.where(each < NEVER, each, 0)
        held = membership(ideals, len(problem.sizes))
        least = _sums(held, self.each)
        order = np.lexsort((_sums(held, np.ones(len(self.each), dtype=np.int64)), least))
        self.ideals = [ideals[i] for i in order]
        self.least: Floats = least[order]
        self.held: Bytes = np.ascontiguousarray(held[order].T)  # [group, ideal]
        held = self.held.T
        self.work = [_sums(held, row) for row in self.ints.seconds]
        self.barred = [
            None if row.all() else _sums(held, (~row).astype(np.int64))
            for row in self.ints.supported
        ]
        self.sizes = _sums(held, self.ints.sizes)
        self.costs = self.ints.costs.astype(np.float64)
        self.full = np.array([len(pins) for pins in problem.pins], dtype=np.int64)
        kind = np.uint8 if self.full.max(initial=0) < 256 else np.uint16
        self.count = np.zeros((len(problem.pins), len(ideals)), dtype=kind)  # [value, ideal]
        for e, pins in enumerate(problem.pins):
            for v in pins:
                self.count[e] += self.held[v]

    def keep(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Forget all other ideals."""
        self.ideals = [ideal for ideal, kept in zip(self.ideals, chosen, strict=True) if kept]
        self.least, self.sizes = self.least[chosen], self.sizes[chosen]
        self.held, self.count = self.held[:, chosen], self.count[:, chosen]
        self.work = [work[chosen] for work in self.work]
        self.barred = [None if bar is None else bar[chosen] for bar in self.barred]

    def loads(self, rows: Ints, begin: int, end: int) -> list[Floats]:
        """[class][I, J]: load of J \\ I for I in `rows` (ascending) and J in begin … end − 1;
        NEVER where I is no part of J, or the class cannot hold the stage; 0 where I = J."""
        to = slice(begin, end)
        wrong = self._outside(rows, to)
        moved = self._moved(rows, to) if any(k.transfers for k in self.problem.classes) else None
        same = rows[:, None] == np.arange(begin, end)[None, :] if rows[-1] >= begin else None
        tables = []
        for c, kind in enumerate(self.problem.classes):
            table = self.work[c][None, to] - self.work[c][rows, None]
            if kind.transfers and moved is not None:
                table += moved
            table[wrong] = NEVER
            if (barred := self.barred[c]) is not None:
                table[barred[None, to] > barred[rows, None]] = NEVER
            if (limit := self.ints.limits[c]) is not None:
                table[self.sizes[None, to] - self.sizes[rows, None] > limit] = NEVER
            if same is not None:
                table[same] = 0
            tables.append(table)
        return tables

    def _outside(self, rows: Ints, to: slice) -> npt.NDArray[np.bool_]:
        """[I, J]: I has a group that J lacks."""
        inside, lacking = self.held[:, rows], 1 - self.held[:, to]
        some = inside.any(axis=1) & lacking.any(axis=1)
        product = inside[some].T.astype(np.float32) @ lacking[some].astype(np.float32)
        return np.asarray(product > 0.5)

    def _moved(self, rows: Ints, to: slice) -> Floats:
        """[I, J]: the summed cost of the values that J \\ I pays, where I ⊂ J."""
        first, last = self.count[:, rows], self.count[:, to]
        low, high = first.min(axis=1), first.max(axis=1)
        least, most = last.min(axis=1), last.max(axis=1)
        # The stage holds nothing of a value that no I and no J differ in.
        alike = (low == high) & (least == most) & (low == least)
        whole = (high == 0) & (least == self.full)
        paid = ~(alike | whole)
        fixed_rows, fixed_columns = paid & (low == high), paid & (least == most)
        total = np.zeros((len(rows), to.stop - to.start))
        # Values in which all I are alike, then those in which all J are, then the others.
        chosen = np.flatnonzero(fixed_rows)
        if len(chosen):
            count, base, full = last[chosen], low[chosen, None], self.full[chosen, None]
            pays = (count != base) & ~((base == 0) & (count == full))
            total += self.costs[chosen] @ pays
        chosen = np.flatnonzero(fixed_columns & ~fixed_rows)
        if len(chosen):
            count, base, full = first[chosen], least[chosen, None], self.full[chosen, None]
            pays = (count != base) & ~((base == full) & (count == 0))
            total += (self.costs[chosen] @ pays)[:, None]
        chosen = np.flatnonzero(paid & ~fixed_rows & ~fixed_columns)
        if len(chosen):
            total += self._product(first[chosen], last[chosen], chosen)
        return total

    def _product(self, first: Bytes, last: Bytes, chosen: Ints) -> Floats:
        """The cost of values that differ among the I and among the J; one row a value."""
        costs, full = self.costs[chosen], self.full[chosen]
        left, right = [(first == 0)], [(last == full[:, None]) * -costs[:, None]]
        for number in range(int(full.max()) + 1):
            here = full >= number
            one, two = first[here] == number, last[here] == number
            both = one.any(axis=1) & two.any(axis=1)
            left.append(one[both])
            right.append(two[both] * -costs[here][both][:, None])
        one = np.concatenate(left).astype(np.float64)
        return np.asarray(one.T @ np.concatenate(right) + costs.sum())


def _sums(held: Bytes, amounts: Ints) -> Floats:
    """[ideal]: the summed amount of its groups, exact below 2^52."""
    sums = np.empty(len(held))
    for begin in range(0, len(held), 8192):
        part = slice(begin, begin + 8192)
        sums[part] = held[part].astype(np.float64) @ amounts.astype(np.float64)
    return sums


def all_ideals(problem: LoadProblem, limit: int) -> list[int] | None:
    """Every ideal as a bit mask, smaller ones first; None when there are more than `limit`."""
    return lattice.down_closed(*neighbours(problem), limit)


@dataclass(frozen=True, slots=True)
class IdealChain:
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
) -> IdealChain | None:
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
    pairs = IdealPairs(problem, ideals)
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
        self.pairs = IdealPairs(problem, ideals)
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
        """The most least work (`IdealPairs.least`) that a device of class c does within `top`."""
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

    def result(self) -> IdealChain:
        state, at = tuple(self.counts), len(self.pairs.ideals) - 1
        value = self.value[state][at]
        if value > self.top:
            free = self.top >= NEVER - 1
            return IdealChain(math.inf if free else self.pairs.ints.time(self.top + 1), None)
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
        return IdealChain(bound, Placement(tuple(stage_of), tuple(c for _, c in stages)))

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
