"""Lower bound of a setting, whatever the cuts: a dynamic program along a path.

Real models are almost chains: masks, branches and labels sit beside one long path of groups whose
values carry gradients.  Stages that hold groups of the path wait for each other along it, there and
back, and each holds an interval of it.  A group beside the path surely is on the stage whose
interval holds the last of the path before it and the first of the path behind it; where a boundary
lies between these two it may be on either side, or on a stage without the path.

Within T seconds a stage of r replicas, of which each takes k = ⌈m/r⌉ microbatches, has F and W of
one surely, with D the way of a microbatch down to the stage and back up from it, R the way through
it and beyond it and back, S all of it, w its warm-up and A the reduction of its gradients:

- D + k (F + W) ≤ T, and with A in place of the way back;
- S + (k − 1) max(F, W) + (k − 1 − w) min(F, W) ≤ T;
- D + q R + rest (F + W) ≤ T, for q round trips that follow each other with w + 1 in flight.

Where ranks have one stage each, the links that the path takes before and behind it count (`Hops`),
and its own speed where each holds some of the path: then it is known which stage it is.

A stage that recomputes has F in W once more.  Where backward is split, all ways are of its first
part, and the first of these holds for all of W without the way back.  A stream has (F + W) / r and
A.  Memory is what surely is there.  Each of these says what a stage may compute besides, and all
stages together have to do all work.  Ranks that hold nothing of the path do at most what lies
beside it at so many boundaries, and nobody surely waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from pdcompile.cluster import Link, ring_seconds
from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.bounds import trips_in_turn
from pdcompile.passes.partition.budget import Late
from pdcompile.passes.partition.model import Flow, Model
from pdcompile.problem import StageLimits
from pdcompile.problem.deployment import StageDeployment
from pdcompile.schedule.registry import ScheduleKind

Array = NDArray[np.float64]
Places = NDArray[np.intp]
Limits = tuple[NDArray[np.bool_], Array, list[tuple[Array, float]]]

CLOSE = 1e-7  # relative: where the bisection ends
MOST = 200  # groups of the path that are told apart
CELLS = 4e7  # of all tables of one probe, or kept for more; beyond, fewer groups are told apart
FEWEST = 60


class Path:
    """A path of a model, and the sums of its groups over intervals j + 1 to k of it, as [j, k]."""

    def __init__(self, model: Model, most: int = MOST):
        self.model, self.whole = model, heaviest_path(model)
        kept = self.kept = _told_apart(model, self.whole, most)
        self.size = len(kept)
        number = {v: n for n, v in enumerate(kept, start=1)}
        self.low, self.high = sides(model.num_groups, model.arcs, number, self.size)
        self.work = self.seconds(1.0)
        self.inside, self.hidden = cache(self._inside), cache(self._hidden)

    def _inside(self, name: str, every: bool) -> Array:
        """The sum of `work`, or of a field of the model, over groups that surely are on a stage
        with that interval.

        Where `every` stage holds some of the path, the first one also has what nothing of the path
        is before, and the last one what nothing is behind.
        """
        row = self.work if name == "work" else np.array(getattr(self.model, name), dtype=float)
        found = self._table(row)[::-1].cumsum(0)[::-1].cumsum(1)  # low from j + 1 on, high up to k
        rows, columns = np.arange(1, self.size + 2), np.arange(self.size + 1)
        if every:
            rows[0], columns[-1] = 0, self.size + 1
        result: Array = found[np.ix_(rows, columns)]
        return result

    def before(self, row: Sequence[float] | Array) -> Array:
        """The sum over groups that surely are on earlier stages, by the first boundary."""
        found: Array = np.bincount(self.high, row, self.size + 2).cumsum()
        return found[: self.size + 1]

    @cached_property
    def open_work(self) -> Array:
        """Work that may lie on a stage with the interval."""
        begun = np.bincount(self.low, self.work, self.size + 2).cumsum()
        ended = self.before(self.work)
        begun[self.size], ended[0] = self.work.sum(), 0.0  # all before the last boundary
        result: Array = np.maximum(begun[None, : self.size + 1] - ended[:, None], 0.0)
        return result

    def seconds(self, backward: float) -> Array:
        """Forward and such a part of backward, of every group."""
        return np.array(self.model.forward) + backward * np.array(self.model.backward)

    def aside(self, lost: int, ranks: int, backward: float = 1.0) -> float:
        """The most such seconds that so many ranks, which hold nothing of the path, may work."""
        found = self.hidden(backward)
        return float(found[min(lost, ranks - lost + 1, len(found) - 1)])

    def _hidden(self, backward: float) -> Array:
        """Work that stages without the path may do, by how many boundaries they lie at: of each
        group once."""
        row = self.seconds(backward)
        table = self._table(row)
        upto = table.cumsum(0)  # low up to j
        both = upto.sum(1)[:, None] - upto.cumsum(1)  # and high behind k
        span = both[: self.size + 1, : self.size + 1]
        alone = np.diagonal(span)
        best, found = alone.copy(), [0.0, float(alone.max(initial=0.0))]
        later = np.triu(np.ones_like(span), 1) > 0
        while len(found) <= self.size + 1 and found[-1] > found[-2] * (1 + 1e-9):
            best = np.where(later, best[:, None] + alone[None, :] - span, 0.0).max(0)
            found.append(max(found[-1], float(best.max(initial=0.0))))
        return np.array(found)

    def _table(self, row: Sequence[float] | Array) -> Array:
        cells = np.ravel_multi_index((self.low, self.high), (self.size + 2, self.size + 2))
        found: Array = np.bincount(cells, row, (self.size + 2) ** 2).astype(np.float64)
        return found.reshape(self.size + 2, self.size + 2)


def _told_apart(model: Model, path: Sequence[int], most: int) -> tuple[int, ...]:
    """Groups of the path, at most so many, with as much work between them as can be had."""
    if len(path) <= most:
        return tuple(path)
    work = np.array([model.forward[v] + model.backward[v] for v in path]).cumsum()
    marks = np.searchsorted(work, np.linspace(0.0, work[-1], most + 1)[:-1], "left")
    return tuple(path[n] for n in dict.fromkeys(marks.tolist()))


@dataclass(frozen=True, slots=True)
class Hops:
    """A stage among those that hold some of the path: its speed at most, and by the boundaries
    before and behind it seconds of a microbatch on links there and back, at least.
    """

    speed: float
    before: Array
    behind: Array


@dataclass(frozen=True, slots=True)
class StageRules:
    """Stages of a setting, as its bound knows them.

    `fastest`: speed of the fastest device; `limit`: bytes of the largest, None where one has no
    limit; `share`: microbatches that a replica takes, by its row of the menu.  Of a row and the
    ranks behind the stage: `deepest`, its most warm-up, and `held`, how often it holds what is
    trained and what is saved, at least.  `ring`: the best link that so many replicas may have;
    `hops`: of stages with some of the path, where so many have none; `most_lost`: of the latter.
    """

    kind: ScheduleKind
    stream: bool
    num_microbatches: int
    ranks: int
    menu: tuple[StageDeployment, ...]
    fastest: float
    limit: int | None
    deepest: Callable[[StageDeployment, int], int]
    held: Callable[[StageDeployment, int], tuple[float, int]]
    ring: Callable[[int], Link] = lambda _: StageLimits()
    hops: Callable[[int], Sequence[Hops]] | None = None
    most_lost: float = np.inf


@dataclass
class PathBound:
    """The bound of one setting."""

    path: Path
    rules: StageRules
    close: float = CLOSE
    _known: dict[tuple[StageDeployment, int, int], Limits] = field(init=False, default_factory=dict)

    def least(self, lower: float, upper: float, late: Late) -> float:
        """Seconds from `lower` to `upper` that no pipeline is below; as close as time allows."""
        if self.possible(lower) or late():
            return lower
        if not self.possible(upper):
            return upper
        while upper - lower > self.close * upper and not late():
            middle = (lower + upper) / 2
            lower, upper = (lower, middle) if self.possible(middle) else (middle, upper)
        return lower

    def possible(self, seconds: float) -> bool:
        """True if nothing shows that these seconds are not enough."""
        return any(
            self._chain(seconds, lost)
            for lost in range(int(min(self.rules.ranks, self.rules.most_lost + 1)))
        )

    def _chain(self, seconds: float, lost: int) -> bool:
        """True if all ranks but so many, which hold nothing of the path, may do the rest."""
        rules, whole = self.rules, float(self.path.work.sum())
        aside = self.path.aside(lost, rules.ranks)
        per_rank = seconds / (1 if rules.stream else rules.num_microbatches) * rules.fastest
        if (rules.ranks - lost) * per_rank + aside < whole * (1 - 1e-9):
            return False  # all that the ranks do at full speed
        done = [np.array([-np.inf] * self.path.size + [0.0])]
        for u in range(1, rules.ranks - lost + 1):
            done.append(np.full(self.path.size + 1, -np.inf))
            for option in rules.menu:
                after = u - option.replicas
                if after >= 0 and np.isfinite(done[after]).any():
                    found = self._most(option, after, seconds, lost) + done[after]
                    done[u] = np.maximum(done[u], found.max(1))
        return float(done[-1][0]) + aside >= whole * (1 - 1e-9)

    def _most(self, option: StageDeployment, after: int, seconds: float, lost: int) -> Array:
        """[j, k]: work of a microbatch that the stage may do; −inf where it takes too long."""
        key, at, v = (option, after, lost), seconds * (1 + 1e-12), self._hops(after, lost).speed
        fits, longest, growing = self._known.get(key) or self._limits(*key)
        surely, found = self.path.inside("work", not lost), self.path.open_work
        for value, times in growing:
            found = np.minimum(found, surely + (at - value) * v / times)
        result: Array = np.where(fits & (longest <= at), found, -np.inf)
        return result

    def _limits(self, option: StageDeployment, after: int, lost: int) -> Limits:
        """[j, k]: whether it may be the stage, and its seconds; kept for later probes."""
        demands = [*self._demands(option, after, lost)]
        fits = np.triu(np.ones((self.path.size + 1,) * 2, dtype=bool), 1)
        if self.rules.limit is not None:
            trained, saved = self.rules.held(option, after)
            parts = ("trainable_bytes", trained), ("frozen_bytes", 1), ("saved_bytes", saved)
            held = sum(count * self.path.inside(name, not lost) for name, count in parts)
            fits &= held <= self.rules.limit * (1 + 1e-12) + 0.5
        longest = reduce(np.maximum, (value for value, _ in demands))
        found = fits, longest, [each for each in demands if each[1] > 0]
        if len(self._known) * (len(demands) + 2) * fits.size < CELLS:
            self._known[option, after, lost] = found
        return found

    def _hops(self, after: int, lost: int) -> Hops:
        """Those of the stage with so many ranks behind it; none where no one knows which it is."""
        if self.rules.hops is not None:
            return self.rules.hops(lost)[self.rules.ranks - lost - 1 - after]
        none = np.zeros(self.path.size + 1)
        return Hops(self.rules.fastest, none, none)

    def _demands(
        self, option: StageDeployment, after: int, lost: int
    ) -> Iterator[tuple[Array, float]]:
        """Seconds of each stage, and how much they grow at least with a second of other work."""
        rules, v, r = self.rules, self.rules.fastest, option.replicas
        hops = self._hops(after, lost)
        f, w = (self.path.inside(name, not lost) / hops.speed for name in ("forward", "backward"))
        w = w + option.again(1.0) * f
        sizes = self.path.inside("trainable_bytes", not lost)
        summed = ring_seconds(rules.ring(r), sizes, r) if r > 1 else np.zeros((1, 1))
        if rules.stream:
            yield (f + w) / r, 1 / r
            if r > 1:
                yield summed / (rules.num_microbatches * rules.kind.group(r)), 0.0
            return
        share = option.share(rules.num_microbatches)
        part = rules.kind.halves(1.0)[0]  # of a backward
        down, both = (self._before(each, lost)[:, None] / v for each in (0.0, part))
        yield down + share * (f + w) + summed, share
        again, ways = option.again(1.0) * f, self._ways(part, lost)[:, None] / v
        home = part * self.path.inside("backward", not lost) / hops.speed + again
        before, behind = hops.before[:, None], hops.behind[None, :]
        yield both + share * (f + home) + before, share if part == 1 else 0.0
        depth = min(rules.deepest(option, after + lost) + 1, share)
        through = ways[0] + behind + (share - 1) * np.maximum(f, home)
        through = through + (share - depth) * np.minimum(f, home)
        yield through + again + before, (share - depth) if part == 1 else 0.0
        once = np.maximum(both + ways, ways[0]) + behind  # what is aside is only once in all
        for trips, rest in trips_in_turn(share, depth):
            around = (ways + behind) * (trips - 1) + rest * (f + home)
            yield once + around + before, rest if part == 1 else 0.0

    def _before(self, part: float, lost: int) -> Array:
        """Work of a microbatch on earlier stages, at least, by where the stage begins."""
        found = self.path.before(self.path.seconds(part))
        return np.maximum(found - self.path.aside(lost, self.rules.ranks, part), 0.0)

    def _ways(self, part: float, lost: int) -> Array:
        """The same on the stage and later ones, there and back."""
        row = self.path.seconds(part)
        behind = np.bincount(self.path.low, row, self.path.size + 2)[::-1].cumsum()[::-1]
        found: Array = np.concatenate(([row.sum()], behind[2:]))
        return np.maximum(found - self.path.aside(lost, self.rules.ranks, part), 0.0)


def groups_told_apart(ranks: int, rows: int, most: int = MOST) -> int:
    """Number of groups of a path that keeps the tables of a probe small."""
    return int(min(most, max(FEWEST, (CELLS / max(ranks * rows, 1)) ** 0.5)))


def heaviest_path(model: Model) -> tuple[int, ...]:
    """Groups in a row, each reading a value with a gradient of the one before; the most work."""
    after: list[list[int]] = [[] for _ in range(model.num_groups)]
    for flow in with_gradients(model):
        after[flow.sources[0]] += flow.sinks
    heaviest, following = [0.0] * model.num_groups, [-1] * model.num_groups
    for v in reversed(range(model.num_groups)):
        work, following[v] = max(((heaviest[u], u) for u in after[v]), default=(0.0, -1))
        heaviest[v] = work + model.forward[v] + model.backward[v]
    path, v = [], max(range(model.num_groups), key=heaviest.__getitem__)
    while v >= 0:
        path.append(v)
        v = following[v]
    return tuple(path)


def with_gradients(model: Model) -> list[Flow]:
    """Values of which gradients come back."""
    return [flow for flow in model.flows if not flow.tied and flow.backward_messages > 0]


def sides(
    count: int, arcs: Iterable[tuple[int, int]], number: dict[int, int], size: int
) -> tuple[Places, Places]:
    """The last of the path before every group and the first behind it, as these arcs go.

    Groups of the path have numbers from 1: both are its own number for one of them, 0 and one more
    than there are where there is none before or behind.
    """
    before, after = lattice.neighbours(count, arcs)
    low, high = np.zeros(count, dtype=np.intp), np.full(count, size + 1, dtype=np.intp)
    for v in range(count):
        low[v] = number.get(v) or max((low[u] for u in before[v]), default=0)
    for v in reversed(range(count)):
        high[v] = number.get(v) or min((high[u] for u in after[v]), default=size + 1)
    return low, high
