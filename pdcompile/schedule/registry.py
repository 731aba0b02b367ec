"""The schedules that there are, one row each: nothing else knows a name or a property of one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from math import gcd
from typing import Literal, NamedTuple

from pdcompile.errors import ScheduleError, did_you_mean
from pdcompile.schedule.instruction import BACKWARDS, Action
from pdcompile.schedule.placement import IN_TURN, IN_V, Placement, dispatched, side_by_side
from pdcompile.schedule.written import Written, parse

LOOKAHEAD = 1  # receive slots beyond those in flight: the next microbatch travels meanwhile
GRADIENT_SLOTS = 2  # one in use by the backward that runs, one travelling
SPLITTING = 0.02  # of a step, at most, that splitting backwards costs
STALENESS = 0.02  # of a step: old weights have to save so much to be worth it
PARTS = 2  # of a split backward, equally long: costs do not tell them apart

#: how many minibatches old weights are; in words where it follows from the plan, and every
#: microbatch is then a minibatch with an update of its own
Lag = int | Literal["own warm-up", "first warm-up"]


class Task(NamedTuple):
    """A forward, backward or update; `minibatch` is relative to the call, `microbatch` or −1."""

    stage: int
    action: Action
    minibatch: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class StageWork:
    """Work that one call asks of one stage on one rank.

    Args:
        microbatches: of this call's minibatch, those that this replica takes; none in a flush.
        warmup: forwards before the first backward, beyond one.
        pending: (minibatch, microbatch) that went forward in earlier calls but not backward.
        unstepped: earlier minibatches whose update has not run.
        lag: a forward of this call needs the updates of all minibatches before −lag.
        late: the update waits for other ranks; a stream places it as late as legal.
        halfway: a late update comes before the forward of this microbatch; None: when it has to.
        buffers: minibatches whose gradients may be held at one time.
        num_stages: of the whole pipeline.
        limits: of each microbatch whose backward the stage before runs in this call, the last
            forward of this call that may come before its backward here (−1: none).  A stage
            that waits for no forward which the stage before holds back cannot deadlock.
        flush: nothing more comes: end what is pending.
        delay: where backward is split, by how many microbatches the gradients of the weights may
            come after those of the inputs.
        ahead: forwards before each backward, where not the warm-up decides: see `turns.ahead`.
    """

    stage: int
    microbatches: Sequence[int]
    warmup: int = 0
    pending: Sequence[tuple[int, int]] = ()
    unstepped: Sequence[int] = ()
    lag: int = 0
    late: bool = False
    halfway: int | None = None
    buffers: int = 1
    num_stages: int = 1
    limits: Mapping[tuple[int, int], int] = field(default_factory=dict)
    flush: bool = False
    delay: int = 0
    ahead: Sequence[int] = ()

    def forwards(self, count: int) -> Sequence[int]:
        """The microbatches that go forward just before the backward of this number."""
        ahead = self.ahead or range(self.warmup + 1, self.warmup + 1 + len(self.microbatches))
        return self.microbatches[ahead[count - 1] if count else 0 : ahead[count]]


Order = Callable[..., Iterator[Task]]  # of a sequence of `StageWork`, and of `extra` if any


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """One schedule.

    Args:
        lag: minibatch t runs on the weights W_max(t − lag, 0); its update makes W_{t+1}.  Without
            lag every call drains the pipeline (a flush), with one it never does (a stream).  In
            words: the warm-up depth of the stage, or of the first one for all stages.  Where one
            update is of a `group` of minibatches, lag and versions count groups.
        warmup: "all": every microbatch goes forward before the first goes backward;
            "alternate": to a depth that the planner chooses, then one forward, one backward.
        stages_per_rank: how many stages a rank can hold; None: any number.
        usual: how many it holds where nobody says.
        placed: which stages share a rank, as many on each; None: any may, and the planner deals
            them out in turn.  Where the order is for one placement, what is in flight is counted
            from it.
        splits_backward: the gradients of the weights are computed after those of the inputs, when
            nothing more urgent is to be done: a microbatch is held until then.
        update: what it promises about updates: a sentence without its subject.
        source: the paper.
        module: where the pure generator `order` is: it yields the tasks of one rank in one call,
            given the work of the rank's stages in ascending order.  Where all backwards of a call
            are in it, the update after them is added, unless it is put off.
        written: the tasks, where somebody wrote them down: stages, ranks and microbatches follow
            from it, and what is in flight is counted.
        in_torch: what torch.distributed.pipelining calls it; empty: it has none like that.
        extra: forwards that every rank adds to its warm-up, as in "interleaved+2"; None: no number.
        trains: False: forwards alone, without gradients and updates.
        dispatched: every rank of one host runs what comes to it next (`placement.dispatched`).
        alone: where every microbatch is a minibatch, the update after it is of that one, whichever
            replica took it; else of one of each replica.  Warm-up then counts the microbatches of
            all replicas of a stage.
    """

    name: str
    update: str
    source: str
    module: str
    lag: Lag = 0
    warmup: Literal["all", "alternate"] = "alternate"
    stages_per_rank: int | None = 1
    usual: int = 1
    placed: Placement | None = None
    splits_backward: bool = False
    written: Written | None = None
    in_torch: str = ""
    extra: int | None = None
    trains: bool = True
    dispatched: bool = False
    alone: bool = False

    @property
    def stream(self) -> bool:
        """True if microbatches are in flight between calls."""
        return self.lag != 0

    @property
    def drains(self) -> bool:
        """True if every call ends with all its backwards, whenever their update is."""
        return not self.stream or self.dispatched

    @property
    def several(self) -> bool:
        """True if a rank may hold several stages."""
        return self.stages_per_rank != 1

    def holds(self, per_rank: int) -> bool:
        """True if a rank may hold so many stages."""
        return self.stages_per_rank is None or per_rank <= self.stages_per_rank

    @property
    def updates_each(self) -> bool:
        """True if every microbatch is a minibatch with an update of its own."""
        return isinstance(self.lag, str)

    @property
    def takes_replicas(self) -> bool:
        """True if a stage may have several.  With an update each, stages of unlike counts make
        unlike versions, and one that is the same on all stages does not exist."""
        return self.alone or not (self.updates_each and self.one_age)

    def group(self, replicas: int) -> int:
        """Minibatches whose gradients one update of a stage averages.

        Where every microbatch is a minibatch the replicas take minibatches in turn, and a stage
        updates when each of them has had one, unless updates are `alone`.
        """
        return replicas if self.updates_each and not self.alone else 1

    @property
    def by_planner(self) -> bool:
        """True if schedule="auto" considers it: a minibatch in one piece is another training, and a
        dispatched schedule has all stages on every rank."""
        return self.trains and not (self.updates_each or self.dispatched)

    @property
    def gain(self) -> float:
        """The share of a step that it has to save for auto to take it: in no forecast is what it
        costs to split a backward, nor what a training loses by old weights."""
        return SPLITTING * self.splits_backward + STALENESS * self.stream

    @property
    def one_age(self) -> bool:
        """True if all weights that a minibatch runs on are equally old.

        Else nothing can be summed over stages: neither a norm nor a tied parameter's gradients.
        """
        return self.lag != "own warm-up"

    def lag_of(self, warmup: int, first: int) -> int:
        """Lag of a stage, by its warm-up depth and that of the first stage."""
        if isinstance(self.lag, int):
            return self.lag
        return first if self.one_age else warmup

    def versions(self, warmup: int, first: int) -> int:
        """Weight versions that a stage holds: after a flush the next minibatches name all."""
        return self.lag_of(warmup, first) + 1

    @property
    def objective(self) -> Literal["bottleneck", "flush"]:
        """Quantity that the planner minimises: seconds a microbatch, or of a whole minibatch."""
        return "flush" if self.drains else "bottleneck"

    def placement(self, num_stages: int, num_ranks: int) -> tuple[int, ...]:
        """The rank of every stage, where the planner decides."""
        return (self.placed or IN_TURN).places(num_stages, num_ranks)

    def width(self, num_stages: int, num_ranks: int) -> int:
        """Replicas of every stage, where they follow from how many stages and ranks there are."""
        return num_ranks // gcd(num_stages, num_ranks) if self.dispatched else 1

    def ranks(self, placement: Sequence[int], replicas: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of every stage, in the order in which they take microbatches."""
        return (dispatched if self.dispatched else side_by_side)(placement, replicas)

    def order(self, stages: Sequence[StageWork]) -> Iterator[Task]:
        """The tasks of one rank in one call; its module is loaded on use."""
        if self.written is not None:
            yield from _as_written(self.written, stages)
        else:
            generator: Order = import_module(self.module).order
            yield from generator(stages, self.extra) if self.extra else generator(stages)
        for own in stages if self.drains else ():
            if not (own.flush or (own.late and own.lag)):
                yield Task(own.stage, Action.STEP, 0, -1)

    @property
    def backwards(self) -> tuple[Action, ...]:
        """The kinds of backward that its programs have."""
        if self.written is not None:
            return self.written.backward_actions
        found = BACKWARDS[1:] if self.splits_backward else BACKWARDS[:1]
        return found if self.trains else ()

    @property
    def turns(self) -> tuple[int, ...]:
        """Place of each microbatch in the order of backwards; empty: ascending."""
        return () if self.written is None else self.written.turns

    def turn(self, microbatch: int) -> int:
        """Place of a microbatch in the order of backwards: ascending, unless it is written."""
        return self.turns[microbatch] if microbatch < len(self.turns) else microbatch

    def most_warmup(self, num_microbatches: int, replicas: int) -> int:
        """The deepest warm-up of a replica: all its microbatches, with one left to go backward.

        A forward of a stream needs all backwards of the minibatch before the last `lag`, which
        grows with the warm-up where it follows from that.
        """
        if self.updates_each or not self.trains:
            return sys.maxsize if self.trains else 0  # no backward is waited for
        if not self.drains:
            return self.lag_of(0, 0) * num_microbatches // replicas
        return -(-num_microbatches // replicas) - 1

    def depth_held(self, warmup: int, first: int) -> int:
        """Depth of a warm-up that would hold as much as a stage does, by the first stage's.

        Where backward is split, every stage holds as many microbatches as the first one, unless
        what is held is counted from the order.
        """
        return max(warmup, first) if self.splits_backward and not self.placed else warmup

    def halves(self, backward: float, again: float = 0.0) -> tuple[float, float]:
        """Seconds of a backward up to the gradients of the inputs, and of what is done later.

        A split backward is taken to be two halves; `again`: of a forward that runs again before.
        """
        later = (backward - again) / PARTS if self.splits_backward else 0.0
        return backward - later, later

    def in_flight(self, warmup: int, share: int) -> int:
        """The most microbatches of one replica, which takes `share`, between forward and backward;
        those of a stream may be of several minibatches."""
        if self.warmup == "all":
            return share
        return min(warmup + 1, share) if self.drains else warmup + 1

    def slots(self, warmup: int, share: int) -> int:
        """Receive slots of each value that comes in, per replica."""
        most = self.in_flight(warmup, share) + LOOKAHEAD
        return min(most, share) if self.drains else most

    def gradient_buffers(self, warmup: int, first: int, *, late: bool) -> int:
        """Minibatches whose gradients a stage holds, by its warm-up and the first stage's.

        More than one where updates of a stream wait for other ranks, and later backwards do not.
        """
        if not (self.stream and late):
            return int(self.trains)
        return self.lag_of(warmup, first) + 1 - (warmup if self.updates_each else 0)

    def gradients_beside(self, warmup: int, first: int, share: int, *, late: bool) -> int:
        """The same beside the activations of its `share` of microbatches: those of a single one
        come one by one, where activations go."""
        single = self.drains and share == 1
        return 0 if single else self.gradient_buffers(warmup, first, late=late)


DEFAULT = "1f1b"
EAGER = "updates as eager gradient accumulation does, bit for bit"
_ROWS = (
    ScheduleKind(
        "gpipe",
        update=EAGER, source="Huang et al., 2019, arXiv 1811.06965",
        module="pdcompile.passes.schedules.gpipe",
        warmup="all", stages_per_rank=None, in_torch="GPipe",
    ),
    ScheduleKind(
        "1f1b",
        update=EAGER, source="PipeDream-Flush: Narayanan et al., 2021, arXiv 2006.09503",
        module="pdcompile.passes.schedules.one_f_one_b", in_torch="1F1B",
    ),
    ScheduleKind(
        "interleaved",
        update=EAGER, source="Narayanan et al., 2021, arXiv 2104.04473, section 2.2",
        module="pdcompile.passes.schedules.interleaved",
        stages_per_rank=None, usual=2, placed=IN_TURN, in_torch="Interleaved1F1B", extra=0,
    ),
    ScheduleKind(
        "zb-h1",
        update=EAGER, source="Zero Bubble, ZB-H1: Qi et al., 2023, arXiv 2401.10241",
        module="pdcompile.passes.schedules.zero_bubble", splits_backward=True,
    ),
    ScheduleKind(
        "zb-v", update=EAGER,
        source="Zero Bubble, ZB-V: Qi et al., 2023 and 2024, arXiv 2401.10241 and 2405.15362",
        module="pdcompile.passes.schedules.zb_v",
        stages_per_rank=2, usual=2, placed=IN_V, splits_backward=True, in_torch="ZBVZeroBubble",
    ),
    ScheduleKind(
        "round",
        update="updates as eager gradient accumulation does, up to the order of its sums",
        source="RoundPipe: Luo et al., 2026, arXiv 2604.27085",
        module="pdcompile.passes.schedules.round",
        stages_per_rank=None, placed=IN_TURN, dispatched=True,
    ),
    ScheduleKind(
        "2bw",
        update="never drains, and updates with gradients of weights that are one minibatch old",
        source="PipeDream-2BW: Narayanan et al., 2021, arXiv 2006.09503",
        module="pdcompile.passes.schedules.two_bw", lag=1,
    ),
    ScheduleKind(
        "round-2bw",
        update="drains, and updates with gradients of weights that are one minibatch old",
        source="RoundPipe: Luo et al., 2026, arXiv 2604.27085, with a staleness of 1",
        module="pdcompile.passes.schedules.round",
        lag=1, stages_per_rank=None, placed=IN_TURN, dispatched=True,
    ),
    ScheduleKind(
        "stash",
        update="never drains, updates after every microbatch (a stage with replicas: after one of "
        "each), and takes gradients of weights that are as many updates old as the stage's "
        "warm-up is deep, another age on every stage",
        source="PipeDream: Narayanan et al., 2019, doi 10.1145/3341301.3359646",
        module="pdcompile.passes.schedules.stash", lag="own warm-up",
    ),
    ScheduleKind(
        "vsync",
        update="never drains, updates after every microbatch, and takes gradients of weights that "
        "are as many minibatches old as the first stage's warm-up is deep, on every stage",
        source="PipeDream: Narayanan et al., 2019, doi 10.1145/3341301.3359646",
        module="pdcompile.passes.schedules.vsync", lag="first warm-up",
    ),
    ScheduleKind(
        "async",
        update="never drains, updates after every microbatch of whichever replica, at a rate that "
        "is higher the more seldom its turn is, and takes gradients of weights that are as many "
        "minibatches old as the first stage's warm-up is deep, on every stage",
        source="Rescaled ASGD: Mahran et al., 2026, arXiv 2605.13434",
        module="pdcompile.passes.schedules.asynchronous", lag="first warm-up", alone=True,
    ),
    ScheduleKind(
        "forward",
        update="makes none: for predict and eval_step alone",
        source="fill and drain: Huang et al., 2019, arXiv 1811.06965, without its backwards",
        module="pdcompile.passes.schedules.forward", stages_per_rank=None, trains=False,
    ),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ROWS}


def kind_of(name: str, where: str | None = None) -> ScheduleKind:
    """The row of a schedule, by its name or by its tasks (`Written`).

    Raises ScheduleError when there is none of that name, or the tasks are none of a schedule.
    """
    if ":" in name:
        return _kind_of_written(name, where)
    base, _, extra = name.rpartition("+")
    known = base in KINDS and KINDS[base].extra is not None and extra.isdecimal()
    if known and extra == str(int(extra) or ""):
        return replace(KINDS[base], name=name, in_torch="", extra=int(extra))
    if name not in KINDS:
        raise ScheduleError(
            f"schedule {name!r} is not one of {', '.join(KINDS)}",
            where=where,
            remedy=did_you_mean(name, KINDS) + f'schedule="{DEFAULT}"',
        )
    return KINDS[name]


def find(name: str) -> ScheduleKind | None:
    """The row of a schedule; None where there is none."""
    try:
        return kind_of(name)
    except ScheduleError:
        return None


def name_of(schedule: str) -> str:
    """Name of a schedule, where its tasks would be too long."""
    return schedule if (kind := find(schedule)) is None else kind.name


@lru_cache(maxsize=64)
def _kind_of_written(text: str, where: str | None) -> ScheduleKind:
    written = parse(text, where or "schedule")
    order = ", in another order of microbatches" if written.turns else ", bit for bit"
    return ScheduleKind(
        written.name,
        update=f"updates as eager gradient accumulation does{order}",
        source="a file",
        module="",
        stages_per_rank=None,
        placed=Placement("as written", lambda _, __: written.placement),
        splits_backward=Action.BACKWARD_INPUT in written.backward_actions,
        written=written,
    )


def _as_written(written: Written, stages: Sequence[StageWork]) -> Iterator[Task]:
    """The tasks of these stages of a rank, without those of microbatches that a short minibatch has
    not.  What is left of an order that cannot deadlock cannot either."""
    here = {own.stage: frozenset(own.microbatches) for own in stages}
    for stage, action, microbatch in written.rows[written.placement[stages[0].stage]]:
        if microbatch in here.get(stage, ()):
            yield Task(stage, action, 0, microbatch)


def names(where: Callable[[ScheduleKind], bool]) -> tuple[str, ...]:
    """Schedules of which that is true."""
    return tuple(name for name, kind in KINDS.items() if where(kind))


def allowed(max_staleness: int | str) -> tuple[str, ...]:
    """Schedules whose gradients are of weights at most so many minibatches old ("any")."""
    most = sys.maxsize if isinstance(max_staleness, str) else max_staleness
    return names(lambda k: k.trains and (most == sys.maxsize or k.lag in range(most + 1)))


def flush_schedules() -> str:
    """Their names, as error messages list them."""
    return ", ".join(allowed(0))


def several_a_rank(per_rank: int = 2) -> str:
    """Schedules under which a rank may hold so many stages, as remedies list them."""
    return " or ".join(names(lambda k: k.trains and not k.dispatched and k.holds(per_rank)))


def usual_stages() -> str:
    """Stages that a rank holds where nobody says, for help texts."""
    more = [f"under {k.name} {k.usual}" for k in KINDS.values() if k.usual > 1]
    more.append(f"under {' and '.join(names(lambda k: k.dispatched))} one more than devices")
    return ", ".join(["one a device", *more])


def in_turn() -> str:
    """Schedules whose replicas take minibatches in turn, for help texts."""
    return " or ".join(names(lambda kind: kind.updates_each and kind.takes_replicas))


def one_age_streams() -> str:
    """Streams that sum over stages, as remedies list them."""
    return " or ".join(map(repr, names(lambda k: not k.drains and k.one_age)))


def described() -> str:
    """Every schedule and what its updates compute, for help texts."""
    alike: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        alike.setdefault(kind.update, []).append(name)
    return "; ".join(f"{', '.join(names)}: {update}" for update, names in alike.items())
