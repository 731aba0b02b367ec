"""A LoadProblem as arrays, for graphs where Python objects are too slow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdcompile.passes.published.placement_file import DeviceClass, LoadProblem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Arrays:
    """Groups, arcs and values.  `pin_of` lists the pins of all values one after the other."""

    seconds: Floats  # [class, group]; 0 where the class cannot run the group
    barred: npt.NDArray[np.bool_]  # [class, group]: the class cannot run it
    least: Floats  # the smallest time of each group on a class that has devices
    sizes: Floats
    source: Ints  # arcs
    target: Ints
    value_of: Ints  # [pin]: the value it belongs to, ascending
    pin_of: Ints  # [pin]: the group
    costs: Floats
    classes: tuple[DeviceClass, ...]

    @property
    def groups(self) -> int:
        return len(self.sizes)

    @property
    def devices(self) -> int:
        return sum(kind.count for kind in self.classes)


def arrays(problem: LoadProblem) -> Arrays:
    """The arrays of a problem whose groups are in topological order."""
    times = (
        np.array(problem.seconds, dtype=np.float64)
        .reshape(len(problem.sizes), len(problem.classes))
        .T
    )
    barred = ~np.isfinite(times)
    able = [c for c, kind in enumerate(problem.classes) if kind.count > 0]
    least = times[able].min(axis=0) if able else np.full(len(problem.sizes), math.inf)
    arcs = np.array(problem.arcs, dtype=np.int64).reshape(-1, 2)
    counts = np.array([len(pins) for pins in problem.pins], dtype=np.int64)
    return Arrays(
        seconds=np.where(barred, 0.0, times),
        barred=barred,
        least=least,
        sizes=np.array(problem.sizes, dtype=np.float64),
        source=arcs[:, 0].copy(),
        target=arcs[:, 1].copy(),
        value_of=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
        pin_of=np.fromiter(
            (pin for pins in problem.pins for pin in pins), np.int64, int(counts.sum())
        ),
        costs=np.array(problem.costs, dtype=np.float64),
        classes=problem.classes,
    )


def main_class(a: Arrays) -> int:
    return max(range(len(a.classes)), key=lambda c: a.classes[c].count)


def speeds(a: Arrays) -> Floats:
    """[class]: the least time that a class needs per second of work on the main class."""
    work = a.seconds[main_class(a)]
    some = work > 0
    found = np.zeros(len(a.classes))
    for c in range(len(a.classes)):
        # A group that the class cannot run makes it no faster on the others.
        able = some & ~a.barred[c]
        found[c] = float((a.seconds[c][able] / work[able]).min()) if able.any() else 0.0
    return found
