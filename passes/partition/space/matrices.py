"""Seconds and bytes of every stage that two ideals can enclose, for each row of its menu.

A stage J∖I with r replicas on positions p … p + r − 1 of the pipeline, `after` ranks behind it:
what it takes depends on nothing else, but for how many stages its values go to (counted once),
how fast the links to its neighbours are (the fastest from any of its ranks), and its warm-up
depth (the least that the ranks behind it allow).  So the figures are lower bounds of what
`evaluate` says, and equal for straight pipelines of values that go next door.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdcompile.cluster import ring_seconds
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.segments import Matrix, Segments
from pdcompile.passes.partition.space.depths import least_depth, most_depth
from pdcompile.passes.partition.space.paths import Paths
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.problem import StageLimits
from pdcompile.problem.space import Setting, StageOption
from pdcompile.schedule.registry import GRADIENT_SLOTS, kind_of

Bool = NDArray[np.bool_]
SAME_BYTES = StageLimits(bytes_per_second=1.0)  # seconds on this link are bytes
FREE = StageLimits()


@dataclass
class Matrices:
    """Costs of one setting; `last` is the group of the model's output, if it is pinned."""

    segments: Segments
    setting: Setting
    straight: bool  # no row of the menu has replicas
    recompute: tuple[bool, ...]
    last: int | None = None
    full_duplex: bool = False  # all links
    bounding: bool = True  # else depths are the likely ones, and stages recompute if they have to
    _links: dict[tuple[StageLimits, StageLimits], Matrix] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.segments.ideals)

    def load(self, seats: Seats, p: int, option: StageOption, rows: slice) -> Matrix:
        """Seconds per microbatch of a stage J∖I from position p on, at least.

        Infinite where the stage is not allowed.
        """
        r = option.replicas
        load = self._compute(seats, p, option, rows) / r
        traffic = self._transfer(seats, p, r)[rows] / r
        load = np.maximum(load, traffic + self._reduction(seats, p, r, rows))
        return np.where(self._allowed(seats, p, option, rows), load, np.inf)

    def bound(self, seats: Seats, p: int, option: StageOption, rows: slice, load: Matrix) -> Matrix:
        """What the candidate's objective is at least, given such a stage and its `load`.

        Without a flush seconds per microbatch: its load, or a round trip of one microbatch over
        those that are in flight.  With one seconds of the minibatch: what runs before, a
        replica's microbatches one after the other, the reduction or what runs after.
        """
        r, own = option.replicas, self._compute(seats, p, option, rows)
        paths, v = self._paths, seats.fastest
        before, behind, back = (
            (table if len(table) == 1 else table[rows]) / v
            for table in (paths.before, paths.behind, paths.back)
        )
        share, depth = -(-self.setting.num_microbatches // r), self.depth(seats, p, r, most=True)
        f = self.segments.forward[rows] / seats.speed(p, r)
        if kind_of(self.setting.schedule).stream:
            trip: Matrix = np.maximum(load, (own + behind) / (r * (depth + 1)))
            return trip
        # Until its first backward a replica does depth + 1 forwards, and at the end so many
        # backwards; in between one microbatch goes all the way to the end and back.
        reduction = self.setting.num_microbatches * self._reduction(seats, p, r, rows)
        through = own + behind + (share - 1) * np.maximum(f, own - f)
        through = through + max(share - 1 - depth, 0) * np.minimum(f, own - f)
        result: Matrix = before + np.maximum(share * own, through)
        result = np.maximum(result + back, before + share * own + reduction)
        return np.where(np.isfinite(load), result, np.inf)

    # -- seconds -----------------------------------------------------------------------------

    def _compute(self, seats: Seats, p: int, option: StageOption, rows: slice) -> Matrix:
        forward, backward = self.segments.forward[rows], self.segments.backward[rows]
        times = 2 if option.recompute else 1
        result: Matrix = (times * forward + backward) / seats.speed(p, option.replicas)
        return result

    def _reduction(self, seats: Seats, p: int, r: int, rows: slice) -> Matrix:
        """Seconds per microbatch of the stage's all-reduce."""
        if r == 1:
            return np.zeros((1, 1))
        once = ring_seconds(seats.ring(p, r), self._trainable[rows], r)
        result: Matrix = once / self.setting.num_microbatches
        return result

    def _transfer(self, seats: Seats, p: int, r: int) -> Matrix:
        into = seats.between(slice(0, p), slice(p, p + r))
        out = seats.between(slice(p, p + r), slice(p + r, None))
        if not (into.full_duplex and out.full_duplex):
            out = replace(out, full_duplex=False)
        if (into, out) not in self._links:
            self._links[into, out] = self._sent(self.segments.model, into, out)
        return self._links[into, out]

    def _sent(self, model: Model, into: StageLimits, out: StageLimits) -> Matrix:
        """Link seconds of a stage between two links."""
        problem = replace(model.problem, stages=(into, out))
        return replace(self.segments, model=replace(model, problem=problem), _links={}).transfer(1)

    @cached_property
    def _paths(self) -> Paths:
        return Paths.of(self.segments)

    # -- memory and what is allowed --------------------------------------------------------------

    def depth(self, seats: Seats, p: int, r: int, *, most: bool = False) -> int:
        """Warm-up depth of the stage: the least (or most) that it can have."""
        after = len(seats.ranks) - p - r
        if most:
            return most_depth(self.setting, r, after, self.straight)
        guess = None if self.bounding else len(seats.ranks)
        return least_depth(self.setting, r, after, len(seats.ranks), self.straight, guess)

    def _allowed(self, seats: Seats, p: int, option: StageOption, rows: slice) -> Bool:
        """Whether J∖I may be the stage, with this row of its menu."""
        r = option.replicas
        allowed, limit = self.structure(seats, p, r, rows), seats.memory(p, r)
        spared = option.recompute and False in self.recompute
        if spared and limit is None and (self._monotone or not self.bounding):
            return np.zeros_like(allowed)
        if limit is None:
            return allowed
        limit_bytes = limit * (1 + 1e-12) + 0.5
        allowed &= self.bytes(seats, p, option, rows) <= limit_bytes
        if spared and not self.bounding:
            without = replace(option, recompute=False)
            allowed &= self.bytes(seats, p, without, rows) > limit_bytes
        return allowed

    @cached_property
    def _monotone(self) -> bool:
        """Whether a stage that takes longer never ends sooner: the order on links is fixed.

        Where several kinds of messages wait for a link, the first to come goes first, and
        seconds lost at one place can be won elsewhere.
        """
        return self.straight and self.full_duplex and not self._ties

    def bytes(self, seats: Seats, p: int, option: StageOption, rows: slice) -> Matrix:
        """Memory of one rank of such a stage, at least."""
        setting, m, r = self.setting, self.setting.num_microbatches, option.replicas
        kind = kind_of(setting.schedule)
        buffers = kind.gradient_buffers(late=setting.clipping or r > 1)
        depth, share = self.depth(seats, p, r), -(-m // r)
        in_flight, slots = kind.in_flight(depth, share), kind.slots(depth, share)
        total = self._fixed[rows] + (kind.versions - 1) * self._trainable[rows]
        total = total + (buffers + setting.optimizer_factor) * self._owned[rows]
        sets = 1 if option.recompute else in_flight
        total = total + sets * self._saved[rows] + slots * self._received[rows]
        result: Matrix = total + min(GRADIENT_SLOTS, in_flight) * self._returned[rows]
        return result

    def structure(self, seats: Seats, p: int, r: int, rows: slice) -> Bool:
        """Whether J∖I may be the stage if memory does not matter."""
        allowed = self._nested[rows] & (self._whole_ties[rows] if r > 1 else True)
        if self.last is not None:
            held = self.segments.inside[:, self.last]
            final = p + r == len(seats.ranks)
            allowed = allowed & (~held[rows, None] if final else ~held[None, :])
        return allowed

    @cached_property
    def _nested(self) -> Bool:
        result = self.segments.subset.copy()
        np.fill_diagonal(result, False)
        return result

    @cached_property
    def _ties(self) -> list[tuple[int, NDArray[np.intp], NDArray[np.intp]]]:
        """Shared trainable parameters: bytes, how many of their groups lie in each ideal."""
        model = self.segments.model
        group_of = {i: g for g, items in enumerate(model.members) for i in items}
        found = []
        for parameter in model.problem.shared:
            ends = sorted({group_of[i] for i in parameter.items})
            if parameter.trainable:
                count = self.segments.inside[:, ends].sum(1)
                found.append((parameter.bytes, count, np.array([len(ends)])))
        return found

    @cached_property
    def _whole_ties(self) -> Bool:
        """J∖I holds all of a shared parameter's groups or none: its stage may have replicas."""
        result = np.ones((self.size, self.size), dtype=bool)
        for _, count, every in self._ties:
            held = count[None, :] - count[:, None]
            result &= (held == 0) | (held == every)
        return result

    @cached_property
    def _own_trainable(self) -> Matrix:
        model = self.segments.model
        items = model.problem.items
        each = [float(sum(items[i].trainable_bytes for i in group)) for group in model.members]
        inside = self.segments.inside.astype(np.float64) @ np.array(each, dtype=np.float64)
        result: Matrix = inside[None, :] - inside[:, None]
        return result

    @cached_property
    def _trainable(self) -> Matrix:
        total = self._own_trainable.copy()
        for size, count, _ in self._ties:
            total += size * (count[None, :] > count[:, None])
        return total

    @cached_property
    def _owned(self) -> Matrix:
        """Trainable bytes that the stage itself updates: shared ones on their first holder."""
        total = self._own_trainable.copy()
        for size, count, _ in self._ties:
            total += size * ((count[None, :] > 0) & (count[:, None] == 0))
        return total

    @cached_property
    def _fixed(self) -> Matrix:
        """Parameters once each, and the workspace (the model's rule counts one copy)."""
        return self._with_in_flight(0)

    @cached_property
    def _saved(self) -> Matrix:
        saved = np.array(self.segments.model.saved_bytes, dtype=np.float64)
        inside = self.segments.inside.astype(np.float64) @ saved
        result: Matrix = inside[None, :] - inside[:, None]
        return result

    @cached_property
    def _received(self) -> Matrix:
        kept = self._with_in_flight(1) - self._with_in_flight(0)
        return np.maximum(kept - self._saved, 0.0)

    def _with_in_flight(self, count: int) -> Matrix:
        model = self.segments.model
        rule = replace(model.problem.memory, in_flight=(count,))
        problem = replace(model.problem, memory=rule)
        return replace(self.segments, model=replace(model, problem=problem)).memory(0)

    @cached_property
    def _returned(self) -> Matrix:
        """Bytes of gradients that come back to the stage."""
        model = self.segments.model
        back = tuple(
            replace(flow, forward_bytes=0.0, forward_messages=0.0, backward_messages=0.0)
            for flow in model.flows
        )
        half = replace(SAME_BYTES, full_duplex=False)
        return self._sent(replace(model, flows=back), FREE, half)
