"""Choices of the planner besides the cut: the space that a certificate speaks of.

2BW's own planner (Narayanan et al., 2021, arXiv 2006.09503, section 3.3: stages of equal width,
recomputation for all or none) and PipeDream's straight and replicated pipelines on one level
(Narayanan et al., 2019) lie inside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pdcompile.errors import ConfigError
from pdcompile.problem.deployment import StageDeployment
from pdcompile.schedule.registry import DEFAULT, find, kind_of, name_of

MOST_COUNTS = 64  # replica counts in one menu; beyond, they are multiples of a step


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The choices; every field lists what is allowed.

    Args:
        replicas: "1": one rank a stage; "equal": the same number for all; "any"; or the
            number of each stage.
        recompute: both: chosen for each stage, unless `recomputed` says which do.
        microbatches: how many pieces a minibatch is cut into.
        extra_warmup: e puts 1 + e microbatches between neighbours in flight (`extra` of
            `pdcompile.passes.schedules.warmup`); more hides transfers and costs memory.
        stages: how many; None: any number.
        idle: devices may be left out.
        in_order: stage s runs on rank s; else devices take the positions that suit them best.
        placement: the rank of each stage where ranks hold several and none has a replica, as the
            schedule places them; empty: every stage has a rank.  Of equal replicas each place has
            so many ranks; where their number is open, a rank holds as many stages, or all
            `stages` are dealt out over fewer places.
        recomputed: whether each of the `stages` recomputes; empty: as `recompute` says.
        homes: whether updates are spread over replicas.
        sharing: spaces besides this one, of schedules whose ranks hold several stages.
    """

    replicas: Literal["1", "equal", "any"] | tuple[int, ...] = "1"
    recompute: tuple[bool, ...] = (False,)
    schedules: tuple[str, ...] = (DEFAULT,)
    microbatches: tuple[int, ...] = (1,)
    extra_warmup: tuple[int, ...] = (0,)
    stages: int | None = None
    in_order: bool = False
    recomputed: tuple[bool, ...] = ()
    idle: bool = True
    placement: tuple[int, ...] = ()
    sharing: tuple[SearchSpace, ...] = ()
    homes: tuple[bool, ...] = (False,)

    def __post_init__(self) -> None:
        """Raises ConfigError: a choice is empty or names what there is not."""
        checks: tuple[tuple[str, bool], ...] = (
            ("replicas", self.replicas in ("1", "equal", "any") or _fits(self)),
            ("recompute", bool(self.recompute) and set(self.recompute) <= {False, True}),
            ("schedules", bool(self.schedules) and all(map(find, self.schedules))),
            ("microbatches", bool(self.microbatches) and min(self.microbatches) >= 1),
            ("extra_warmup", bool(self.extra_warmup) and min(self.extra_warmup) >= 0),
            ("stages", self.stages is None or self.stages >= 1),
            ("recomputed", len(self.recomputed) in (0, self.stages)),
            ("in_order", not self.in_order or self._ordered),
            ("placement", not self.placement or (self.in_order and self._placed)),
            ("sharing", all(one.placement and not one.sharing for one in self.sharing)),
        )
        for name, holds in checks:
            if not holds:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not a choice of the planner's"
                )

    @property
    def _placed(self) -> bool:
        """Has every stage a rank, and can all schedules have several on one?"""
        ranks = set(self.placement)
        most = max(map(self.placement.count, ranks), default=1)
        several = all(kind_of(name).holds(most) for name in self.schedules)
        equal = self.replicas in ("1", "equal") or len(set(self.widths)) == 1
        known = self.open_width or len(self.placement) == self.stages
        return several and equal and known and ranks == set(range(len(ranks)))

    @property
    def _ordered(self) -> bool:
        """Is it known which stage is on which rank, but for how many replicas there are?"""
        return bool(self.placement) or (self.stages is not None and self.straight)

    @property
    def open_width(self) -> bool:
        """True if ranks that hold several stages may have any number of replicas, all equal."""
        return bool(self.placement) and self.replicas == "equal"

    @property
    def decides_recomputation(self) -> bool:
        """True if stages that recompute are still to be chosen."""
        return len(set(self.recompute)) > 1 and not self.recomputed

    @property
    def cut_alone(self) -> bool:
        """True if nothing but the cut is open, of stages that keep their activations and have a
        rank each."""
        return self.in_order and not self.placement and set(self.recompute) == {False}

    @property
    def straight(self) -> bool:
        """One rank a stage."""
        return self.replicas == "1"

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of replicas of each stage, where that is given."""
        return self.replicas if isinstance(self.replicas, tuple) else ()

    def counts(self, ranks: int) -> tuple[int, ...]:
        """Replica counts that a stage may have when so many ranks are there."""
        if self.straight:
            return (1,)
        if self.widths:
            return tuple(sorted({*self.widths}))
        step = -(-ranks // MOST_COUNTS)
        few = range(1, min(ranks, 16) + 1)
        return tuple(sorted({*few, *range(step, ranks + 1, step), ranks}))

    def menu(self, counts: Iterable[int]) -> tuple[StageDeployment, ...]:
        """All rows of a stage's menu with these replicas; what does not recompute comes first."""
        again = sorted(set(self.recompute))
        return tuple(StageDeployment(r, more) for r in counts for more in again)

    def __str__(self) -> str:
        """Text of it in a certificate's scope; of spaces with shared ranks, what is other."""
        own = self._parts()
        others = ([part for part in one._parts() if part not in own] for one in self.sharing)
        return "; ".join([*own, *(f"or {', '.join(parts)}" for parts in others)])

    def _parts(self) -> list[str]:
        again = "by stage" if len(set(self.recompute)) > 1 else "on" if self.recompute[0] else "off"
        if self.recomputed:
            again = f"on stages {', '.join(str(s) for s, on in enumerate(self.recomputed) if on)}"
        where = "on ranks" if self.straight else "at places"
        return [
            f"{'any number of' if self.stages is None else self.stages} stages"
            + (" in the order of ranks" if self.in_order else ""),
            *([f"{where} {_listed(self.placement)}"] if self.placement else []),
            f"replicas {_listed(self.replicas)}",
            f"recomputation {again}",
            f"schedules {', '.join(map(name_of, self.schedules))}",
            f"microbatches {', '.join(map(str, self.microbatches))}",
            f"extra warm-up {', '.join(map(str, self.extra_warmup))}",
            *(["updates of every replica or at homes"] if len(self.homes) > 1 else []),
        ]


