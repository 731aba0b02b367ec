"""PipelineSpec: the few numbers of a plan that decide its schedule.

Small and hashable, so that programs can be cached by it.  Who talks to whom is derived here,
once, for both ends of every transfer: a send and its receive cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from pdcompile.errors import ScheduleError
from pdcompile.plan import Edge, Plan, TiedParameter
from pdcompile.schedule.instruction import Kind
from pdcompile.schedule.registry import ScheduleKind, kind_of, window

FORWARD_ONLY_SLOTS = 2


class Hop(NamedTuple):
    """One end of the transfers of an edge (or tied parameter) between two stages.

    `window`: how many sends of one channel may be under way before the oldest is waited for.
    """

    kind: Kind
    edge: int
    stage: int  # at the other end
    window: int


class Hops(NamedTuple):
    """All transfers of a stage, by the moment at which they happen."""

    before_forward: tuple[Hop, ...] = ()  # received
    after_forward: tuple[Hop, ...] = ()  # sent
    before_backward: tuple[Hop, ...] = ()
    after_backward: tuple[Hop, ...] = ()
    after_step: tuple[Hop, ...] = ()  # the owner's new weights
    weights: tuple[Hop, ...] = ()  # received from owners


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """What the schedule functions read of a plan.  `ranks[s][q]`: replica q of stage s."""

    name: str
    num_microbatches: int
    warmup: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    edges: tuple[Edge, ...]
    tied: tuple[TiedParameter, ...]
    clipping: bool

    @property
    def kind(self) -> ScheduleKind:
        return kind_of(self.name)

    @property
    def num_ranks(self) -> int:
        """Ranks are numbered through; one that no stage uses has a column of its own."""
        return 1 + max(rank for ranks in self.ranks for rank in ranks)

    def rank(self, stage: int, microbatch: int) -> int:
        """Replicas take microbatches round-robin, the same one forward and backward."""
        return self.ranks[stage][microbatch % len(self.ranks[stage])]

    def share(self, stage: int, replica: int, num_microbatches: int) -> range:
        return range(replica, num_microbatches, len(self.ranks[stage]))

    def late(self, stage: int) -> bool:
        """Does STEP wait for other ranks?  Then a stream places it as late as legal."""
        return self.clipping or len(self.ranks[stage]) > 1

    def in_flight(self, stage: int) -> int:
        """The most microbatches of one replica between forward and backward."""
        return self.kind.in_flight(self.warmup[stage], self._most(stage))

    def pool(self, stage: int) -> int:
        """Receive slots of each activation edge that enters the stage, per replica."""
        return self.kind.slots(self.warmup[stage], self._most(stage))

    def _most(self, stage: int) -> int:
        """Microbatches of a minibatch that the first replica of a stage takes."""
        return len(self.share(stage, 0, self.num_microbatches))

    def window(self, first: int, last: int) -> int:
        """Sends under way on one channel between two stages, first < last."""
        ends = [(self.warmup[stage], len(self.ranks[stage])) for stage in (first, last)]
        return window(*ends)


def spec_of(plan: Plan) -> PipelineSpec:
    """Read a plan.  Raises ScheduleError where no schedule of ours fits it."""
    training = plan.training
    name = training.schedule
    kind_of(name, where="plan: training.schedule")
    if len(training.warmup) != len(plan.stages):
        raise ScheduleError(
            f"{len(training.warmup)} warm-up depths for {len(plan.stages)} stages",
            where="plan: training.warmup",
        )
    if training.num_microbatches < 1 or min(training.warmup, default=0) < 0:
        raise ScheduleError(
            f"{training.num_microbatches} microbatches with warm-up {training.warmup}",
            where="plan: training",
        )
    spec = PipelineSpec(
        name,
        training.num_microbatches,
        training.warmup,
        _ranks(plan),
        plan.edges,
        plan.tied,
        training.max_grad_norm is not None,
    )
    _check_transfers(spec)
    return spec


def with_edges(spec: PipelineSpec, edges: tuple[Edge, ...]) -> PipelineSpec:
    """The same pipeline for a forward-only program over other edges."""
    return replace(spec, edges=edges, tied=())


def _ranks(plan: Plan) -> tuple[tuple[int, ...], ...]:
    ranks, following = [], 0
    for stage in plan.stages:
        given = stage.ranks or tuple(range(following, following + stage.replicas))
        if len(given) != stage.replicas or stage.replicas < 1:
            raise ScheduleError(
                f"{stage.replicas} replicas on ranks {given}", where=f"plan: stages[{stage.index}]"
            )
        following = max(given) + 1
        ranks.append(given)
    flat = [rank for given in ranks for rank in given]
    if len(set(flat)) != len(flat) or min(flat) < 0:
        raise ScheduleError(f"two stages share a rank: {tuple(ranks)}", where="plan: stages")
    return tuple(ranks)


def _check_transfers(spec: PipelineSpec) -> None:
    num_stages = len(spec.ranks)
    for index, edge in enumerate(spec.edges):
        stages = (edge.source, *edge.targets)
        if not edge.targets or list(stages) != sorted(set(stages)) or stages[0] < 0:
            raise ScheduleError(
                f"edge {edge.value!r} goes from {edge.source} to {edge.targets}",
                where=f"plan: edges[{index}]",
            )
        if stages[-1] >= num_stages:
            raise ScheduleError(
                f"edge {edge.value!r} ends at {stages[-1]} of {num_stages} stages",
                where=f"plan: edges[{index}]",
            )
    for index, tied in enumerate(spec.tied):
        where = f"plan: tied[{index}]"
        if len(tied.stages) < 2 or list(tied.stages) != sorted(set(tied.stages)):
            raise ScheduleError(f"{tied.fqn!r} is tied over stages {tied.stages}", where=where)
        if tied.stages[-1] >= num_stages or tied.stages[0] < 0:
            raise ScheduleError(
                f"{tied.fqn!r} is held by stage {tied.stages[-1]} of {num_stages}", where=where
            )
        if any(len(spec.ranks[stage]) > 1 for stage in tied.stages):
            raise ScheduleError(
                f"{tied.fqn!r} is tied across stages of which one is replicated",
                where=where,
                remedy="plan with one replica for these stages",
            )


@lru_cache(maxsize=4096)
def hops(spec: PipelineSpec, stage: int) -> Hops:
    """Everything that the stage sends and receives.

    A value goes from its source to every target.  Its gradient goes last target → … → first
    target → source, each adding its own (eager's order of summation); the gradient of a tied
    parameter goes last holder → … → owner; the owner's new weights go to every other holder.
    """
    value_in, value_out, down, up, weight_out, weight_in = [], [], [], [], [], []
    for index, edge in enumerate(spec.edges):
        if stage == edge.source:
            value_out += [
                Hop(Kind.VALUE, index, other, spec.window(stage, other)) for other in edge.targets
            ]
        elif stage in edge.targets:
            value_in.append(Hop(Kind.VALUE, index, edge.source, spec.window(edge.source, stage)))
    chains = [
        (Kind.GRADIENT, index, (edge.source, *edge.targets))
        for index, edge in enumerate(spec.edges)
        if edge.gradient
    ]
    chains += [(Kind.TIED, index, tied.stages) for index, tied in enumerate(spec.tied)]
    for kind, index, chain in chains:
        if stage not in chain:
            continue
        place = chain.index(stage)
        if place + 1 < len(chain):
            later = chain[place + 1]
            down.append(Hop(kind, index, later, spec.window(stage, later)))
        if place > 0:
            earlier = chain[place - 1]
            up.append(Hop(kind, index, earlier, spec.window(earlier, stage)))
    for index, tied in enumerate(spec.tied):
        if stage == tied.stages[0]:
            weight_out += [Hop(Kind.WEIGHT, index, holder, 1) for holder in tied.stages[1:]]
        elif stage in tied.stages:
            weight_in.append(Hop(Kind.WEIGHT, index, tied.stages[0], 1))
    return Hops(*map(tuple, (value_in, value_out, down, up, weight_out, weight_in)))
