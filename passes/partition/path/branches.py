"""Work beside a path that other stages may do at the same time as those with the path.

Every way through the pipeline that follows the path visits all stages with some of it.  A stage
without the path, between two that have some, is on such a way too where one of its groups is joined
to both of them; of several stages between the same two, the one with most work may be.  It is on no
way where each of its groups is joined only to what lies before the stage before it, or only to what
lies behind the stage behind it: then the group spans a whole stage, at the same time as which it
runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.path.beside import Array, Beside

NARROW = 0.03, 0.1, 0.3, 1.0, math.inf  # average stages: groups beside less are told apart


@dataclass(frozen=True)
class Parallel:
    """At most so much work is on no way, by the boundary where stages without the path lie.

    Of wide groups (what all layers of a decoder read of its encoder) they may have all that may be
    `before` and `beyond` a boundary, but only once.  Of the others, `spans` has all that may be at
    a boundary, `ahead` [j, k] what spans the stage before it, `behind` [k, l] the stage after it.
    """

    wide: NDArray[np.bool_]
    before: Array
    beyond: Array
    spans: Array
    ahead: Array
    behind: Array
    most: Array  # so many stages may be there, each with something
    wide_seconds: float
    part: float  # see `NARROW`

    def apart(self) -> tuple[float, Array, Array]:
        """All wide work, and what of it is before and beyond boundary j of an interval [j, k]."""
        return self.wide_seconds, self.before[:, None], self.beyond[:, None]


def parallels(
    beside: Beside, work: Array, parts: Iterable[float] = NARROW, *, filled: bool
) -> list[Parallel]:
    """With more and more groups that are told apart; `filled`: every stage holds something."""
    loose = np.flatnonzero(beside.low < beside.high)
    joined = (beside.near_low[loose] > 0) & (beside.near_high[loose] <= beside.length)
    on_path = beside.low == beside.high
    until = np.zeros(beside.length + 2)
    np.add.at(until, beside.low[on_path], work[on_path])
    until = until.cumsum()
    beside_it = until[beside.near_high[loose] - 1] - until[beside.near_low[loose]]
    average = work.sum() / beside.model.num_stages
    chosen = {}
    for part in sorted(parts):
        narrow = joined & (beside_it <= (part * average if part < math.inf else math.inf))
        chosen[tuple(loose[narrow].tolist())] = part
    return [_parallel(beside, work, one, part, filled=filled) for one, part in chosen.items()]


def _parallel(
    beside: Beside, work: Array, groups: Sequence[int], part: float, *, filled: bool
) -> Parallel:
    size = beside.length
    wide = beside.low < beside.high
    number = np.zeros(size + 1)
    for v in np.flatnonzero(wide).tolist():
        number[beside.low[v] : beside.high[v]] += 1
    wide[list(groups)] = False
    spans = np.zeros(size + 1)
    ahead, behind = np.zeros((size + 2, size + 2)), np.zeros((size + 2, size + 2))
    for v in groups:
        low, high, own = beside.low[v], beside.high[v], work[v]
        spans[low:high] += own
        ahead[beside.near_low[v] :, low:high] += own
        behind[low:high, : beside.near_high[v]] += own
    ahead, behind = ahead[: size + 1, : size + 1], behind[: size + 1, : size + 1]
    most = number if filled else np.full(size + 1, np.inf)
    of_wide = np.where(wide, work, 0.0)
    before, beyond = beside.before(of_wide), beside.behind(of_wide)
    total = float(of_wide.sum())
    return Parallel(wide, before, beyond, spans, ahead, behind, most, total, part)
