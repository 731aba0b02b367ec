"""The first part of the search for a plan: likely plans of every setting, and its bound.

Along the order of the model's ops a likely plan takes milliseconds, whatever the replicas, and so
does the bound of a setting along its heaviest path (`passes.partition.space.line_plans`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product

from pdcompile.passes.partition.space.candidates import evaluation
from pdcompile.passes.partition.space.line_plans import LinePlans
from pdcompile.passes.partition.space.pipelines import PreparedProblem, simple_bound
from pdcompile.passes.partition.space.probing import Late
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.passes.planning.search.trials import Trials
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import kind_of

SHARE = 0.5  # of the time, for all of it
SCANNING = 0.1  # of the time, for a first plan of every setting
SPARING = 0.97  # of the memory, after a plan took too much of it
REFUSED = 2  # plans that lack memory, before one is sought that holds the least
SPARED = 3  # of these that are judged
SETTLING = 0.6  # of the time, until plans of it are judged


@dataclass
class LineSearch:
    """Search along lines for one stage a rank; `bounds` are seconds of a step.

    `others`: the least bound of all else that is searched, as sharp as the seconds ask for that
    are given to it, unless it is late.
    """

    trials: Trials
    space: SearchSpace
    settings: list[Setting]
    prepared_at: Callable[[int], PreparedProblem]
    others: Callable[[float, Late], float] = lambda _, __: math.inf
    bounds: dict[Setting, float] = field(default_factory=dict)
    #: by schedule, the share of the memory that stages may take by the planner's formula
    memory: dict[str, float] = field(default_factory=dict)
    least: dict[Setting, float] = field(default_factory=dict)  # seconds of a first plan

    def __post_init__(self) -> None:
        cluster, space = self.trials.cluster, self.space
        seats = Seats(cluster, tuple(range(len(cluster.devices))))
        self._plans = {
            m: LinePlans(self.prepared_at(m), space, cluster) for m in space.microbatches
        }
        # All forwards first holds the most: the others are likelier to fit, and as fast.
        self.settings = sorted(
            self.settings, key=lambda setting: kind_of(setting.schedule).warmup == "all"
        )
        for setting in self.settings:
            prepared = self.prepared_at(setting.num_microbatches)
            seconds = simple_bound(prepared, space, setting, seats)
            self.bounds[setting] = seconds * setting.scale
        self._note_floor(0.0)

    def run(self) -> None:
        """Try likely plans, with equal replicas first, and bound every setting by the best."""
        menus = next(iter(self._plans.values())).menus()
        self._scan([counts for some in menus[:2] for counts in some])
        self.settings.sort(key=lambda setting: self.least.get(setting, math.inf))
        self._bound()
        for some in menus:
            for counts in some:
                self._try(counts)
                if not self.trials.found or self.trials.quick:
                    self.trials.settle(SETTLING, doubtful=False)
            self.trials.settle(SETTLING, doubtful=False)

    def _scan(self, menus: Sequence[tuple[int, ...]]) -> None:
        """Give every setting a plan of each menu, and judge the fastest ones until the others are
        slower; one that lacks memory comes again with a smaller share of it."""
        trials, late, ticket = self.trials, partial(self.trials.over, SHARE), count()
        heap: list[tuple[float, int, Setting, tuple[int, ...], float, Candidate | None]]
        heap = [(0.0, next(ticket), *case, 1.0, None) for case in product(self.settings, menus)]
        refused = 0
        while heap and not late():
            seconds, _, setting, counts, share, candidate = heapq.heappop(heap)
            m, schedule = setting.num_microbatches, setting.schedule
            if candidate is None and any(one[-1] for one in heap) and trials.over(SCANNING):
                if not trials.found:
                    heapq.heappush(heap, (math.inf, next(ticket), setting, counts, share, None))
                continue
            if candidate is not None:
                if trials.found and seconds >= trials.below_with_gain:
                    return
                if trials.offer(candidate, now=True):
                    continue
                refused += 1
                if refused == REFUSED:
                    self._recompute_all(menus)
                share = SPARING * min(share, 1 / trials.beyond_formula(candidate))
                self.memory[schedule] = min(share, self.memory.get(schedule, 1.0))
            share = min(share, self.memory.get(schedule, 1.0))
            candidate = self._plans[m].first(setting, counts, share, late)
            if candidate is not None:
                seconds = self._seconds(candidate) * (1 + kind_of(schedule).gain)
                self.least[setting] = min(seconds, self.least.get(setting, math.inf))
                heapq.heappush(heap, (seconds, next(ticket), setting, counts, share, candidate))
        if not trials.found and refused < REFUSED:
            self._recompute_all(menus)

    def _recompute_all(self, menus: Sequence[tuple[int, ...]]) -> None:
        """Judge the fastest plans whose stages all recompute, which hold the least, until one has
        the memory that it needs."""
        if self.trials.found or not self.space.decides_recomputation:
            return
        late, found = partial(self.trials.over, SHARE), list[tuple[float, int, Candidate]]()
        for n, (setting, counts) in enumerate(product(self.settings, menus)):
            plans = self._plans[setting.num_microbatches]
            if candidate := plans.first(setting, counts, 1.0, late, again=True):
                found.append((self._seconds(candidate), n, candidate))
        for _, _, candidate in sorted(found, key=lambda one: one[:2])[:SPARED]:
            self.trials.offer(candidate, now=True)
            if self.trials.found:
                return

    def _try(self, counts: tuple[int, ...]) -> None:
        """Pipelines of every setting whose stages have one of so many replicas."""
        trials = self.trials
        late = partial(trials.over, SHARE)
        for setting in self.settings:
            if late():
                return
            plans, scale = self._plans[setting.num_microbatches], setting.scale
            if self.bounds[setting] < trials.below:
                memory = self.memory.get(setting.schedule, 1.0)
                below = partial(self._below, scale)
                plans.offer(setting, counts, below, late, self._take, memory)

    def _seconds(self, candidate: Candidate) -> float:
        """Seconds of a step, by the evaluator."""
        setting = candidate.setting
        problem = self.prepared_at(setting.num_microbatches).problem
        return evaluation(problem, self.trials.cluster, candidate).seconds * setting.scale

    def _take(self, candidate: Candidate) -> bool:
        return self.trials.offer(candidate, now=not self.trials.found)

    def _below(self, scale: int) -> float:
        return self.trials.below / scale

    def _bound(self) -> None:
        """Raise the bounds of settings to where nothing shows that a plan takes longer."""
        late = partial(self.trials.over, SHARE)
        for setting in self.settings:
            known, upper = self.bounds[setting], self.trials.below
            if known < upper and not late():
                plans, scale = self._plans[setting.num_microbatches], setting.scale
                found = plans.bound(setting, known / scale, upper / scale, late)
                self.bounds[setting] = max(known, found * scale)
        self._note_floor(self.trials.below)

    def _note_floor(self, seconds: float) -> None:
        least = self.others(seconds, partial(self.trials.over, SHARE))
        self.trials.floor = min(least, *self.bounds.values())
