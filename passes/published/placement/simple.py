"""A lower bound at once: the slowest group alone, and all work shared by all devices."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pdcompile.passes.published.placement_file import LoadProblem

ROUNDED = 1e-12  # relative; sums and divisions err by less
HALVINGS = 60
Floats = npt.NDArray[np.float64]


def simple_bound(problem: LoadProblem) -> float:
    """No placement is better; inf when a group runs nowhere, or there is no device."""
    kinds = [c for c, kind in enumerate(problem.classes) if kind.count]
    if not kinds:
        return math.inf
    seconds = np.array(problem.seconds)[:, kinds].T
    counts = [problem.classes[c].count for c in kinds]
    best = float(seconds.min(axis=0).max(initial=0.0))
    if not math.isfinite(best):
        return math.inf
    if len(kinds) == 2:
        best = max(best, _shared(seconds[0], counts[0], seconds[1], counts[1]))
    else:
        best = max(best, float(seconds.min(axis=0).sum()) / sum(counts))
    return best * (1 - ROUNDED)


def _shared(first: Floats, firsts: int, second: Floats, seconds: int) -> float:
    """The least largest load when groups may be divided between devices of two classes.

    Within T, devices of the second class take the groups that save the first class most for
    their time; T is enough when the first class can do what is left.  It is found by halving.
    """
    only_first, only_second = np.isinf(second), np.isinf(first)
    needed = float(first[only_first].sum())
    taken = float(second[only_second].sum())
    free = ~(only_first | only_second)
    a, b = first[free], second[free]
    with np.errstate(over="ignore"):  # of times next to nothing, any order will do
        order = np.argsort(-a / np.maximum(b, 1e-300), kind="stable")
    saved = np.concatenate(([0.0], np.cumsum(a[order])))
    spent = np.concatenate(([0.0], np.cumsum(b[order])))
    total = needed + taken + float(saved[-1] + spent[-1])
    low, high = 0.0, total
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        room = seconds * middle - taken
        left = needed + float(saved[-1] - np.interp(room, spent, saved))
        if room >= 0 and left <= firsts * middle:
            high = middle
        else:
            low = middle
    # A sum of n terms errs by less than n roundings of the whole.
    return low - (len(first) + 4) * 4e-16 * total
