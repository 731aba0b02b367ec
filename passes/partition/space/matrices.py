"""Seconds and bytes of every stage that two ideals can enclose, for each row of its menu.

A stage J∖I with r replicas on positions p … p + r − 1 of the pipeline, `after` ranks behind it:
what it takes depends on nothing else, but for how many stages its values go to (counted once),
how fast the links to its neighbours are (the fastest from any of its ranks), and its warm-up
depth (the least that the ranks behind it allow).  So the figures are lower bounds of what the
evaluator says, and equal for straight pipelines of values that go next door.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.segments import Coefficients, Matrix, Segments
from pdcompile.passes.partition.space.candidates import holding
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Setting
from pdcompile.schedule.registry import kind_of

Bool = NDArray[np.bool_]


def least_depth(
    setting: Setting, replicas: int, after: int, ranks: int, straight: bool, guess: int | None
) -> int:
    """Least depth: at most what `schedules.warmup` gives a stage with `after` ranks behind it.

    w_s·r_s ≥ (w_{s+1} + a)·r_{s+1} ≥ … ≥ a·Σ_{i>s} r_i, with a = 1 + extra.  Where a stream has
    too few microbatches for these depths they are scaled down together, by how much is decided
    by all stages: then 0, or with a `guess` the depth that is likely.
    """
    kind = kind_of(setting.schedule)
    m, apart = setting.num_microbatches, 1 + setting.extra_warmup * (not kind.alone)
    cap = kind.most_warmup(m, replicas)
    if kind.warmup == "all":
        return cap
    depth = -(-apart * after // replicas)
    if not kind.stream:
        return min(depth, cap)
    most = apart * (ranks - 1) if straight else (1 + apart) * ranks
    if m >= most or kind.updates_each:
        return depth
    return 0 if guess is None else min(depth, cap)


def most_depth(setting: Setting, replicas: int, after: int, straight: bool) -> int:
    """Most depth: at least what `schedules.warmup` gives: each ⌈…⌉ on the way adds less than 1·r_i,
    and so do both counts of two stages whose replicas go on together."""
    kind = kind_of(setting.schedule)
    apart = 1 + setting.extra_warmup * (not kind.alone)
    cap = kind.most_warmup(setting.num_microbatches, replicas)
    if kind.warmup == "all":
        return cap
    if straight or kind.alone:
        return min(apart * after + replicas - 1, cap)
    times = 2 if kind.updates_each else 0
    most = (1 + apart + times) * after + (1 + times // 2) * (replicas - 1)
    return min(most // replicas, cap)


@dataclass
class Matrices:
    """Costs of one setting on seats; `last` is the group of the model's output, if it is pinned.

    `stages`: how many, where the model's pins are to stages by number.
    """

    segments: Segments
    setting: Setting
    seats: Seats
    menu: tuple[StageDeployment, ...]
    spares: bool = False  # stages that recompute are to be chosen
    last: int | None = None
    stages: int | None = None
    bounding: bool = True  # else depths are the likely ones, and stages recompute if they have to
    _on: dict[tuple[int, StageDeployment], Coefficients] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.straight = all(option.replicas == 1 for option in self.menu)
        self.ranks = len(self.seats.ranks)

    def costs(
        self, left: int, u: int, option: StageDeployment, rows: slice
    ) -> tuple[Matrix, Matrix]:
        """Bound and load of a stage with so many stages left and ranks: see `Chains`."""
        p = self.ranks - u
        load = self.load(p, option, rows)
        if self.stages is not None:
            load = np.where(self._pinned(self.stages - left)[rows], load, np.inf)
        return (self.bound(p, option, rows, load) if self.bounding else load), load

    @cached_property
    def _pinned(self) -> Callable[[int], Bool]:
        return cache(self.segments.allowed)

    def load(self, p: int, option: StageDeployment, rows: slice) -> Matrix:
        """Seconds per microbatch of a stage J∖I from position p on, at least.

        Infinite where the stage is not allowed.
        """
        load = self.segments.load(self.on(p, option), rows)
        return np.where(self._allowed(p, option, rows), load, np.inf)

    def on(self, p: int, option: StageDeployment) -> Coefficients:
        """Coefficients of a stage from position p on."""
        if (known := self._on.get((p, option))) is not None:
            return known
        r, m, kind = option.replicas, self.setting.num_microbatches, kind_of(self.setting.schedule)
        seats = self.seats
        into = seats.between(slice(0, p), slice(p, p + r))
        out = seats.between(slice(p, p + r), slice(p + r, None))
        depth, first = self.depth(p, r), self.depth(0, 1)
        like = first if self.straight else depth
        held = holding(self.setting, option, depth, first, like, seats.cluster)
        ring = seats.ring(p, r) if r > 1 and kind.trains else None
        self._on[p, option] = found = Coefficients(
            seats.speed(p, r), option, into, out, into.full_duplex and out.full_duplex,
            seats.memory(p, r), held, ring, m * kind.group(r),
        )  # fmt: skip
        return found

    def bound(self, p: int, option: StageDeployment, rows: slice, load: Matrix) -> Matrix:
        """A lower bound of the objective of candidates with such a stage, given its `load`.

        Without a flush the load itself.  With one seconds of the minibatch: a replica's
        microbatches one after the other, and the reduction.
        """
        if kind_of(self.setting.schedule).stream:
            return load
        on = self.on(p, option)
        busy = option.share(self.setting.num_microbatches) * self.segments.compute(on, rows)
        found: Matrix = busy + self.setting.num_microbatches * self.segments.reduction(on, rows)
        return np.where(np.isfinite(load), found, np.inf)

    # -- memory and what is allowed --------------------------------------------------------------

    def depth(self, p: int, r: int) -> int:
        """Warm-up depth of the stage: the least that it can have."""
        guess = None if self.bounding else self.ranks
        after = self.ranks - p - r
        return least_depth(self.setting, r, after, self.ranks, self.straight, guess)

    def _allowed(self, p: int, option: StageDeployment, rows: slice) -> Bool:
        """True if J∖I may be the stage, with this row of its menu."""
        on = self.on(p, option)
        allowed = self.structure(p, option.replicas, rows)
        spared = option.recompute and self.spares
        if spared and on.limit is None and (self._monotone or not self.bounding):
            return np.zeros_like(allowed)
        allowed &= self.segments.fits(on, rows)
        if spared and not self.bounding and on.limit is not None:
            without = self.on(p, replace(option, recompute=False))
            allowed &= ~np.asarray(self.segments.fits(without, rows))
        return allowed

    @cached_property
    def _monotone(self) -> bool:
        """True if a stage that takes longer never ends sooner: the order on links is fixed.

        Where several kinds of messages wait for a link, the first to come goes first, and
        seconds lost at one place can be won elsewhere.
        """
        ties = any(parameter.trainable for parameter in self.segments.model.problem.shared)
        full = all(level.full_duplex for level in self.seats.cluster.levels)
        return self.straight and full and not ties

    def structure(self, p: int, r: int, rows: slice) -> Bool:
        """True if J∖I may be the stage if memory does not matter."""
        allowed = self.segments.nested[rows].copy()
        if self.last is not None:
            held = self.segments.inside[:, self.last]
            final = p + r == self.ranks
            allowed = allowed & (~held[rows, None] if final else ~held[None, :])
        return allowed
