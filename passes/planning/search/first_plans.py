"""The first part of the search for a plan: plans of every setting, and its bound.

Cut at positions alone a plan takes some ten milliseconds, whatever the replicas, and so does the
bound of a setting along the heaviest path (`passes.partition.space.setting_bound`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice, product, starmap
from typing import NamedTuple

from pdcompile.passes.partition.space.candidates import evaluation
from pdcompile.passes.partition.space.pipelines import (
    CUTS,
    Pipelines,
    PreparedProblem,
    simple_bound,
)
from pdcompile.passes.partition.space.search_branches import Branch, sharpened
from pdcompile.passes.partition.space.seats import Seats, arrangements
from pdcompile.passes.partition.space.setting_bound import setting_bound
from pdcompile.passes.planning.search.trials import SURE, Trials
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import kind_of

JUDGING, BOUNDING = 0.7, 0.75  # of the time, until plans are tried, and bounds sought
SPARING = 0.97  # of the memory, after a plan took too much of it
SETTLING = 0.8  # of the time, until plans are judged that may lack memory
LEAST = 0.3  # of the memory, with which plans are sought
FILL, SPLIT = 0.9, 0.3  # of the time to fill and drain a pipeline, in which ranks are surely idle
MOST_ORDERS = 6  # of unlike devices
FEW = 8  # replicas of a stage, beyond which they divide the number of devices


class Case(NamedTuple):
    """A setting, how many replicas a stage may have, and the order of the devices.

    `branch`: of ranks that hold several stages.
    """

    setting: Setting
    counts: tuple[int, ...]
    order: tuple[int, ...]
    branch: Branch | None = None


@dataclass
class FirstPlans:
    """Plans cut at positions; `bounds` of settings with one stage a rank are seconds of a step.

    `sharing`: branches of ranks that hold several stages.
    """

    trials: Trials
    space: SearchSpace
    settings: list[Setting]
    prepared_at: Callable[[int], PreparedProblem]
    sharing: Sequence[Branch] = ()
    bounds: dict[Setting, float] = field(default_factory=dict)
    #: by schedule, the share of the memory that stages may take by the planner's formula
    memory: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cluster = self.trials.cluster
        seats = Seats(cluster, tuple(range(len(cluster.devices))))
        # All forwards first holds the most: the others are likelier to fit, and as fast.
        self.settings.sort(key=lambda setting: kind_of(setting.schedule).warmup == "all")
        for setting in self.settings:
            prepared = self.prepared_at(setting.num_microbatches)
            seconds = simple_bound(prepared, self.space, setting, seats)
            self.bounds[setting] = seconds * setting.scale
        self._note_floor(0.0)

    def run(self) -> None:
        """Judge plans of all settings, the fastest first, and bound every setting by the best."""
        self._judge()
        self.settings.sort(key=self.bounds.__getitem__)
        self._bound()
        self.trials.settle(SETTLING, likely=True)

    def _judge(self) -> None:
        """Cut what may be fastest first and try it, until all else is slower; what may lack memory
        comes again with a smaller share of it."""
        trials, ticket = self.trials, count()
        heap = [(self._estimate(case), next(ticket), case, 1.0) for case in self._cases()]
        heapq.heapify(heap)
        while heap and not trials.over(JUDGING):
            seconds, _, case, share = heapq.heappop(heap)
            if trials.found and seconds >= trials.below_with_gain:
                break
            schedule, less = case.setting.schedule, 1.0
            for one in self._cut(case, share := min(share, self.memory.get(schedule, 1.0))):
                if (taken := trials.offer(one)) > SURE:
                    seconds, less = self._seconds(one), min(less, SPARING * SURE / taken)
            if less < 1 and share * less > LEAST and not case.branch:
                self.memory[schedule] = share * less
                heapq.heappush(heap, (seconds, next(ticket), case, share * less))

    def _cases(self) -> Iterator[Case]:
        """Every setting with equally many replicas of all stages, and any, in orders of devices."""
        ranks = len(self.trials.cluster.devices)
        counts = self.space.counts(ranks)
        few = tuple(r for r in counts if r <= FEW or ranks % r == 0 or self.space.widths)
        menus = [few] if self.space.widths or self.space.replicas == "any" else []
        menus += [] if self.space.widths else [(r,) for r in counts]
        yield from starmap(Case, product(self.settings, dict.fromkeys(menus), self._orders()))
        for one in self.sharing:
            yield Case(one.setting, one.counts, one.seats.ranks, one)

    def _estimate(self, case: Case) -> float:
        """Seconds of a step, about: all work on the ranks, and the time in which they are idle."""
        kind, m = kind_of(case.setting.schedule), case.setting.num_microbatches
        seats = self._seats(case, 1.0)
        if seats is None:
            return math.inf
        used, branch = len(seats.ranks), case.branch
        places = self.space.stages or (2 if len(case.counts) > 1 else used // case.counts[0])
        places, each = (used // case.counts[0], kind.usual) if branch else (places, 1)
        fill = SPLIT if kind.splits_backward else FILL
        idle = 0.0 if kind.stream else (places - 1) / (m * each) * fill
        spread = len(self.trials.cluster.devices) / used
        bound = branch.bound if branch else self.bounds[case.setting]
        return bound * spread * (1 + idle) * (1 + kind.gain)

    def _orders(self) -> tuple[tuple[int, ...], ...]:
        if self.space.in_order and self.space.stages:
            return (tuple(range(self.space.stages)),)
        return arrangements(self.trials.cluster)[0][:MOST_ORDERS]

    def _seats(self, case: Case, share: float) -> Seats | None:
        """Devices of a case; None where they do not suffice, or some would be left idle."""
        space, used = self.space, len(case.order)
        if case.branch:
            return case.branch.seats
        if space.widths or len(case.counts) == 1:
            r = case.counts[0]
            used = sum(space.widths) or r * (space.stages or used // r)
        if not 0 < used <= len(case.order) or (used < len(case.order) and not space.idle):
            return None
        return Seats(self.trials.cluster, case.order[:used], share)

    def _cut(self, case: Case, memory: float) -> Iterator[Candidate]:
        """The best cut at positions by its bound, and the one by load, that takes that share of
        the memory."""
        if case.branch:
            yield from case.branch.likely()
            return
        space, prepared = self.space, self.prepared_at(case.setting.num_microbatches)
        seats, given = self._seats(case, memory), 0
        both = len(case.counts) == 1  # looking at any replicas twice takes long
        for likely in (False, True):
            if seats is None or (given and not both):
                return
            pipelines = Pipelines(
                prepared, space, case.setting, seats, space.menu(case.counts), stages=space.stages,
                segments=prepared.positions, likely=likely,
            )  # fmt: skip
            if pipelines.bound() < math.inf:
                found = islice(pipelines.candidates(lambda: math.inf), CUTS)
                for one in islice((one for _, one in found if one is not None), 1):
                    given += 1
                    yield one

    def _seconds(self, candidate: Candidate) -> float:
        """Seconds of a step, by the evaluator, as trials are priced."""
        setting = candidate.setting
        problem = self.prepared_at(setting.num_microbatches).problem
        seconds = evaluation(problem, self.trials.cluster, candidate).seconds * setting.scale
        return self.trials.price(seconds, candidate)

    def _bound(self) -> None:
        """Raise the bounds of settings to where nothing shows that a plan takes longer."""
        late = partial(self.trials.over, BOUNDING)
        for setting in self.settings:
            known, upper = self.bounds[setting], self.trials.below
            if known < upper and not late():
                prepared, scale = self.prepared_at(setting.num_microbatches), setting.scale
                within, cluster = (known / scale, upper / scale), self.trials.cluster
                found = setting_bound(prepared, self.space, setting, cluster, within, late)
                self.bounds[setting] = max(known, found * scale)
        self._note_floor(self.trials.below)

    def _note_floor(self, seconds: float) -> None:
        least = sharpened(self.sharing, seconds, partial(self.trials.over, BOUNDING))
        self.trials.floor = min(least, *self.bounds.values())
