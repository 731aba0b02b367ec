"""The parts that the whole space is divided into, each with a first bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdcompile.cluster import Cluster
from pdcompile.passes.partition.space.pipelines import Ground, simple_bound
from pdcompile.passes.partition.space.seats import Seats, arrangements
from pdcompile.plan import Training
from pdcompile.problem.space import Candidate, SearchSpace, Setting
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
                    for setting in self._settings(used):
                        ground = self.ground_at(setting.num_microbatches)
                        branch = Branch(setting, seats, counts, stages, ground)
                        simple = simple_bound(ground, self.space, setting, seats)
                        branch.bound = simple * branch.scale
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
