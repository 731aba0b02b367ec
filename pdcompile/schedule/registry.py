"""The schedules that there are, one row each: nothing else knows a name or a property of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import lcm
from typing import Literal, NamedTuple

from pdcompile.errors import ScheduleError
from pdcompile.schedule.instruction import Action

LOOKAHEAD = 1  # receive slots beyond those in flight: the next microbatch travels meanwhile
GRADIENT_SLOTS = 2  # one in use by the backward that runs, one travelling


class Task(NamedTuple):
    """A forward, backward or update; `minibatch` is relative to the call, `microbatch` or −1."""

    stage: int
    action: Action
    minibatch: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class StageWork:
    """What one call asks of one stage on one rank.

    Args:
        microbatches: of this call's minibatch, those that this replica takes; none in a flush.
        warmup: forwards before the first backward, beyond one.
        pending: (minibatch, microbatch) that went forward in earlier calls but not backward.
        unstepped: earlier minibatches whose update has not run.
        late: the update waits for other ranks; a stream places it as late as legal.
        limits: of each microbatch whose backward the stage before runs in this call, the last
            forward of this call that may come before its backward here (−1: none).  A stage
            that waits for no forward which the stage before holds back cannot deadlock.
        flush: nothing more comes: end what is pending.
    """

    stage: int
    microbatches: Sequence[int]
    warmup: int = 0
    pending: Sequence[tuple[int, int]] = ()
    unstepped: Sequence[int] = ()
    late: bool = False
    limits: Mapping[tuple[int, int], int] = field(default_factory=dict)
    flush: bool = False


Order = Callable[[Sequence[StageWork]], Iterator[Task]]


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """One schedule.

    Args:
        lag: minibatch t runs on the weights W_max(t − lag, 0); its update makes W_{t+1}.  Without
            lag every call drains the pipeline (a flush), with one it never does (a stream).
        warmup: "all": every microbatch goes forward before the first goes backward;
            "alternate": to a depth that the planner chooses, then one forward, one backward.
        stages_per_rank: how many stages a rank can hold; None: any number.
        update: what it promises about updates: a sentence without its subject.
        source: the paper.
        module: where the pure generator `order` is: it yields the tasks of one rank in one call,
            given the work of the rank's stages in ascending order.
    """

    name: str
    update: str
    source: str
    module: str
    lag: int = 0
    warmup: Literal["all", "alternate"] = "alternate"
    stages_per_rank: int | None = 1

    @property
    def stream(self) -> bool:
        """Are microbatches in flight between calls?"""
        return self.lag > 0

    @property
    def versions(self) -> int:
        """Weight versions that a stage holds."""
        return self.lag + 1

    @property
    def objective(self) -> Literal["bottleneck", "flush"]:
        """What the planner minimises: seconds per microbatch, or of a whole minibatch."""
        return "bottleneck" if self.stream else "flush"

    def order(self, stages: Sequence[StageWork]) -> Iterator[Task]:
        """The tasks of one rank in one call; its module is loaded on use."""
        generator: Order = import_module(self.module).order
        return generator(stages)

    def most_warmup(self, num_microbatches: int, replicas: int) -> int:
        """The deepest warm-up of a replica: all its microbatches, with one left to go backward.

        A forward of a stream needs all backwards of the minibatch before the last `lag`.
        """
        if self.stream:
            return self.lag * num_microbatches // replicas
        return -(-num_microbatches // replicas) - 1

    def in_flight(self, warmup: int, share: int) -> int:
        """The most microbatches of one replica, which takes `share`, between forward and backward.

        Those of a stream may be of several minibatches.
        """
        if self.warmup == "all":
            return share
        return warmup + 1 if self.stream else min(warmup + 1, share)

    def slots(self, warmup: int, share: int) -> int:
        """Receive slots of each value that comes in, per replica."""
        most = self.in_flight(warmup, share) + LOOKAHEAD
        return most if self.stream else min(most, share)

    def gradient_buffers(self, *, late: bool) -> int:
        """Two where updates of a stream wait for other ranks: the next minibatch's is summed."""
        return 2 if self.stream and late else 1


def window(first: tuple[int, int], last: tuple[int, int]) -> int:
    """Sends in flight on one channel between two stages, each (warm-up, replicas), in order.

    The first stage runs w_first·r_first − w_last·r_last microbatches ahead; a send that much
    older plus one is known to have been received, so that waiting for it does not block in
    steady state.
    """
    (w, a), (v, b) = first, last
    return max(2, 1 + -(-(w * a - v * b) // lcm(a, b)))


DEFAULT = "1f1b"
_ROWS = (
    ScheduleKind(
        "gpipe",
        update="updates as eager gradient accumulation does, bit for bit",
        source="Huang et al., 2019, arXiv 1811.06965",
        module="pdcompile.passes.schedules.gpipe",
        warmup="all",
        stages_per_rank=None,
    ),
    ScheduleKind(
        "1f1b",
        update="updates as eager gradient accumulation does, bit for bit",
        source="PipeDream-Flush: Narayanan et al., 2021, arXiv 2006.09503",
        module="pdcompile.passes.schedules.one_f_one_b",
    ),
    ScheduleKind(
        "2bw",
        update="never drains, and updates with gradients of weights that are one minibatch old",
        source="PipeDream-2BW: Narayanan et al., 2021, arXiv 2006.09503",
        module="pdcompile.passes.schedules.two_bw",
        lag=1,
    ),
)
KINDS = {kind.name: kind for kind in _ROWS}


def kind_of(name: str, where: str | None = None) -> ScheduleKind:
    """The row of a schedule.  Raises ScheduleError when there is none of that name."""
    if name not in KINDS:
        raise ScheduleError(
            f"schedule {name!r} is not one of {', '.join(KINDS)}",
            where=where,
            remedy=f'schedule="{DEFAULT}"',
        )
    return KINDS[name]


def allowed(max_staleness: int | str) -> tuple[str, ...]:
    """Schedules whose gradients are of weights at most so many minibatches old ("any")."""
    return tuple(
        name
        for name, kind in KINDS.items()
        if isinstance(max_staleness, str) or kind.lag <= max_staleness
    )


def flush_schedules() -> str:
    """Their names, as error messages list them."""
    return ", ".join(allowed(0))


def described() -> str:
    """Every schedule and what its updates compute, for help texts."""
    return "; ".join(f"{name} {kind.update}" for name, kind in KINDS.items())