def _fits(space: SearchSpace) -> bool:
    return bool(space.widths) and len(space.widths) == space.stages and min(space.widths) >= 1


def _listed(replicas: object) -> str:
    return "-".join(map(str, replicas)) if isinstance(replicas, tuple) else str(replicas)


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting that one partition problem is solved for: the outer choices."""

    schedule: str
    num_microbatches: int
    extra_warmup: int = 0
    optimizer_factor: float = 2.0
    clipping: bool = False
    step: tuple[float, float, float] = (0.0, 0.0, 0.0)  # as in the plan's training
    homes: bool = False  # of updates are spread over replicas

    @property
    def scale(self) -> int:
        """Microbatches of a step, where what is minimised are the seconds of one."""
        return 1 if kind_of(self.schedule).drains else self.num_microbatches


@dataclass(frozen=True, slots=True)
class Candidate:
    """One point of the space.

    `stage_of` is by item of the problem; `options`, `ranks` and `warmup` by stage.
    """

    setting: Setting
    stage_of: tuple[int, ...]
    options: tuple[StageDeployment, ...]
    ranks: tuple[tuple[int, ...], ...]
    warmup: tuple[int, ...]

    @property
    def straight(self) -> bool:
        return all(option.replicas == 1 for option in self.options)

    @property
    def shared(self) -> bool:
        """Does a rank hold several stages?"""
        return len({rank for own in self.ranks for rank in own}) < sum(map(len, self.ranks))

    @property
    def places(self) -> set[tuple[int, ...]]:
        """The ranks that stages have together."""
        return {tuple(sorted(own)) for own in self.ranks}
