"""Bound of a setting over all cuts, replicas and recomputation: along the heaviest path."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from pdcompile.cluster import Link
from pdcompile.passes.partition.budget import Late
from pdcompile.passes.partition.space.candidates import holding
from pdcompile.passes.partition.space.matrices import least_depth, most_depth
from pdcompile.passes.partition.space.path_bound import PathBound, StageRules, groups_told_apart
from pdcompile.passes.partition.space.pipelines import Part, limited
from pdcompile.problem import StageLimits
from pdcompile.problem.deployment import StageDeployment
from pdcompile.schedule.registry import kind_of

ROUGHLY = 1e-3  # relative: where the bisection of a bound ends


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


def setting_bound(part: Part, within: tuple[float, float], late: Late) -> float:
    """Seconds of the objective, within two, that no candidate of the part is below."""
    setting, seats, menu = part.setting, part.seats, part.space.menu(part.counts)
    cluster = seats.cluster
    widest: dict[int, int] = {}
    kind, m = kind_of(setting.schedule), setting.num_microbatches
    if not kind.stream:
        menu, widest = shortened(menu, m, limited(cluster))
    ranks, straight = len(seats.ranks), all(option.replicas == 1 for option in menu)

    def deepest(option: StageDeployment, after: int) -> int:
        return most_depth(setting, option.replicas, after, straight)

    def held(option: StageDeployment, after: int) -> tuple[float, int]:
        r = widest.get(option.replicas, option.replicas)
        depth = least_depth(setting, r, after, ranks, straight, None)
        rank = holding(setting, replace(option, replicas=r), depth, depth, depth, cluster)
        return rank.versions / rank.readers + rank.updated, rank.saved

    @cache
    def ring(replicas: int) -> Link:
        """The best of all rows of so many ranks; a free one where nothing is summed."""
        if not kind.trains:
            return StageLimits()
        links = (seats.ring(q, replicas) for q in range(ranks - replicas + 1))
        return min(links, key=lambda link: (-link.bytes_per_second, link.latency_seconds))

    path = part.prepared.path(groups_told_apart(ranks, len(menu)))
    rules = StageRules(
        kind, kind.stream, m, ranks, menu, seats.fastest, seats.largest, deepest, held, ring
    )
    return PathBound(path, rules, ROUGHLY).least(*within, late) * (1 - 1e-9)
