"""Trials: candidates that a search tried, the best of them first among those whose memory suffices.

Where memory has limits a candidate is made into the plan that would be returned, and dropped where
a ledger of that plan exceeds them.  That takes long: candidates wait for it, the fastest goes
first, and those that do not fit by the graph-free estimate come last.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdcompile.cluster import Cluster
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs.forecast import rehearsals
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.space.candidates import choices, describe, evaluation
from pdcompile.passes.partition.space.pipelines import PreparedProblem, exceeds, limited, timed
from pdcompile.passes.planning.candidate_plan import candidate_plan, making_seconds
from pdcompile.plan import Alternative, Plan, Training
from pdcompile.problem.space import Candidate
from pdcompile.schedule.registry import kind_of
from pdcompile.units import format_seconds

CHEAP = 0.05  # what a candidate that is dropped before it is simulated counts
QUICK = 0.03  # of the time
EXACT = 1e-9  # relative: bounds this close to the best are met


@dataclass
class Trials:
    """The best candidate so far, and what may be better but was not judged."""

    graph_at: Callable[[int], OpGraph]
    prepared_at: Callable[[int], PreparedProblem]
    cluster: Cluster
    training: Training
    budget: Budget
    tell: Callable[[str], None]
    floor: float = 0.0  # no candidate is better
    found: list[tuple[float, Candidate]] = field(default_factory=list)  # each better, step seconds
    waiting: list[tuple[bool, float, Candidate]] = field(default_factory=list)  # does not fit?
    tried: float = 0.0  # candidates that were simulated
    #: seconds of what fits, by choice and value (see `choices`)
    least: dict[tuple[str, str], float] = field(default_factory=dict)
    seen: set[Candidate] = field(default_factory=set)
    others: float = 0.0  # seconds of making a plan, without rehearsing its stages, at most
    _made: tuple[Candidate, Plan] | None = None
    _updates: dict[Candidate, float] = field(default_factory=dict)

    @property
    def below(self) -> float:
        """Seconds of a step that a better candidate has less of."""
        return self.found[-1][0] * (1 - EXACT) if self.found else math.inf

    @property
    def below_with_gain(self) -> float:
        """The same, by `price`."""
        return min(itertools.starmap(self.price, self.found), default=math.inf) * (1 - EXACT)

    def price(self, seconds: float, candidate: Candidate) -> float:
        """Seconds of a step and its updates, with what its schedule costs beside the forecast."""
        return (seconds + self.updates(candidate)) * (1 + kind_of(candidate.setting.schedule).gain)

    def updates(self, candidate: Candidate) -> float:
        """Seconds of the longest update of a rank."""
        if candidate in self._updates:
            return self._updates[candidate]
        problem = self.prepared_at(candidate.setting.num_microbatches).problem
        found, spent = evaluation(problem, self.cluster, candidate), defaultdict[int, float](float)
        stream = kind_of(candidate.setting.schedule).stream
        for s, ranks in enumerate(candidate.ranks):
            owned = found.trainable(s) // (len(ranks) if candidate.setting.homes else 1)
            once = self.training.update_seconds(owned, versions=stream)
            for rank in ranks:
                spent[rank] += once / self.cluster.devices[rank].speed
        return self._updates.setdefault(candidate, max(spent.values()))

    @property
    def best(self) -> Candidate:
        return self.found[-1][1]

    @property
    def chosen(self) -> tuple[float, Candidate]:
        """The best by `price`, of those for whose plan there is time."""
        left = self.budget.left
        if not (timely := [one for one in self.found if self.making(one[1]) <= left]):
            return min(self.found, key=lambda one: self.making(one[1]))
        return min(timely, key=lambda one: self.price(*one))

    def alternatives(self, candidate: Candidate) -> Iterator[Alternative]:
        """The fastest fitting plan tried with another value, for each choice."""
        for name, own in choices(candidate).items():
            others = [(s, value) for (one, value), s in self.least.items() if one == name]
            for seconds, value in sorted(one for one in others if one[1] != own)[:1]:
                yield Alternative(name, own, value, seconds)

    @property
    def quick(self) -> bool:
        """Does it take next to nothing of the time to make a plan?"""
        return self.making(self.best, anew=True) < QUICK * (self.budget.spent + self.budget.left)

    def over(self, share: float) -> bool:
        """True if that share of the time is over, without what making the best plan takes."""
        whole = max(self.budget.spent + self.budget.left, 1e-9)
        left = max(whole - (self.making(self.best) if self.found else 0.0), 0.0)
        return self.budget.late or self.budget.spent > share * left

    def making(self, candidate: Candidate, *, anew: bool = False) -> float:
        """Seconds that its plan takes; none where it is the last one that was made, but `anew`."""
        if self._made is not None and self._made[0] == candidate and not anew:
            return 0.0
        graph = self.graph_at(candidate.setting.num_microbatches)
        return making_seconds(graph, candidate.stage_of, self.others)

    def offer(self, candidate: Candidate | None, *, now: bool = False, gain: float = EXACT) -> bool:
        """Try a candidate; False where a better one lacks memory, or may lack it.

        `now`: where it fits by the estimate its plan is made at once, and not by `settle`;
        `gain`: how much better it has to be, relative.
        """
        self.tried += CHEAP
        if candidate is None or candidate in self.seen:
            return candidate is not None
        self.seen.add(candidate)
        problem = self.prepared_at(candidate.setting.num_microbatches).problem
        limit = self.below * (1 - gain) / candidate.setting.scale
        seconds, fits = timed(problem, self.cluster, candidate, limit)
        if seconds >= limit:
            self._slower(candidate, seconds * candidate.setting.scale)
            return True
        self.tried += 1
        if fits and (now or not limited(self.cluster)):
            return self.judge(seconds * candidate.setting.scale, candidate)
        self.waiting.append((not fits, seconds * candidate.setting.scale, candidate))
        return fits

    def settle(self, share: float, *, doubtful: bool = True) -> float:
        """Judge what waits, the fastest first, until that share of the time is over.

        Returns the seconds of the fastest that is left, which may be better; without `doubtful`
        those that do not fit by the estimate go on waiting.
        """
        self.waiting.sort(key=lambda one: one[:2])
        while self.waiting:
            unfit, seconds, candidate = self.waiting[0]
            if seconds >= self.below:
                self.waiting = [one for one in self.waiting if one[1] < self.below]
                continue
            if unfit and not doubtful:
                return math.inf
            if self.over(share):
                return min(one[1] for one in self.waiting)
            del self.waiting[0]
            self.judge(seconds, candidate)
        return math.inf

    def judge(self, seconds: float, candidate: Candidate) -> bool:
        """Make it the best if it is; False where its plan exceeds a limit on memory."""
        if seconds >= self.below:
            self._slower(candidate, seconds)
            return True
        if not self.keeps_limits(candidate):
            return False
        self._note(seconds, candidate)
        self.found.append((seconds, candidate))
        gap = 100 * (1 - min(self.floor, seconds) / seconds) if seconds > 0 else 0.0
        self.tell(
            f"plan after {self.budget.spent:.1f} s: {format_seconds(seconds)} a step, "
            f"gap {gap:.1f} %: {describe(candidate)}"
        )
        return True

    def _slower(self, candidate: Candidate, seconds: float) -> None:
        """Note a candidate that is not better, for `alternatives`, if it fits by the estimate."""
        setting, best = candidate.setting, choices(self.best).items() if self.found else ()
        other = [one for one in choices(candidate).items() if one not in best]
        if best and any(seconds < self.least.get(one, math.inf) for one in other):
            problem = self.prepared_at(setting.num_microbatches).problem
            exact, fits = timed(problem, self.cluster, candidate)
            if fits:
                self._note(exact * setting.scale, candidate)

    def _note(self, seconds: float, candidate: Candidate) -> None:
        for one in choices(candidate).items():
            self.least[one] = min(seconds, self.least.get(one, math.inf))

    def plan(self, candidate: Candidate) -> Plan:
        """Its plan, not certified.  The last one is kept."""
        if self._made is None or self._made[0] != candidate:
            m = candidate.setting.num_microbatches
            began = time.monotonic() - rehearsals.seconds
            made = candidate_plan(
                self.graph_at(m),
                self.prepared_at(m).problem,
                candidate,
                self.training,
                self.cluster,
            )
            self._made = candidate, made
            took = time.monotonic() - rehearsals.seconds - began
            self.others = max(self.others, took)
        return self._made[1]

    def keeps_limits(self, candidate: Candidate) -> bool:
        """True if the ledgers of the plan that would be returned do, of every rank."""
        if not limited(self.cluster):
            return True
        forecast = self.plan(candidate).forecast
        assert forecast is not None
        return not exceeds(forecast.ledgers, self.cluster)

    def beyond_formula(self, candidate: Candidate) -> float:
        """Ratio of the ledgers of the plan that was made to the planner's formula, at most over
        ranks; 1 where none was made."""
        if self._made is None or self._made[0] != candidate or self._made[1].forecast is None:
            return 1.0
        problem = self.prepared_at(candidate.setting.num_microbatches).problem
        formula = evaluation(problem, self.cluster, candidate)
        ledgers = self._made[1].forecast.ledgers
        return max(
            ledgers[rank].total_bytes / max(formula.needed(s), 1)
            for s, ranks in enumerate(candidate.ranks)
            for rank in ranks
        )
