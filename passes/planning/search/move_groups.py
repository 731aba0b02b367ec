"""Local search from the best candidates of a search: groups move over boundaries.

First blocks of groups, between the positions that likely cuts lie at, then single ones: between
blocks little is sent, and single groups seldom get from one such boundary to the next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdcompile.passes.partition.local_search import Groups, LocalSearch
from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.partition.space.pipelines import recomputing
from pdcompile.passes.planning.search.trials import Trials
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import PartitionProblem
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate


def move_groups(trials: Trials, ends: Callable[[], bool], gain: float, *, decide: bool) -> None:
    """Try other cuts than that of the best candidate, as long as one of them is better.

    Args:
        gain: how much better it has to be, relative.
        decide: where memory is lacking a stage recomputes; each cut also comes with recomputation
            nowhere else.
    """
    if not trials.found:
        return
    best, prepared = trials.best, trials.prepared_at(trials.best.setting.num_microbatches)
    models = prepared.positions.model, prepared.whole
    starts = [one for _, one in trials.found if replace(one, stage_of=best.stage_of) == best]
    every = [_Cuts(model, trials, gain, decide) for model in models]
    searches = [LocalSearch(c.model, c.plan_of, c.offer, ends, trials.known) for c in every]
    for cuts, search in zip(every, searches, strict=True):
        for start in reversed(starts):
            groups = cuts.model.groups_of(start.stage_of)
            if cuts.model.items_of(groups) != start.stage_of or ends():
                continue
            if (seconds := cuts.offer(groups, math.inf)) is not None:
                search.climb(groups, seconds)
        starts = [trials.best]
    for cuts, search in zip(every, searches, strict=True):
        groups, _ = cuts.best()
        cheap = cuts.plan_of(groups).bounded and not prepared.complete
        if cheap and cuts.model.items_of(groups) == trials.best.stage_of:
            search.go_on(cuts.best, random.Random(0))


@dataclass(frozen=True)
class _Cuts:
    """The best candidate, cut between groups of a model."""

    model: Model
    trials: Trials
    gain: float
    decide: bool

    def plan_of(self, groups: Groups) -> Evaluation:
        """Evaluation of a cut with the best candidate's recomputation."""
        return evaluation(self._problem, self.trials.cluster, self._options(groups)[-1])

    def best(self) -> tuple[Groups, float]:
        """The best candidate's cut, and its seconds of the objective."""
        best, scale = self.trials.best, self.trials.best.setting.scale
        return self.model.groups_of(best.stage_of), self.trials.found[-1][0] / scale

    def offer(self, groups: Groups, below: float) -> float | None:
        """Seconds of the objective, if they are less than so many; a better candidate than the best
        has the memory that it needs."""
        trials, best = self.trials, self.trials.best
        plan, least = self.plan_of(groups), self.best()[1] * (1 - self.gain)
        seconds = trials.known.seconds(plan, below)
        if seconds >= max(below, least):
            return None
        if seconds >= least:
            return None if any(plan.violations()) else seconds
        for one in self._options(groups):
            if self.decide:
                one = recomputing(self._problem, trials.cluster, one)
            if not violations(self._problem, trials.cluster, one):
                trials.offer(one, now=True, gain=self.gain)
        return None if trials.best is best else self.best()[1]

    def _options(self, groups: Groups) -> list[Candidate]:
        best = self.trials.best
        own = replace(best, stage_of=self.model.items_of(groups))
        bare = tuple(StageDeployment(option.replicas) for option in best.options)
        return [
            replace(own, options=one)
            for one in dict.fromkeys((bare, best.options)[not self.decide :])
        ]

    @property
    def _problem(self) -> PartitionProblem:
        best = self.trials.best
        return self.trials.prepared_at(best.setting.num_microbatches).problem
