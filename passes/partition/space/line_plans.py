"""Pipelines from the line of a model's order, and bounds along its heaviest path.

For models with too many cuts to look at each: what a probe finds takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from pdcompile.cluster import Cluster, Link
from pdcompile.passes.partition.space.candidates import holding, violations
from pdcompile.passes.partition.space.matrices import least_depth, most_depth
from pdcompile.passes.partition.space.path_bound import PathBound, StageRules, groups_told_apart
from pdcompile.passes.partition.space.pipelines import (
    PreparedProblem,
    limited,
    recomputing,
    simple_bound,
)
from pdcompile.passes.partition.space.probing import Late, Probing
from pdcompile.passes.partition.space.reach import Reach
from pdcompile.passes.partition.space.seats import Seats, arrangements
from pdcompile.passes.schedules import warmup
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import kind_of

MARGINS = (1.0, 0.9, 0.75)  # of the memory: ledgers count more than a line does
MOST_ORDERS = 6  # of unlike devices
ROUGHLY = 1e-3  # relative: where the bisection of a bound ends


@dataclass
class SettingRules(StageRules):
    """Stages of a setting on seats.

    `widest`: of a number of replicas, the most that have as many microbatches each.
    """

    setting: Setting = field(kw_only=True)
    seats: Seats = field(kw_only=True)
    widest: dict[int, int] = field(kw_only=True)

    def __post_init__(self) -> None:
        self._straight = all(option.replicas == 1 for option in self.menu)
        self._rings: dict[int, Link] = {}

    def deepest(self, option: StageDeployment, after: int) -> int:
        return most_depth(self.setting, option.replicas, after, self._straight)

    def held(self, option: StageDeployment, after: int) -> tuple[float, int]:
        r = self.widest.get(option.replicas, option.replicas)
        depth = least_depth(self.setting, r, after, self.ranks, self._straight, None)
        held = holding(self.setting, replace(option, replicas=r), depth, depth, depth)
        return held.versions + held.gradient_buffers + held.optimizer_factor, held.saved

    def ring(self, replicas: int) -> Link:
        if replicas not in self._rings:
            self._rings[replicas] = min(
                (self.seats.ring(q, replicas) for q in range(self.ranks - replicas + 1)),
                key=lambda link: (-link.bytes_per_second, link.latency_seconds),
            )
        return self._rings[replicas]


@dataclass
class LinePlans:
    """Likely plans of one number of microbatches, along lines, and bounds."""

    prepared: PreparedProblem
    space: SearchSpace
    cluster: Cluster

    def bound(self, setting: Setting, lower: float, upper: float, late: Late) -> float:
        """Seconds from `lower` to `upper` that no candidate of the setting is below."""
        seats = Seats(self.cluster, tuple(range(len(self.cluster.devices))))
        menu = self.space.menu(self.space.counts(len(seats.ranks)))
        widest: dict[int, int] = {}
        kind, m = kind_of(setting.schedule), setting.num_microbatches
        if not kind.stream:
            menu, widest = shortened(menu, m, limited(self.cluster))
        path = self.prepared.path(groups_told_apart(len(seats.ranks), len(menu)))
        rules = SettingRules(
            kind, kind.stream, m, len(seats.ranks), menu, seats.fastest, seats.largest,
            setting=setting, seats=seats, widest=widest,
        )  # fmt: skip
        return PathBound(path, rules, ROUGHLY).least(lower, upper, late) * (1 - 1e-9)

    def menus(self) -> tuple[list[tuple[int, ...]], ...]:
        """Replicas that stages may have: equally many that leave no rank, equally many, any."""
        ranks = len(self.cluster.devices)
        counts = self.space.counts(ranks)
        if self.space.widths or len(counts) == 1:
            return ([counts],)
        equal: list[tuple[int, ...]] = [(r,) for r in sorted(counts)]
        even = [menu for menu in equal if ranks % menu[0] == 0]
        odd = [menu for menu in equal if ranks % menu[0]]
        return even, [counts] if self.space.replicas == "any" else [], odd

    def offer(
        self,
        setting: Setting,
        counts: tuple[int, ...],
        below: Callable[[], float],
        late: Late,
        take: Callable[[Candidate], bool],
        memory: float = 1.0,
    ) -> None:
        """Give likely candidates that may take less, whose stages have one of so many replicas.

        `take`: says False of one that lacks memory; then less of it is used.  `memory`: the share
        that stages may take by the planner's formula.
        """
        margins = [memory * margin for margin in MARGINS if limited(self.cluster) or margin == 1.0]
        cases = product(self._orders(), self.prepared.order_lines, (False, True))
        for order, line, balanced in cases:
            seats, menu = Seats(self.cluster, order), self.space.menu(counts)
            reach = Reach(line, setting, seats, menu, balanced=balanced)
            for reach.memory in margins:
                if late():
                    return
                found = self._found(reach, seats, below(), late)
                if found is None or take(found):
                    break

    def first(
        self,
        setting: Setting,
        counts: tuple[int, ...],
        memory: float,
        late: Late,
        *,
        again: bool = False,
    ) -> Candidate | None:
        """A likely candidate of the setting whose stages take that share of the memory, cut where
        little crosses; without looking for one that is faster.  `again`: all stages recompute."""
        seats, menu = Seats(self.cluster, self._orders()[0]), self.space.menu(counts)
        menu = tuple(option for option in menu if option.recompute or not again)
        reach = Reach(self.prepared.order_lines[0], setting, seats, menu, memory=memory)
        return self._found(reach, seats, math.inf, late)

    def _orders(self) -> tuple[tuple[int, ...], ...]:
        if self.space.in_order and self.space.stages:
            return (tuple(range(self.space.stages)),)
        return arrangements(self.cluster)[0][:MOST_ORDERS]

    def _found(self, reach: Reach, seats: Seats, below: float, late: Late) -> Candidate | None:
        """The pipeline of the least seconds below a limit; None where there is none."""
        space = self.space
        probing = Probing(reach, space.stages, space.widths, space.recomputed)
        lower = simple_bound(self.prepared, space, reach.setting, seats)
        if not probing.some(lower, below * (1 - 1e-9), late):
            return None
        chain, model, order = probing.chain(), self.prepared.whole, seats.ranks
        used = sum(option.replicas for _, option in chain)
        if used < len(order) and not self.space.idle:
            return None
        groups = reach.line.groups([begin for begin, _ in chain])
        ranks, position = [], seats.first_like_last(used)
        for _, option in chain:
            ranks.append(order[position : position + option.replicas])
            position += option.replicas
        options = tuple(option for _, option in chain)
        setting, counts = reach.setting, tuple(option.replicas for option in options)
        depths = warmup(
            setting.schedule, len(chain), setting.num_microbatches, counts, setting.extra_warmup
        )
        stage_of = model.items_of(groups)
        found = Candidate(setting, stage_of, options, tuple(ranks), depths)
        if self.space.decides_recomputation:
            found = recomputing(self.prepared.problem, self.cluster, found)
        return found if not violations(self.prepared.problem, self.cluster, found) else None


def shortened(
    menu: tuple[StageDeployment, ...], num_microbatches: int, memory: bool
) -> tuple[tuple[StageDeployment, ...], dict[int, int]]:
    """The rows with the fewest replicas of those that have as many microbatches each, which take
    no longer; and of these the most, which may hold less.  Without limits on memory nothing
    recomputes unless it has to."""
    fewest: dict[int, int] = {}
    widest: dict[int, int] = {}
    for option in sorted(menu, key=lambda one: one.replicas):
        r = option.replicas
        widest[fewest.setdefault(option.share(num_microbatches), r)] = r
    again = memory or all(option.recompute for option in menu)
    kept = (option for option in menu if again or not option.recompute)
    return tuple(option for option in kept if option.replicas in widest), widest


def shifted(prepared: PreparedProblem, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with one boundary where little crosses next to it, in every way."""
    model, (line, _) = prepared.whole, prepared.order_lines
    stage = np.array([candidate.stage_of[members[0]] for members in model.members])
    if (np.diff(stage) < 0).any():
        return
    ends = np.searchsorted(stage, np.arange(1, len(candidate.options)))
    for s, end in enumerate(ends):
        at = np.searchsorted(line.cuts, end)
        for cut in line.cuts[max(at - 1, 0) : at + 2]:
            moved = np.array(ends)
            moved[s] = cut
            if cut != end and (np.diff([0, *moved, model.num_groups]) > 0).all():
                groups = np.searchsorted(moved, np.arange(model.num_groups), "right")
                yield replace(candidate, stage_of=model.items_of(groups.tolist()))
