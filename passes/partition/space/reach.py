"""Where a stage begins at the earliest, given where it ends and the seconds that all may take.

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

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pdcompile.cluster import Link
from pdcompile.passes.partition.path.beside import Array
from pdcompile.passes.partition.space.candidates import holding
from pdcompile.passes.partition.space.line import Line, Places
from pdcompile.passes.partition.space.matrices import least_depth, most_depth
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Setting
from pdcompile.schedule.registry import kind_of

#: how often a demand counts work, forward, backward, and bytes that are trained
Times = tuple[float, float, float, float]
Counts = tuple[float, int, int]  # of what is trained, saved and received


@dataclass(frozen=True)
class Probe:
    """What is asked: seconds for all, by the number of ranks that are lost.

    Args:
        full: work of one microbatch that the others do.
        beside: work by which they may be off the line, at most.
        lost: whether any rank is.
    """

    seconds: float
    full: Array
    beside: Array
    lost: bool


@dataclass
class Reach:
    """Stages of one setting on seats that end at some place of a line.

    Args:
        menu: rows that stages may be.
        widest: of a number of replicas, the most that have as many microbatches each.
        memory: the share of it that stages may take.
        balanced: look at the loads of stages alone, not at how they wait for each other.
    """

    line: Line
    setting: Setting
    seats: Seats
    menu: tuple[StageDeployment, ...]
    widest: dict[int, int] = field(default_factory=dict)
    memory: float = 1.0
    balanced: bool = False
    _rows: dict[Times, Array] = field(default_factory=dict)
    _rings: dict[int, Link] = field(default_factory=dict)
    _held: dict[Counts, tuple[Array, Array]] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> int:
        return len(self.seats.ranks)

    @cached_property
    def stream(self) -> bool:
        return kind_of(self.setting.schedule).stream

    @property
    def waits(self) -> float:
        """Of the seconds of earlier stages at speed 1, those that a later one waits for."""
        return 0.0 if self.stream or self.balanced else 1 / self.seats.fastest

    @cached_property
    def splits(self) -> bool:
        """Does a stage wait for a part of backward alone?"""
        return kind_of(self.setting.schedule).splits_backward

    def per_work(self, r: int, p: int) -> float:
        """Seconds that count of a replica, for each second of a microbatch's work."""
        speed = self.seats.speed(p, r) if self.line.exact else self.seats.fastest
        share = 1 / r if self.stream else -(-self.setting.num_microbatches // r)
        return share / speed

    def begin(self, ends: Array, option: StageDeployment, u: int, probe: Probe) -> Array:
        """Where a stage that ends there begins at the earliest; infinite where it cannot end there.

        `u`: of the ranks, with those behind it.
        """
        place = np.zeros(len(ends), dtype=np.intp)
        for times, above in self._demands(ends, option, u, probe):
            place = np.maximum(place, np.searchsorted(self._row(times), above, "left"))
        limit = self._limit(self.ranks - u, option.replicas)
        if limit is not None:
            place = np.maximum(place, self._within(limit, option, u, ends))
        if self.line.cuts is not None:
            cuts = self.line.cuts
            cut = np.searchsorted(cuts, place)
            found = self.line.most.work[cuts[np.minimum(cut, len(cuts) - 1)]]
            return np.where((cut < len(cuts)) & (found < ends), found, np.inf)
        begins = self.line.least.work
        found = begins[np.minimum(place, len(begins) - 1)] - probe.beside
        found = np.where(place < len(begins), np.clip(found, 0.0, ends), np.inf)
        return np.where(np.isfinite(ends), found, np.inf)

    # -- seconds -----------------------------------------------------------------------------

    def _demands(
        self, ends: Array, option: StageDeployment, u: int, probe: Probe
    ) -> Iterator[tuple[Times, Array]]:
        """What counts before the begin of the stage, and how much of it there has to be."""
        r, p, waits, beside = option.replicas, self.ranks - u, self.waits, probe.beside
        m, own, again = self.setting.num_microbatches, self.per_work(r, p), float(option.recompute)
        least, there = self.line.least, self._there(ends)
        forward, backward = least.forward[there], least.backward[there]
        alone = own * (ends + again * forward) - probe.seconds
        if not self.splits:
            yield (own - waits, again * own, 0.0, 0.0), alone + (own - waits) * beside
        share = 1 if self.stream else option.share(m)
        once = own / share
        more, few = once * (share - 1), once * self._alternating(r, u, share, probe)
        if waits and self.splits:
            home = waits * kind_of(self.setting.schedule).halves(1.0)[0]
            most, f = self.line.most, few + again * own
            whole = waits * (most.forward[-1] - beside) + home * most.backward[-1]
            above = whole - probe.seconds + f * forward + (own - home) * backward
            yield (0.0, f, own, 0.0), above
        elif waits:
            through = waits * probe.full - probe.seconds
            for f, b in ((more + again * few, few), (few + again * more, more)):
                yield (0.0, f, b, 0.0), through + f * forward + b * backward
        per_byte, fixed = self._reduction(p, r) if r > 1 else (0.0, 0.0)
        summed = per_byte * least.trainable[there] + fixed
        if r > 1 or self.splits:
            # Of earlier stages F alone: as much as all their work less their W.
            busy = 0.0 if self.stream else own
            above = summed - probe.seconds if self.stream else alone + summed
            yield (busy - waits, again * busy, waits, per_byte), above + (busy - waits) * beside
        if waits and r > 1 and not self.splits:
            above = through + again * more * forward + more * backward + summed
            yield (0.0, again * more, more + waits, per_byte), above
            if u > r:
                later = max(1.0, m / (u - r)) * (probe.full - ends) + forward - beside
                above = waits * later + once * (again * forward + backward) + summed
                yield (0.0, again * once, once, per_byte), above - probe.seconds

    def _there(self, ends: Array) -> Places:
        """The first place at which so much work may lie before it."""
        knots = self.line.most.work
        found = np.searchsorted(knots, ends * (1 - 1e-12), "left")
        return np.minimum(found, len(knots) - 1)

    def _row(self, times: Times) -> Array:
        """So many times what lies before each place, rising."""
        if times not in self._rows:
            line, total = self.line, np.zeros(len(self.line.most.work))
            most, ends = line.most, line.most.work
            if not line.exact:  # up to the next place
                ends = np.append(line.least.work[1:], line.whole)
            rows = (ends, most.forward, most.backward, most.trainable)
            for n, row in zip(times, rows, strict=True):
                total = total + n * row if n else total
            self._rows[times] = np.maximum.accumulate(total)
        return self._rows[times]

    def _alternating(self, r: int, u: int, share: int, probe: Probe) -> int:
        """Backwards of a replica that surely come before its last forward, or the mirror."""
        after = (self.ranks if probe.lost else u) - r
        deepest = most_depth(self.setting, r, after, self._straight)
        return max(0, share - 1 - deepest)

    def _reduction(self, p: int, r: int) -> tuple[float, float]:
        """Seconds for each byte, and in any case."""
        kind, rounds, link = kind_of(self.setting.schedule), 2 * (r - 1), self._ring(p, r)
        updates = self.setting.num_microbatches * kind.group(r) if self.stream else 1
        per_byte = rounds / r / link.bytes_per_second / updates
        return per_byte, rounds * link.latency_seconds / updates

    def _ring(self, p: int, r: int) -> Link:
        """What the replicas reduce over; in a bound the best that so many ranks may have."""
        if self.line.exact:
            return self.seats.ring(p, r)
        if r not in self._rings:
            self._rings[r] = min(
                (self.seats.ring(q, r) for q in range(self.ranks - r + 1)),
                key=lambda link: (-link.bytes_per_second, link.latency_seconds),
            )
        return self._rings[r]

    # -- bytes -------------------------------------------------------------------------------

    @cached_property
    def _straight(self) -> bool:
        return all(option.replicas == 1 for option in self.menu)

    def _limit(self, p: int, r: int) -> float | None:
        limit = self.seats.memory(p, r) if self.line.exact else self._largest
        return None if limit is None else limit * self.memory

    @cached_property
    def _largest(self) -> int | None:
        """Of all devices; None where one has no limit."""
        limits = [device.memory_bytes for device in self.seats.cluster.devices]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == len(limits) else None

    def _counts(self, option: StageDeployment, after: int) -> tuple[Counts, int]:
        """How often a stage holds what is trained, saved and received; and gradients received."""
        r = self.widest.get(option.replicas, option.replicas)
        guess = self.ranks if self.line.exact else None
        depth = least_depth(self.setting, r, max(after, 0), self.ranks, self._straight, guess)
        held = holding(self.setting, replace(option, replicas=r), depth, depth, depth)
        updated = held.gradient_buffers + held.optimizer_factor
        return (held.versions + updated, held.saved, held.received), held.returned

    def _bytes(self, counts: Counts) -> tuple[Array, Array]:
        """What it holds of all that lies before each place, at least and at most."""
        if counts not in self._held:
            trained, saved, received = counts
            least, most = (
                trained * one.trainable + one.frozen + saved * one.saved
                for one in (self.line.least, self.line.most)
            )
            most = np.maximum.accumulate(most - received * self.line.received)
            self._held[counts] = least, most
        return self._held[counts]

    def _within(self, limit: float, option: StageDeployment, u: int, ends: Array) -> Places:
        """The first place from which a stage that ends there keeps its limit of memory."""
        counts, returned = self._counts(option, u - option.replicas)
        least, most = self._bytes(counts)
        there = self._there(ends)
        needed = least[there] + returned * self.line.returned[there] - limit
        return np.searchsorted(most, needed * (1 - 1e-12), "left")

    def most_lost(self, seconds: float) -> int:
        """Ranks that may do next to nothing of the work within these seconds, and hold nothing."""
        ranks, beside = self.ranks, self.line.beside
        least = min(self.per_work(option.replicas, 0) * option.replicas for option in self.menu)
        each = seconds / max(least, 1e-300)  # of work, that one rank may do
        most = float(ranks - 1)
        if each > beside:
            most = min(most, (each * ranks - self.line.whole) / (each - beside))
        if self._largest is not None:
            times = min(self._counts(option, 0)[0][0] for option in self.menu)
            held, open_ = (times * one.trainable for one in (self.line.least, self.line.most))
            between = float((open_ - held).max())
            if self._largest > between:
                spare = self._largest * ranks - float(held[-1])
                most = min(most, spare / (self._largest - between))
        return max(0, int(most * (1 + 1e-9) + 1e-9))
