"""One setting on given seats: candidates in the order of their bounds, what they cost, and those
next to a candidate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, islice

from pdcompile.cluster import Cluster
from pdcompile.passes.partition.alternatives import seconds_of
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.chains import Chains, Key, Piece, groups_of
from pdcompile.passes.partition.known_paths import KnownPaths
from pdcompile.passes.partition.model import (
    Model,
    all_ideals,
    build,
    contracted,
    positions,
)
from pdcompile.passes.partition.round_trips import Trips, Turn, likely_chain
from pdcompile.passes.partition.segments import Segments
from pdcompile.passes.partition.space.candidates import evaluation, violations
from pdcompile.passes.partition.space.matrices import Matrices
from pdcompile.passes.partition.space.path_bound import Path
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.passes.planning.graph_free import ledgers_of, plan_of
from pdcompile.passes.schedules import warmup
from pdcompile.plan import MemoryLedger, Training
from pdcompile.problem import Holding, PartitionProblem, StageLimits
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import Candidate, SearchSpace, Setting
from pdcompile.schedule.registry import kind_of

MAX_IDEALS = 1_000
POSITIONS = 128  # where first plans are cut
CUTS, CLOCKS = 3, 192  # of a setting, menu and order, looked at for one; more by ranks squared
MOST_BEGUN = 300  # chains, until the best one known is such a cut
SPARSE = 0.25  # of the memory, by the formula: of what takes less no ledger is made
MAX_CELLS = 100_000_000  # pairs of ideals x rows of all menus, for one table


@dataclass
class PreparedProblem:
    """A problem prepared for the search: its coarse graph, and the ideals of that, on first use.

    `complete`: these are all ideals of the whole graph, so that what is bounded is bounded.
    """

    problem: PartitionProblem
    tables: int  # how many menus' rows there are in all
    stages: int | None = None  # where pins have numbers
    _paths: dict[int, Path] = field(default_factory=dict)

    @cached_property
    def whole(self) -> Model:
        """All groups.  Raises InfeasibleError: constraints contradict each other."""
        problem, stages = self.problem, self.stages
        free = replace(
            problem,
            stages=(StageLimits(),) * (stages or 1),
            pins=problem.pins if stages else (),
            wishes=(),
            in_flight=(1,) * (stages or 1),
            holdings=(Holding(1, 0, 0.0),) * (stages or 1),
        )
        return build(free)

    @cached_property
    def segments(self) -> Segments:
        """Raises InfeasibleError: constraints contradict each other."""
        most = self._most
        small = contracted(self.whole, most - 1, most - 1)
        ideals = self._every if self.complete else all_ideals(small, most)
        return Segments(small, ideals or positions(small), complete=self.complete)

    @property
    def complete(self) -> bool:
        return self._every is not None

    @property
    def _most(self) -> int:
        return max(20, min(MAX_IDEALS, int((MAX_CELLS / max(self.tables, 1)) ** 0.5)))

    @cached_property
    def _every(self) -> list[int] | None:
        """All ideals of all groups, if they are few."""
        if self.whole.num_groups > self._most - 1:
            return None
        return all_ideals(self.whole, self._most)

    @cached_property
    def positions(self) -> Segments:
        """Places in the order of the groups where little crosses; all ideals where they are few."""
        most = min(POSITIONS, self._most)
        if self.complete and len(self.segments.ideals) <= most:
            return self.segments
        small = contracted(self.whole, most - 1, most - 1)
        return Segments(small, positions(small))

    def path(self, most: int) -> Path:
        """The heaviest path of values with gradients, at most so many of its groups told apart."""
        if most not in self._paths:
            self._paths[most] = Path(self.whole, most)
        return self._paths[most]

    def last(self, model: Model) -> int | None:
        """The group of the items that are pinned to the last stage."""
        final = [item for item, s in self.problem.pins if s == len(self.problem.stages) - 1]
        return next((g for g, own in enumerate(model.members) if final and final[0] in own), None)


@dataclass
class Part:
    """Part of the space: one setting on given seats.

    `counts`: replicas that a stage may have; `stages`: how many there are, None: any number.
    """

    prepared: PreparedProblem
    space: SearchSpace
    setting: Setting
    seats: Seats
    counts: tuple[int, ...]
    stages: int | None = None

    @staticmethod
    def whole(
        prepared: PreparedProblem, space: SearchSpace, setting: Setting, cluster: Cluster
    ) -> Part:
        """Everything that a setting allows, on all ranks in their order."""
        ranks = tuple(range(len(cluster.devices)))
        return Part(prepared, space, setting, Seats(cluster, ranks), space.counts(len(ranks)))

    @property
    def least_seconds(self) -> float:
        """Seconds of a step that no plan is below: all work on all devices at full speed."""
        devices, items = self.seats.cluster.devices, self.prepared.problem.items
        work = [item.forward_seconds + item.backward_seconds for item in items]
        seconds = sum(work) / float(sum(devices[rank].speed for rank in self.seats.ranks))
        if self.space.straight:
            seconds = max(seconds, max(work) / self.seats.fastest)
        return seconds * self.setting.num_microbatches * (1 - 1e-12)

    def candidate(
        self, stage_of: tuple[int, ...], options: tuple[StageDeployment, ...]
    ) -> Candidate:
        """The candidate of such stages, which take the seats one after the other."""
        setting, replicas = self.setting, tuple(option.replicas for option in options)
        own = setting.schedule, len(options), setting.num_microbatches, replicas
        ends = zip(accumulate(replicas), replicas, strict=True)
        ranks = tuple(self.seats.ranks[end - count : end] for end, count in ends)
        return Candidate(setting, stage_of, options, ranks, warmup(*own, setting.extra_warmup))

    def allowed(self, candidate: Candidate) -> Candidate | None:
        """The candidate, recomputing where it has to if that is open; None if it breaks a rule."""
        problem, cluster = self.prepared.problem, self.seats.cluster
        if self.space.decides_recomputation:
            candidate = recomputing(problem, cluster, candidate)
        return None if violations(problem, cluster, candidate) else candidate


class Pipelines:
    """Everything that a part of the space allows."""

    def __init__(
        self, part: Part, *, segments: Segments | None = None, likely: bool = False,
        budget: Budget | None = None,
    ) -> None:  # fmt: skip
        """`segments`: where cuts may lie, if not at every ideal; `likely`: by load, with the depths
        that are likely, not by bound; `budget`: ends the bound."""
        self.part, self.setting, self.seats = part, part.setting, part.seats
        self.segments = part.prepared.segments if segments is None else segments
        space, stages, model = part.space, part.stages, self.segments.model
        menu = space.menu(part.counts)
        self.matrices = Matrices(
            self.segments, part.setting, part.seats, menu,
            spares=space.decides_recomputation,
            last=part.prepared.last(model),
            stages=stages if stages == model.num_stages else None,
            bounding=not likely,
        )  # fmt: skip
        self.chains = Chains(
            len(self.segments.ideals), len(part.seats.ranks), menu, self.matrices.costs, stages,
            recomputed=space.recomputed, widths=space.widths, budget=budget,
        )  # fmt: skip

    def bound(self) -> float:
        """A lower bound of all candidates (if the ideals are all), infinite if there is none.

        Seconds per microbatch without a flush, of a minibatch with one.  Raises OutOfTimeError.
        """
        return self.chains.solve() * (1 - 1e-12)

    def candidates(
        self, below: Callable[[], float], most: int | None = None
    ) -> Iterator[tuple[float, Candidate | None]]:
        """(bound, candidate) by rising bound, None for one that breaks something; after `bound`.

        One that lacks memory at its depths, which are known only now, is tried with recomputing
        stages right away; it comes again when its own bound has its turn.
        """
        for bound, pieces in self.chains.enumerate(below, most):
            yield bound * (1 - 1e-12), self._allowed(pieces)

    def quickest(self) -> Candidate | None:
        """The candidate that likely is the fastest, if there is one that breaks nothing."""
        matrices, kind = self.matrices, kind_of(self.setting.schedule)
        ranks, m = len(self.seats.ranks), self.setting.num_microbatches
        trips = Trips(self.segments, kind, not kind.stream, m, self.seats.fastest)

        def turn_of(key: Key, option: StageDeployment) -> Turn:
            p, r = ranks - key[1], option.replicas
            depth, last = matrices.depth(p, r), p + 2 * r > ranks
            fewer = 1 if last else depth - matrices.depth(p + r, r)
            return trips.turn(matrices.on(p, option), depth, fewer)

        pieces = likely_chain(self.chains, turn_of, trips.per_microbatch)
        return None if pieces is None else self._allowed(pieces)

    def _allowed(self, pieces: tuple[Piece, ...]) -> Candidate | None:
        stage_of = self.segments.model.items_of(groups_of(self.segments, pieces))
        made = self.part.candidate(stage_of, tuple(piece.option for piece in pieces))
        return self.part.allowed(made)


def recomputing(problem: PartitionProblem, cluster: Cluster, candidate: Candidate) -> Candidate:
    """The candidate with recomputation also where it lacks memory without.

    By the formula; where ranks hold several stages by the ledger, which alone knows what these
    hold together, and the stage that gives most for it first.
    """
    found, ledgers = evaluation(problem, cluster, candidate), None
    for s in sorted(found.stages, key=found.memory, reverse=candidate.shared):
        limit, options = found.deployment.limits[s], list(candidate.options)
        if limit is None or options[s].recompute:
            continue
        needed = found.needed(s)
        if candidate.shared:
            ledgers = ledgers or graph_free_ledgers(problem, cluster, candidate)
            needed = max(ledgers[rank].total_bytes for rank in candidate.ranks[s])
        if needed > limit:
            options[s], ledgers = replace(options[s], recompute=True), None
            candidate = replace(candidate, options=tuple(options))
    return candidate


def timed(
    problem: PartitionProblem,
    cluster: Cluster,
    candidate: Candidate,
    below: float = math.inf,
    known: KnownPaths | None = None,
) -> tuple[float, float]:
    """The objective of a candidate, and the share of its memory that a rank takes at most, by its
    graph-free plan.

    Exact but for streams with replicas: the simulator's seconds per microbatch or the closed form,
    whichever is more, because the simulator lets a rank use several links at once, and reductions
    none.  Memory is looked at where the seconds are `below` a limit, so that it matters; where they
    are not, paths that are `known` may say so, and tell seconds that it takes at least.
    """
    found = evaluation(problem, cluster, candidate)
    if (seconds := known.seconds(found, below) if known else found.seconds) < below:
        seconds = seconds_of(found)
    if not (seconds < below and limited(cluster)):
        return seconds, 0.0
    shares = defaultdict[int, float](float)
    for s, ranks in enumerate(candidate.ranks):
        if (limit := found.deployment.limits[s]) is not None:
            for rank in ranks:
                shares[rank] += found.memory(s) / max(limit, 0.5)
    if (share := max(shares.values(), default=0.0)) > SPARSE:
        share = filled(graph_free_ledgers(problem, cluster, candidate), cluster)
    return seconds, share


def graph_free_ledgers(
    problem: PartitionProblem, cluster: Cluster, candidate: Candidate
) -> tuple[MemoryLedger, ...]:
    """Ledgers of its graph-free plan; values with the same stages are one edge."""
    setting = candidate.setting
    training = Training(
        setting.schedule,
        setting.num_microbatches,
        setting.num_microbatches,
        candidate.warmup,
        max_grad_norm=1.0 if setting.clipping else None,
        optimizer_factor=setting.optimizer_factor,
        step=setting.step,
        updates="home" if setting.homes else "every",
    )
    plan = plan_of(evaluation(problem, cluster, candidate), training, merge=True)
    if plan.once:  # unless devices have memory of their own
        plan = replace(plan, cluster=cluster.to_toml())
    return ledgers_of(plan)


def limited(cluster: Cluster) -> bool:
    """True if a device has a limit on its memory."""
    return any(device.memory_bytes is not None for device in cluster.devices)


def filled(ledgers: Sequence[MemoryLedger], cluster: Cluster) -> float:
    """The share of its device's memory that a rank takes at most."""
    return max(
        (
            ledger.total_bytes / max(device.memory_bytes, 0.5)
            for ledger, device in zip(ledgers, cluster.devices, strict=False)
            if device.memory_bytes is not None
        ),
        default=0.0,
    )


def likely_cuts(part: Part) -> Iterator[Candidate]:
    """Cuts at positions that break nothing: of equally many replicas the one that is likely the
    fastest and the one by load, of any the best by its bound, or some of few ranks."""
    own, equal = partial(Pipelines, part, segments=part.prepared.positions), len(part.counts) == 1
    if equal and (one := own(likely=True).quickest()):
        yield one
    pipelines = own(likely=equal)
    if pipelines.bound() < math.inf:
        most = 1 if equal else max(1, CLOCKS // len(part.seats.ranks) ** 2)
        found = islice(pipelines.candidates(lambda: math.inf, MOST_BEGUN), CUTS * most)
        yield from islice((one for _, one in found if one is not None), most)
