"""The first part of the search for a plan: plans of every setting, and its bound.

Cut at positions alone a plan takes some ten milliseconds, whatever the replicas, and so does the
bound of a setting along the heaviest path (`passes.partition.space.setting_bound`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count, product
from operator import mul

import numpy as np

from pdcompile.cluster import ring_seconds, slowest
from pdcompile.passes.partition.space.pipelines import Part
from pdcompile.passes.partition.space.search_branches import Branch
from pdcompile.passes.partition.space.seats import Seats, arrangements
from pdcompile.passes.partition.space.setting_bound import setting_bound
from pdcompile.passes.planning.search.move_groups import move_groups
from pdcompile.passes.planning.search.trials import SURE, Trials
from pdcompile.problem.space import SearchSpace, Setting
from pdcompile.schedule.registry import kind_of

JUDGING, MOVING, BOUNDING = 0.4, 0.65, 0.7  # of the time, until each of these ends
SPARING = 0.97  # of the memory, after a plan took too much of it
SETTLING = 0.75  # of the time, until plans are judged that may lack memory
LEAST = 0.3  # of the memory, with which plans are sought
FILL, SPLIT = 0.9, 0.3  # of the time to fill and drain a pipeline, in which ranks are surely idle
CHEAP = 0.25  # of the positions, by what crosses
LATER = 0.1  # relative: any replicas take longer to look at than equally many
MOVED = 1e-4  # relative, of a move that is worth it
ABOUT = 1.25  # estimates may be so much too high
PUT_OFF = 2.0  # how much later what a schedule has comes once plans of it lacked memory
MOST_ORDERS = 6  # of unlike devices
FEW = 8  # replicas of a stage, beyond which they divide the number of devices


@dataclass
class FirstPlans:
    """Plans cut at positions; `bounds` of settings with one stage a rank are seconds of a step.

    `sharing`: branches of ranks that hold several stages.
    """

    trials: Trials
    space: SearchSpace
    settings: list[Setting]
    sharing: Sequence[Branch] = ()
    parts: dict[Setting, Part] = field(init=False, default_factory=dict)
    bounds: dict[Setting, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # All forwards first holds the most: the others are likelier to fit, and as fast.
        self.settings.sort(key=lambda setting: kind_of(setting.schedule).warmup == "all")
        for setting in self.settings:
            prepared = self.trials.prepared_at(setting.num_microbatches)
            self.parts[setting] = Part.whole(prepared, self.space, setting, self.trials.cluster)
            self.bounds[setting] = self.parts[setting].least_seconds
        self._note_floor()

    def run(self) -> None:
        """Judge plans of all settings, the fastest first, and bound every setting by the best."""
        complete = self.trials.prepared_at(self.space.microbatches[0]).complete
        rough = self.trials.sketch and not complete  # what else there is says little in its time
        self._judge(1.0 if rough else JUDGING)
        self.trials.settle(JUDGING, likely=True)
        if not rough:
            again = self.space.decides_recomputation
            move_groups(self.trials, lambda: self.trials.over(MOVING), MOVED, decide=again)
        self.settings.sort(key=self.bounds.__getitem__)
        if not rough:
            self._bound()
        self.trials.settle(SETTLING, likely=True)

    def _judge(self, until: float) -> None:
        """Cut what may be fastest first and try it, until all else is slower; what may lack memory
        comes again with a smaller share of it."""
        trials, ticket, sure = self.trials, count(), 1.0 if self.trials.sketch else SURE
        heap = [
            (self._estimate(one), next(ticket), self._least(one), one) for one in self._branches()
        ]
        heapq.heapify(heap)
        lacking: dict[str, int] = {}  # fewest replicas with which a schedule held too much
        later = set[int]()  # branches put off
        while heap and not (trials.over(until) and (trials.seen or trials.some)):
            seconds, number, least, branch = heapq.heappop(heap)
            if seconds == math.inf:
                break
            surely = max(least, seconds / ABOUT if len(branch.counts) == 1 else 0.0)
            if trials.seen and surely >= trials.below_with_gain:
                continue
            schedule, width = branch.setting.schedule, min(branch.counts)
            if width >= lacking.get(schedule, math.inf) and number not in later:
                later.add(number)
                heapq.heappush(heap, (seconds * PUT_OFF, number, least, branch))
                continue
            share, less = branch.seats.share, 1.0
            for one in branch.likely(share):
                taken = trials.offer(one)
                if taken > 1:
                    lacking[schedule] = min(width, lacking.get(schedule, width))
                elif lacking.get(schedule) == width:
                    del lacking[schedule]
                if taken > sure:
                    seconds, less = trials.priced(one), min(less, SPARING * SURE / taken)
            if less < 1 and share * less > LEAST and not branch.space.placement:
                branch.seats = replace(branch.seats, share=share * less)
                heapq.heappush(heap, (seconds, next(ticket), seconds, branch))

    def _branches(self) -> Iterator[Branch]:
        """Every setting and replicas on all devices, in some orders, or as many as a link joins."""
        cluster, space = self.trials.cluster, self.space
        orders = arrangements(cluster)[0][:MOST_ORDERS]
        if space.in_order and space.stages:
            orders = (tuple(range(space.stages)),)
        every = len(orders[0])
        sizes = accumulate((level.size for level in cluster.levels), mul, initial=1)
        few = [size for size in sizes if size < every and space.idle]
        shapes = [one for n in (every, *few) for one in product(self._menus(n), orders, (n,))]
        for setting, (menu, order, used) in product(self.settings, shapes):
            if space.widths or len(menu) == 1:
                used = sum(space.widths) or menu[0] * (space.stages or used // menu[0])
            if 0 < used <= every and (used == every or space.idle):
                prepared, seats = self.parts[setting].prepared, Seats(cluster, order[:used])
                yield Branch(prepared, space, setting, seats, menu, space.stages)
        yield from self.sharing

    def _menus(self, ranks: int) -> Iterable[tuple[int, ...]]:
        """Replicas that a stage may have on so many ranks: any, and the same for all stages."""
        space, counts = self.space, self.space.counts(ranks)
        few = tuple(r for r in counts if r <= FEW or ranks % r == 0 or space.widths)
        menus = [few] if space.widths or space.replicas == "any" else []
        return dict.fromkeys(menus + ([] if space.widths else [(r,) for r in counts]))

    def _least(self, branch: Branch) -> float:
        """Seconds of a step, about, where messages and sums are free and stages suit them."""
        used, several = len(branch.seats.ranks), len(branch.counts) > 1
        stages = None if branch.space.placement else self.space.stages
        return self._busy(branch, stages or (2 if several else used // branch.counts[0]))

    def _estimate(self, branch: Branch) -> float:
        """Seconds of a step, about, with equally many replicas of all stages; where any may be, the
        best of these, after those that have as many."""
        used, several = len(branch.seats.ranks), len(branch.counts) > 1
        widths = [w for w in branch.counts if used % w == 0]
        if stages := None if branch.space.placement else self.space.stages:
            widths = [max(1, used // stages)]
        each = [self._with_replicas(branch, width) for width in widths or branch.counts]
        return min(each) * (1 + LATER * several)

    def _busy(self, branch: Branch, places: int) -> float:
        """All work on the ranks, and the time in which they are idle."""
        kind, m = kind_of(branch.setting.schedule), branch.setting.num_microbatches
        each = kind.usual if branch.space.placement else 1
        fill = SPLIT if kind.splits_backward else FILL
        idle = 0.0 if kind.stream else (places - 1) / (m * each) * fill
        return branch.bound * (1 + idle) * (1 + kind.gain)

    def _with_replicas(self, branch: Branch, width: int) -> float:
        """The same with messages between stages, where cuts are among the cheapest, and sums of
        gradients; infinite where weights, gradients and optimizer states fill more than the ranks
        have."""
        kind, m = kind_of(branch.setting.schedule), branch.setting.num_microbatches
        seats, joins = branch.seats.ranks, self.trials.cluster.level_between
        places, segments = max(1, len(seats) // width), branch.prepared.positions
        trained = float(segments.byte_tables[0][0, -1]) / places
        states = branch.setting.optimizer_factor / (width if branch.setting.homes else 1)
        memory = [self.trials.cluster.devices[rank].memory_bytes or math.inf for rank in seats]
        if trained * (2 + states) > max(memory):
            return math.inf
        seconds = self._busy(branch, places)
        if places > 1:
            ends = [(seats[i * width - 1], seats[i * width]) for i in range(1, places)]
            each = kind.usual if branch.space.placement else 1
            crossing = segments.crossing(slowest(joins(*pair) for pair in ends))
            forth, back = (np.quantile([0.0, *one[1:-1]], CHEAP) for one in crossing)
            seconds = max(seconds, m * each / width * max(forth, back))
            seconds += 0.0 if kind.stream else (places - 1) * (forth + back)
        if width > 1:
            ring = slowest(joins(seats[0], one) for one in seats[1:width])
            seconds += ring_seconds(ring, trained, width)
        return float(seconds)

    def _bound(self) -> None:
        """Raise the bounds of settings to where nothing shows that a plan takes longer."""
        late = partial(self.trials.over, BOUNDING)
        for setting in self.settings:
            known, upper = self.bounds[setting], self.trials.below
            if known < upper and not late():
                within = known / setting.scale, upper / setting.scale
                found = setting_bound(self.parts[setting], within, late)
                self.bounds[setting] = max(known, found * setting.scale)
        self._note_floor()

    def _note_floor(self) -> None:
        self.trials.floor = min([*self.bounds.values(), *(one.bound for one in self.sharing)])
