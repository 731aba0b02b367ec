"""Earliest begin of a stage, given where it ends and the seconds that all may take.

With F and W of one microbatch, k = ⌈m/r⌉ microbatches a replica, w warm-up and A the reduction, a
flush of T seconds needs of every stage

- before + k (F + W) ≤ T, before: F + W of all earlier stages, there and back;
- F of all earlier stages + k (F + W) + A ≤ T;
- all + (k − 1) max(F, W) + (k − 1 − w) min(F, W) ≤ T, all: F + W of one microbatch everywhere;
- all − W of earlier stages + (k − 1) W + A ≤ T;
- F up to the stage + what later ones take for all microbatches + W + A ≤ T;

a stream (F + W) / r and A.  A stage that recomputes takes F more in W.  Where backward is split, I
of W being what the stage before waits for, of these only the second, and

- F of all stages + I of later ones + k W + (k − 1 − w) F ≤ T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from pdcompile.cluster import Link
from pdcompile.passes.partition.space.candidates import holding
from pdcompile.passes.partition.space.line import Array, Line
from pdcompile.passes.partition.space.matrices import least_depth, most_depth
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Setting
from pdcompile.schedule.registry import ScheduleKind, kind_of

#: how often a demand counts work, forward, backward, and bytes that are trained
Times = tuple[float, float, float, float]
Counts = tuple[float, int, int]  # of what is trained, saved and received


class Offers(Protocol):
    """Devices and links of r positions of a pipeline, from position p on."""

    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def fastest(self) -> float: ...
    def speed(self, p: int, r: int) -> float: ...
    def memory(self, p: int, r: int) -> int | None: ...
    def ring(self, p: int, r: int) -> Link: ...


@dataclass
class Reach:
    """Stages of one setting on seats that end at some place of a line.

    Args:
        menu: rows that stages may be.
        memory: the share of it that stages may take.
        balanced: look at the loads of stages alone, not at how they wait for each other.
    """

    line: Line
    setting: Setting
    seats: Offers
    menu: tuple[StageDeployment, ...]
    memory: float = 1.0
    balanced: bool = False
    _rows: dict[Times, Array] = field(default_factory=dict)
    _held: dict[Counts, tuple[Array, Array]] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> int:
        return len(self.seats.ranks)

    @cached_property
    def kind(self) -> ScheduleKind:
        return kind_of(self.setting.schedule)

    @cached_property
    def stream(self) -> bool:
        return self.kind.stream

    @property
    def waits(self) -> float:
        """Share of the seconds of earlier stages at speed 1 that a later one waits for."""
        return 0.0 if self.stream or self.balanced else 1 / self.seats.fastest

    @cached_property
    def splits(self) -> bool:
        """Does a stage wait for a part of backward alone?"""
        return self.kind.splits_backward

    def begin(
        self, end: float, option: StageDeployment, u: int, seconds: float, before: int = 0
    ) -> float:
        """Earliest begin of a stage that ends there, if the pipeline takes so long; infinite where
        it cannot end there.

        `u`: of the ranks, with those behind it; `before`: stages that have to have something.
        """
        place = 0
        for times, above in self._demands(end, option, u, seconds):
            place = max(place, int(np.searchsorted(self._row(times), above, "left")))
        limit = self.seats.memory(self.ranks - u, option.replicas)
        if limit is not None:
            place = max(place, self._within(limit * self.memory, option, u, end))
        cut = max(int(np.searchsorted(self.line.cuts, place)), before)
        if cut >= len(self.line.cuts):
            return np.inf
        found = float(self.line.before.work[self.line.cuts[cut]])
        return found if found < end else np.inf

    # -- seconds -----------------------------------------------------------------------------

    def _demands(
        self, end: float, option: StageDeployment, u: int, seconds: float
    ) -> Iterator[tuple[Times, float]]:
        """Demands: what counts before the begin of the stage, and how much of it is needed."""
        r, p, waits = option.replicas, self.ranks - u, self.waits
        m, again, line = self.setting.num_microbatches, float(option.recompute), self.line
        share = 1 if self.stream else option.share(m)
        once = (1 / r if self.stream else 1.0) / self.seats.speed(p, r)
        own, there = share * once, self._there(end)
        forward, backward = line.before.forward[there], line.before.backward[there]
        alone = own * (end + again * forward) - seconds
        if not self.splits:
            yield (own - waits, again * own, 0.0, 0.0), alone
        more, few = once * (share - 1), once * self._alternating(r, u, share)
        through = waits * line.whole - seconds
        if waits and self.splits:
            home, f = waits * self.kind.halves(1.0)[0], few + again * own
            whole = waits * line.before.forward[-1] + home * line.before.backward[-1]
            yield (0.0, f, own, 0.0), whole - seconds + f * forward + (own - home) * backward
        elif waits:
            for f, b in ((more + again * few, few), (few + again * more, more)):
                yield (0.0, f, b, 0.0), through + f * forward + b * backward
        per_byte, fixed = self._reduction(p, r) if r > 1 else (0.0, 0.0)
        summed = per_byte * line.before.trainable[there] + fixed
        if r > 1 or self.splits:
            # Of earlier stages F alone: as much as all their work less their W.
            busy = 0.0 if self.stream else own
            above = summed - seconds if self.stream else alone + summed
            yield (busy - waits, again * busy, waits, per_byte), above
        if waits and r > 1 and not self.splits:
            above = through + again * more * forward + more * backward + summed
            yield (0.0, again * more, more + waits, per_byte), above
            if u > r:
                later = max(1.0, m / (u - r)) * (line.whole - end) + forward
                above = waits * later + once * (again * forward + backward) + summed
                yield (0.0, again * once, once, per_byte), above - seconds

    def _there(self, end: float) -> int:
        """The place before which there is so much work."""
        knots = self.line.before.work
        return min(int(np.searchsorted(knots, end * (1 - 1e-12), "left")), len(knots) - 1)

    def _row(self, times: Times) -> Array:
        """So many times what lies before each place, rising."""
        if times not in self._rows:
            before = self.line.before
            rows = (before.work, before.forward, before.backward, before.trainable)
            total = sum(n * row for n, row in zip(times, rows, strict=True))
            self._rows[times] = np.maximum.accumulate(total)
        return self._rows[times]

    def _alternating(self, r: int, u: int, share: int) -> int:
        """Backwards of a replica that surely come before its last forward, or the mirror."""
        deepest = most_depth(self.setting, r, u - r, self._straight)
        return max(0, share - 1 - deepest)

    def _reduction(self, p: int, r: int) -> tuple[float, float]:
        """Seconds for each byte, and in any case."""
        rounds, link = 2 * (r - 1), self.seats.ring(p, r)
        updates = self.setting.num_microbatches * self.kind.group(r) if self.stream else 1
        per_byte = rounds / r / link.bytes_per_second / updates
        return per_byte, rounds * link.latency_seconds / updates

    # -- bytes -------------------------------------------------------------------------------

    @cached_property
    def _straight(self) -> bool:
        return all(option.replicas == 1 for option in self.menu)

    def _counts(self, option: StageDeployment, after: int) -> tuple[Counts, int]:
        """Times that a stage holds what is trained, saved and received; and gradients received."""
        depth = least_depth(
            self.setting, option.replicas, after, self.ranks, self._straight, self.ranks
        )
        held = holding(self.setting, option, depth, depth, depth)
        updated = held.gradient_buffers + held.optimizer_factor
        return (held.versions + updated, held.saved, held.received), held.returned

    def _within(self, limit: float, option: StageDeployment, u: int, end: float) -> int:
        """The first place from which a stage that ends there keeps its limit of memory."""
        counts, returned = self._counts(option, u - option.replicas)
        if counts not in self._held:
            (trained, saved, received), before = counts, self.line.before
            held = trained * before.trainable + before.frozen + saved * before.saved
            most = np.maximum.accumulate(held - received * self.line.received)
            self._held[counts] = held, most
        held, most = self._held[counts]
        there = self._there(end)
        needed = held[there] + returned * self.line.returned[there] - limit
        return int(np.searchsorted(most, needed * (1 - 1e-12), "left"))
