"""The parts that the whole space is divided into, each with a first bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from pdcompile.cluster import Cluster, stage_limits
from pdcompile.passes.partition.space.pipelines import Ground, Pipelines, simple_bound
from pdcompile.passes.partition.space.seats import Seats, arrangements
from pdcompile.passes.schedules import memory_rule, warmup
from pdcompile.plan import Training
from pdcompile.problem import PartitionProblem
from pdcompile.problem.space import Candidate, SearchSpace, Setting, StageOption
from pdcompile.schedule.registry import kind_of


@dataclass(slots=True)
class Branch:
    """Part of the space; seconds are those of a step, whatever the schedule."""

    setting: Setting
    seats: Seats
    counts: tuple[int, ...]
    stages: int | None
    ground: Ground
    bound: float = 0.0
    candidates: Iterator[tuple[float, Candidate | None]] | None = None

    @property
    def scale(self) -> int:
        """Microbatches in what the search calls seconds."""
        return self.setting.num_microbatches if kind_of(self.setting.schedule).stream else 1

    @property
    def warmup(self) -> tuple[int, ...]:
        """Of one rank a stage."""
        setting = self.setting
        return warmup(
            setting.schedule,
            len(self.seats.ranks),
            setting.num_microbatches,
            extra=setting.extra_warmup,
        )

    def straight_problem(self, space: SearchSpace) -> PartitionProblem | None:
        """The branch as a problem of one rank a stage; None where it has other candidates too.

        Also where a message that skips stages may be faster than over all links on its way.
        """
        setting, ranks, problem = self.setting, self.seats.ranks, self.ground.problem
        if self.counts != (1,) or set(space.recompute) != {False}:
            return None
        if not space.in_order:
            alike = all(
                inner.bytes_per_second >= outer.bytes_per_second
                and inner.latency_seconds <= outer.latency_seconds
                for inner, outer in pairwise(self.seats.cluster.levels)
            )
            if not alike or list(ranks) != sorted(ranks):
                return None
            problem = replace(problem, allow_empty=False, max_stages=None)
        last = len(problem.stages) - 1
        return replace(
            problem,
            stages=stage_limits(self.seats.cluster, len(ranks), ranks=ranks),
            pins=tuple((i, len(ranks) - 1 if s == last else s) for i, s in problem.pins),
            memory=memory_rule(
                setting.schedule,
                self.warmup,
                setting.num_microbatches,
                clipping=setting.clipping,
                optimizer_factor=setting.optimizer_factor,
            ),
            num_microbatches=setting.num_microbatches,
            objective=kind_of(setting.schedule).objective,
        )

    def pipelines(self, space: SearchSpace, *, likely: bool = False) -> Pipelines:
        """All candidates of the branch."""
        return Pipelines(
            self.ground,
            space,
            self.setting,
            self.seats,
            self.counts,
            stages=self.stages,
            likely=likely,
        )

    def straight(self, stage_of: tuple[int, ...]) -> Candidate:
        """The candidate of such a problem's assignment."""
        ranks = tuple((rank,) for rank in self.seats.ranks)
        return Candidate(self.setting, stage_of, (StageOption(),) * len(ranks), ranks, self.warmup)


def branches(
    cluster: Cluster,
    space: SearchSpace,
    training: Training,
    ground_at: Callable[[int], Ground],
) -> Iterator[Branch]:
    """Every setting with every order of devices, number of used ones, and replica counts."""
    return _Branches(cluster, space, training, ground_at).run()


@dataclass(frozen=True, slots=True)
class _Branches:
    cluster: Cluster
    space: SearchSpace
    training: Training
    ground_at: Callable[[int], Ground]

    def run(self) -> Iterator[Branch]:
        if self.space.in_order:
            ranks = tuple(range(self.space.stages or 0))
            yield from self._of(Seats(self.cluster, ranks), (1,), len(ranks))
            return
        orders, _ = arrangements(self.cluster)
        most = len(self.cluster.devices)
        seen = set()
        for order in orders:
            for used in range(1, most + 1):
                if order[:used] in seen:
                    continue
                seen.add(order[:used])
                seats = Seats(self.cluster, order[:used])
                for counts, stages in self._widths(used):
                    yield from self._of(seats, counts, stages)

    def _of(self, seats: Seats, counts: tuple[int, ...], stages: int | None) -> Iterator[Branch]:
        for setting in self._settings(len(seats.ranks)):
            ground = self.ground_at(setting.num_microbatches)
            branch = Branch(setting, seats, counts, stages, ground)
            branch.bound = simple_bound(ground, self.space, setting, seats) * branch.scale
            yield branch

    def _widths(self, used: int) -> Iterator[tuple[tuple[int, ...], int | None]]:
        """Replica counts of a stage, and the number of stages where it is asked for or follows."""
        wanted, cap = self.space.stages, self._most_stages()
        if self.space.replicas == "any":
            depths = [wanted] if wanted or cap is None else list(range(1, min(used, cap) + 1))
            for stages in depths:
                if stages is None or stages <= used:
                    yield self.space.counts(used), stages
            return
        for width in (1,) if self.space.replicas == "1" else range(1, used + 1):
            stages, rest = divmod(used, width)
            if not rest and wanted in (None, stages) and (cap is None or stages <= cap):
                yield (width,), stages if wanted else None

    def _settings(self, used: int) -> Iterator[Setting]:
        for schedule in self.space.schedules:
            for m in self.space.microbatches:
                # whatever the warm-up is to be
                same = used == 1 or kind_of(schedule).warmup == "all"
                for extra in self.space.extra_warmup[: 1 if same else None]:
                    yield Setting(
                        schedule,
                        m,
                        extra,
                        self.training.optimizer_factor,
                        self.training.max_grad_norm is not None,
                        self.training.step,
                    )

    def _most_stages(self) -> int | None:
        return self.ground_at(self.space.microbatches[0]).problem.max_stages
