"""Loads of pairs of ideals I ⊂ J: what a stage J \\ I costs on a device of each class.

A value with pins P is paid by J \\ I unless the stage holds none of P, which is |P ∩ I| = |P ∩ J|,
or all of P, which is P ∩ I = ∅ and P ⊆ J.  Both are products of an indicator of I with one of J,
so that the loads of a block of pairs are one product of matrices, with columns for the values
alone that differ both among the I and among the J of the block.  Integers below 2^52 keep it
exact in floats.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdcompile.passes.published.placement.integers import NEVER, Ints, integers
from pdcompile.passes.published.placement_file import LoadProblem

BLOCK = 256  # ideals J whose loads are computed at once
Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


class Pairs:
    """Ideals are sorted by `least`, the summed least time over classes, which grows with
    inclusion: no ideal comes before a part of it, and those within reach lie side by side."""

    def __init__(self, problem: LoadProblem, ideals: Sequence[int]) -> None:
        self.problem = problem
        self.ints = integers(problem, sizes_up=False)
        present = [c for c, kind in enumerate(problem.classes) if kind.count]
        seconds = [np.where(self.ints.supported[c], self.ints.seconds[c], NEVER) for c in present]
        each = np.min(seconds, axis=0)
        self.each: Ints = np.where(each < NEVER, each, 0)
        held = _unpacked(ideals, len(problem.sizes))
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


def _unpacked(ideals: Sequence[int], groups: int) -> Bytes:
    """[ideal, group]: 1 where the group is in it."""
    width = (groups + 7) // 8
    raw = b"".join(mask.to_bytes(width, "little") for mask in ideals)
    packed = np.frombuffer(raw, dtype=np.uint8).reshape(len(ideals), width)
    return np.unpackbits(packed, axis=1, bitorder="little")[:, :groups]


def _sums(held: Bytes, amounts: Ints) -> Floats:
    """[ideal]: the summed amount of its groups, exact below 2^52."""
    sums = np.empty(len(held))
    for begin in range(0, len(held), 8192):
        part = slice(begin, begin + 8192)
        sums[part] = held[part].astype(np.float64) @ amounts.astype(np.float64)
    return sums
