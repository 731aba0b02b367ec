"""Trials: candidates that a search tried, the best of them first among those whose memory suffices.

Where memory has limits a candidate is dropped that exceeds them by the ledger of the plan that
would be returned.  To make that plan takes seconds, and the graph-free ledger tells which ones fit
with room to spare: only the last of these is made into it.  Of the others those that do not fit by
the estimate come last, the fastest first.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pdcompile.cluster import Cluster
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs.forecast import rehearsals
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.known_paths import KnownPaths
from pdcompile.passes.partition.space.candidates import choices, describe, evaluation
from pdcompile.passes.partition.space.pipelines import PreparedProblem, filled, limited, timed
from pdcompile.passes.planning.candidate_plan import candidate_plan
from pdcompile.passes.stages.assemble import making_seconds, sum_seconds
from pdcompile.plan import Alternative, Plan, Training
from pdcompile.problem import PartitionProblem
from pdcompile.problem.space import Candidate
from pdcompile.schedule.registry import kind_of
from pdcompile.units import format_seconds

CHEAP = 0.05  # what a candidate that is dropped before it is simulated counts
QUICK = 0.03  # of the time
MUCH, LITTLE = 0.97, 0.25  # of the seconds of a step, and of the time: its plan is made at once
BEYOND = 0.25  # of the time, in which the chosen plan may be made when it is over
SURE = 0.8  # of the memory, by the graph-free ledger: what takes less fits
EXACT = 1e-9  # relative: bounds this close to the best are met


class Sketched(Exception):
    """Raised in place of a plan that nobody wants made: a sketch is enough, or it is slower than
    one of another space.

    `least_seconds`: no step takes less; `seconds`: of the best one that was tried, with updates;
    `best`: that one, where more than the cut is open.
    """

    def __init__(
        self, least_seconds: float, seconds: float = math.inf, best: Candidate | None = None
    ) -> None:
        least, found = format_seconds(least_seconds), format_seconds(seconds)
        tried = f"; the best plan tried takes {found}" * (seconds < math.inf)
        super().__init__(f"a step takes {least} or more{tried}")
        self.least_seconds, self.seconds, self.best = least_seconds, seconds, best


@dataclass
class Trials:
    """The best candidate so far, and what may be better but was not judged."""

    graph_at: Callable[[int], OpGraph]
    prepared_at: Callable[[int], PreparedProblem]
    cluster: Cluster
    training: Training
    budget: Budget
    tell: Callable[[str], None]
    any_updates: bool = False  # at homes or not is open
    elsewhere: float = math.inf  # seconds of a step of a plan that there is in another space
    sketch: bool = False  # the plan of the best one will not be made
    floor: float = 0.0  # no candidate is better
    found: list[tuple[float, Candidate]] = field(default_factory=list)  # each better, step seconds
    #: what may lack memory: seconds of a step, share by the graph-free ledger
    waiting: list[tuple[float, float, Candidate]] = field(default_factory=list)
    #: by schedule, ratio of that share in a plan to the graph-free one
    beyond: dict[str, float] = field(default_factory=dict)
    tried: float = 0.0  # candidates that were simulated
    #: seconds of what fits, and of its updates, by choice and value (see `choices`)
    least: dict[tuple[str, str], float] = field(default_factory=dict)
    seen: set[Candidate] = field(default_factory=set)
    known: KnownPaths = field(default_factory=KnownPaths)
    others: float = 0.0  # seconds of making a plan, without rehearsing its stages, at most
    _made: dict[Candidate, Plan] = field(default_factory=dict)
    _updates: dict[Candidate, float] = field(default_factory=dict)

    @property
    def below(self) -> float:
        """Seconds of a step that a better candidate has less of."""
        return min(self.elsewhere, self.found[-1][0] if self.found else math.inf) * (1 - EXACT)

    @property
    def below_with_gain(self) -> float:
        """The same, by `price`."""
        return min([self.elsewhere, *itertools.starmap(self.price, self.found)]) * (1 - EXACT)

    @property
    def some(self) -> bool:
        """True once there is a plan, here or elsewhere."""
        return self.below < math.inf

    def price(self, seconds: float, candidate: Candidate) -> float:
        """Seconds of a step and its updates, with what its schedule costs beside the forecast."""
        return (seconds + self.updates(candidate)) * (1 + kind_of(candidate.setting.schedule).gain)

    def priced(self, candidate: Candidate) -> float:
        """The same of a candidate that was not tried, by the evaluator."""
        seconds = evaluation(self._problem(candidate), self.cluster, candidate).seconds
        return self.price(seconds * candidate.setting.scale, candidate)

    def updates(self, candidate: Candidate) -> float:
        """Seconds of the longest update of a rank."""
        if candidate in self._updates:
            return self._updates[candidate]
        problem = self._problem(candidate)
        found, spent = evaluation(problem, self.cluster, candidate), defaultdict[int, float](float)
        stream, sums = kind_of(candidate.setting.schedule).stream, self._sums(candidate)
        for s, ranks in enumerate(candidate.ranks):
            owned = found.trainable(s) // (len(ranks) if candidate.setting.homes else 1)
            for rank in ranks:
                rate = found.deployment.rates.get(rank)  # on the host
                once = self.training.update_seconds(owned, versions=stream, rate=rate)
                once /= 1 if rate else self.cluster.devices[rank].speed
                spent[rank] += once + sums.get(s, 0.0)
        return self._updates.setdefault(candidate, max(spent.values()))

    def _sums(self, candidate: Candidate) -> dict[int, float]:
        """Seconds of an update in which parts sum gradients, by stage."""
        graph, stages = self.graph_at(candidate.setting.num_microbatches), dict[str, int]()
        if graph.summed:
            items = zip(self._problem(candidate).items, candidate.stage_of, strict=True)
            stage_of = {op: s for item, s in items for op in item.ops}
            for op in graph.ops:
                s = stage_of.get(op.name, len(candidate.ranks) - 1)
                stages |= {fqn: min(s, stages.get(fqn, s)) for fqn in op.used_tensors}
        found = defaultdict[int, float](float)
        for fqn, s in stages.items():
            found[s] += sum_seconds(graph, (fqn,), self.cluster.parts)
        return found

    @property
    def best(self) -> Candidate:
        return self.found[-1][1]

    @property
    def chosen(self) -> tuple[float, Candidate]:
        """The best by `price`, of those for whose plan there is time, or that take little more."""
        left = max(self.budget.left, BEYOND * (self.budget.spent + self.budget.left))
        if not (timely := [one for one in self.found if self.making(one[1]) <= left]):
            return min(self.found, key=lambda one: self.making(one[1]))
        return min(timely, key=lambda one: self.price(*one))

    def alternatives(self, candidate: Candidate) -> Iterator[Alternative]:
        """The fastest fitting plan tried with another value, for each choice."""
        for name, own in choices(candidate).items():
            others = [(s, value) for (one, value), s in self.least.items() if one == name]
            for seconds, value in sorted(one for one in others if one[1] != own)[:1]:
                yield Alternative(name, own, value, max(0.0, seconds - self.updates(candidate)))

    def quick(self, candidate: Candidate) -> bool:
        """Does it take next to nothing of the time to make its plan?"""
        return self.making(candidate, anew=True) < QUICK * (self.budget.spent + self.budget.left)

    def over(self, share: float) -> bool:
        """True if that share of the time is over, without what making a plan takes."""
        whole = max(self.budget.spent + self.budget.left, 1e-9)
        making = self.making(self.best, anew=not self.sketch) if self.found else 0.0
        return self.budget.late or self.budget.spent > share * max(whole - making, 0.0)

    def making(self, candidate: Candidate, *, anew: bool = False) -> float:
        """Seconds that its plan takes; none where it was made before or will not be, but `anew`."""
        if not anew and (self.sketch or candidate in self._made):
            return 0.0
        graph = self.graph_at(candidate.setting.num_microbatches)
        return making_seconds(graph, candidate.stage_of, self.others)

    def offer(
        self, candidate: Candidate | None, *, now: bool = False, gain: float = EXACT
    ) -> float:
        """Try a candidate; the share of its memory that a rank of a better one takes, else 0.

        `now`: make its plan where that alone tells whether it fits, which else waits for `settle`;
        `gain`: how much better it has to be, relative.
        """
        self.tried += CHEAP
        if candidate is not None and self.any_updates and candidate.straight:
            candidate = _with_homes(candidate, False)
        if candidate is None or candidate in self.seen:
            return 0.0
        self.seen.add(candidate)
        problem, scale = self._problem(candidate), candidate.setting.scale
        limit = self.below * (1 - gain) / scale
        seconds, share = timed(problem, self.cluster, candidate, limit, self.known)
        if seconds >= limit:
            self._slower(candidate, seconds * scale)
            return 0.0
        self.tried += 1
        now = now or self.quick(candidate) or self._promises(seconds * scale, share, candidate)
        if share <= 1 and (now or self.sketch or share <= SURE):
            return self._judge(seconds * scale, candidate, share)
        if self.sketch and not self.quick(candidate):
            return share
        self.waiting.append((seconds * scale, share, candidate))
        return share

    def settle(self, share: float, *, likely: bool = False) -> float:
        """Judge what waits until that share of the time is over: the fastest first of what fits as
        far as plans of its schedule tell, then, unless only the `likely` ones, of the rest.  Of the
        former one is found at least.

        Returns the seconds of the fastest that is left, which may be better.
        """
        while waiting := [one for one in self.waiting if one[0] < self.below]:
            first = min(waiting, key=lambda one: (self._expected(*one[1:]) > 1, one[0]))
            unlikely = self._expected(*first[1:]) > 1
            ends = self.over(share) and (self.found or unlikely or self.budget.stopped)
            if ends or (likely and unlikely):
                return min(one[0] for one in waiting)
            self.waiting = [one for one in waiting if one is not first]
            self._judge(first[0], first[2], first[1])
        return math.inf

    def _promises(self, seconds: float, share: float, candidate: Candidate) -> bool:
        """True if it is much faster than all that fit, of which there is one, and its plan takes
        little of the time."""
        if not self.some or seconds >= MUCH * self.below or self._expected(share, candidate) > 1:
            return False
        return self.making(candidate) < LITTLE * (self.budget.spent + self.budget.left)

    def _expected(self, share: float, candidate: Candidate) -> float:
        return share * self.beyond.get(candidate.setting.schedule, 1.0)

    def may_fit(self, candidate: Candidate, left: float) -> bool:
        """True if its plan can be made in that time, and fits as far as plans of its schedule
        tell."""
        if self.making(candidate) > left:
            return False
        _, share = timed(self._problem(candidate), self.cluster, candidate)
        return self._expected(share, candidate) <= 1

    def _judge(self, seconds: float, candidate: Candidate, share: float) -> float:
        """Make it the best if it fits; the share of its memory that a rank takes."""
        if (share > SURE and not self.sketch) or self.quick(candidate):
            estimated, share = share, self.filled(candidate)
            self.beyond[candidate.setting.schedule] = share / max(estimated, 1e-9)
        if share > 1:
            return share
        self._note(seconds, candidate)
        self.found.append((seconds, candidate))
        gap = 100 * (1 - min(self.floor, seconds) / seconds) if seconds > 0 else 0.0
        self.tell(
            f"plan after {self.budget.spent:.1f} s: {format_seconds(seconds)} a step, "
            f"gap {gap:.1f} %: {describe(candidate)}"
        )
        each = kind_of(candidate.setting.schedule).updates_each
        if self.any_updates and not (each or candidate.straight):  # updates take longer or shorter
            homes = candidate.setting.homes
            gain = EXACT if homes else -2 * EXACT
            self.offer(_with_homes(candidate, not homes), now=True, gain=gain)
        return share

    def confirm(self) -> float:
        """Drop what lacks memory after all from the end that is chosen from; the fastest of it."""
        least = math.inf
        while self.found and self.filled(self.chosen[1]) > 1:
            self.found.remove(dropped := self.chosen)
            least = min(least, dropped[0])
        return least

    def _slower(self, candidate: Candidate, seconds: float) -> None:
        """Note a candidate that is not better, for `alternatives`, if it fits by the estimate; one
        whose update is shorter may be chosen for that."""
        best = choices(self.best).items() if self.found else ()
        other = [one for one in choices(candidate).items() if one not in best]
        if any(seconds < self.least.get(one, math.inf) for one in other):
            exact, share = timed(self._problem(candidate), self.cluster, candidate)
            own = exact * candidate.setting.scale, candidate
            if share <= 1:
                self._note(*own)
                if self.price(*own) < self.below_with_gain:
                    bisect.insort_left(self.found, own, key=lambda one: -one[0])

    def _note(self, seconds: float, candidate: Candidate) -> None:
        seconds += self.updates(candidate)
        for one in choices(candidate).items():
            self.least[one] = min(seconds, self.least.get(one, math.inf))

    def plan(self, candidate: Candidate) -> Plan:
        """Its plan, not certified."""
        if candidate not in self._made:
            graph = self.graph_at(candidate.setting.num_microbatches)
            began = time.monotonic() - rehearsals.seconds
            self._made[candidate] = candidate_plan(
                graph, self._problem(candidate), candidate, self.training, self.cluster
            )
            self.others = max(self.others, time.monotonic() - rehearsals.seconds - began)
        return self._made[candidate]

    def filled(self, candidate: Candidate) -> float:
        """The share of its memory that a rank takes at most, by the ledgers of the plan that would
        be returned."""
        if not limited(self.cluster):
            return 0.0
        forecast = self.plan(candidate).forecast
        assert forecast is not None
        return filled(forecast.ledgers, self.cluster)

    def _problem(self, candidate: Candidate) -> PartitionProblem:
        return self.prepared_at(candidate.setting.num_microbatches).problem


def _with_homes(candidate: Candidate, homes: bool) -> Candidate:
    return replace(candidate, setting=replace(candidate.setting, homes=homes))
