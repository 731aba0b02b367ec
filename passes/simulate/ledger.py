"""The memory ledger of every rank, by walking its programs in bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from pdcompile.passes.schedules.program_walk import numbered
from pdcompile.plan import MemoryLedger, Plan
from pdcompile.schedule import Action, Instruction, Kind, Phase, Schedule
from pdcompile.schedule.instruction import BACKWARDS, POST_RECV, TO_INPUTS, TO_WEIGHTS
from pdcompile.schedule.spec import BUCKET_BYTES, PipelineSpec

_TRANSFER = frozenset((Phase.POST_RECV, Phase.WAIT_RECV, Phase.SEND, Phase.WAIT_SEND))
_Microbatch = tuple[int, int]  # minibatch, microbatch
_Parts = tuple[int, ...]  # the lines of a ledger


def ledgers(plan: Plan, programs: Sequence[Schedule]) -> tuple[MemoryLedger, ...]:
    """One ledger a rank, for these successive programs: what its stages hold at their peak.

    Weights: trainable ones times live versions, others once; of a stage whose replicas read one
    memory each has its share; where that is no memory of theirs, those of the stage that runs, and
    its gradients in a backward.  Optimizer: the factor times what
    this stage updates itself (not the copies of a tied parameter that another stage owns).
    Gradients: buffers of all trainable parameters, from a minibatch's first backward, which makes
    them one by one, to its update; those of copies until they are passed on.
    Activations: saved bytes times the microbatches between forward and backward, without those of
    results that autograd has no use for, once these are out (in inference: of the one that runs);
    a stage that recomputes holds such a set only while it runs forward or backward, and between
    them the microbatch's inputs, which are receive slots.  Between the parts of a split backward
    the graph is held, and the gradients that the second part needs.
    Receive: the memory of messages from their post to their use, of values until they are freed.
    Send: gradients until they are out, and values where that is later than their microbatch's
    backward, or than the part of it that needs them (until then they are activations, unless their
    stage recomputes).  Workspace is held during a forward or backward, temporaries during the
    optimizer's step: never both.  Inputs: copies of a minibatch's, where the next one begins before
    its last backward.  Outputs: those of the minibatch so far and of the one before, which a loop
    holds that assigns the result.
    """
    spec = plan.spec
    found, count, kind = [MemoryLedger()] * spec.num_ranks, len(spec.ranks[0]), spec.kind
    alike = all(len(own) == count for own in spec.ranks) and spec.num_microbatches % count == 0
    alike &= not (kind.stream or kind.dispatched or any(spec.patterns))
    alike &= not any(stage.home_bytes for stage in plan.stages)
    for rank, stages in spec.holders:
        if alike and rank != (first := spec.ranks[stages[0]][0]):
            found[rank] = found[first]
            continue
        peaks = (max(notes, key=sum) for notes in _walked(plan, programs, rank, stages))
        found[rank] = MemoryLedger(*max(peaks, key=sum))
    return tuple(found)


class Held(NamedTuple):
    """Bytes that a rank holds from some second on."""

    seconds: float
    ledger: MemoryLedger


def held_over_time(
    plan: Plan, programs: Sequence[Schedule], passed_seconds: Sequence[Sequence[float]]
) -> tuple[tuple[Held, ...], ...]:
    """The ledger of each rank from change to change; its largest one is that of `ledgers`.

    While an instruction computes, a rank holds the most that it needs for it.

    Args:
        passed_seconds: of each rank, when it is done with each of its instructions.
    """
    spec = plan.spec
    found: list[tuple[Held, ...]] = [()] * spec.num_ranks
    for rank, stages in spec.holders:
        walked = _walked(plan, programs, rank, stages)
        curve, begin = [], 0.0
        next(walked)
        for notes, end in zip(walked, passed_seconds[rank], strict=True):
            curve += [(begin, max(notes, key=sum)), (end, notes[-1])]
            begin = end
        found[rank] = tuple(_changes(curve))
    return tuple(found)


def _changes(curve: Iterable[tuple[float, _Parts]]) -> Iterator[Held]:
    """The most of each second, if it is more than what comes before and after, and the last."""
    for seconds, group in groupby(curve, key=lambda one: one[0]):
        parts = [one for _, one in group]
        most = max(parts, key=sum)
        for one in (most, parts[-1]) if sum(most) > sum(parts[-1]) else parts[-1:]:
            yield Held(seconds, MemoryLedger(*one))


def _walked(
    plan: Plan, programs: Sequence[Schedule], rank: int, stages: Iterable[int]
) -> Iterator[list[_Parts]]:
    """Bytes that a rank holds before all of its instructions, and during each, the first as it was
    before."""
    spec, held, notes = plan.spec, dict[int, _StageLedger](), list[_Parts]()
    for stage in stages:
        held[stage] = _StageLedger(plan, spec, stage, rank, held, notes)
    yield notes
    for base, program in numbered(spec, programs):
        for walk in held.values():
            walk.begin(base, trains=program.name == spec.name)
        for one in program.columns[rank]:
            held[one.stage].execute(one, base)
            yield notes
            del notes[:-1]


@dataclass
class _StageLedger:
    """Bytes that one stage holds on one rank, instruction by instruction.

    `held` are the walks of all stages of the rank, `notes` what they held together, note by note.
    """

    plan: Plan
    spec: PipelineSpec
    index: int
    rank: int
    held: dict[int, _StageLedger]
    notes: list[_Parts]
    in_flight: int = 0
    split: int = 0  # of them, between the two parts of their backward
    buffers: set[int] = field(default_factory=set)  # updates to come that have gradients
    copied: Counter[int] = field(default_factory=Counter)  # bytes of those of copies, by update
    arriving: Counter[_Microbatch] = field(default_factory=Counter)  # bytes of their gradients
    received: int = 0  # bytes of messages that have memory
    slots: dict[_Microbatch, list[int]] = field(default_factory=dict)  # edges that came in
    borrowed: dict[_Microbatch, list[tuple[_StageLedger, int]]] = field(default_factory=dict)
    leaving: Counter[tuple[_Microbatch, int]] = field(default_factory=Counter)  # peers of values
    out: set[_Microbatch] = field(default_factory=set)  # between the passes, its values received
    over: dict[_Microbatch, tuple[int, int]] = field(default_factory=dict)  # bytes, see _leave
    sending: int = 0  # bytes that only a send still needs
    inputs: Counter[int] = field(default_factory=Counter)  # microbatches to come, by minibatch
    outputs: Counter[int] = field(default_factory=Counter)  # microbatches made, by minibatch
    rest: _Parts = ()  # while it does nothing

    def __post_init__(self) -> None:
        stage, training = self.plan.stages[self.index], self.plan.training
        copies = sum(one.bytes for one in self.plan.tied if self.index in one.stages[1:])
        self.stage = stage
        self.copies = min(copies, stage.trainable_bytes)
        self.owned = stage.trainable_bytes - self.copies
        older = self.spec.versions(self.index) - 1
        ranks = self.spec.ranks[self.index]
        readers = len(ranks) if self.spec.once else 1
        self.weights = -(-(stage.parameter_bytes + older * stage.trainable_bytes) // readers)
        self.replica = ranks.index(self.rank)
        updated = self.owned / len(ranks) if self.spec.homes else self.owned
        if stage.home_bytes:
            updated = stage.home_bytes[self.replica]
        self.state = math.floor(training.optimizer_factor * updated)
        self.brought = 0  # bytes of weights while the stage runs, where they rest on the host
        if self.spec.fetched:
            self.weights, self.brought, self.state = 0, stage.parameter_bytes, 0
        self.outputs[-1] = self.share(-1)  # there was a call before the first of these
        self.outgoing = [e for e, one in enumerate(self.plan.edges) if one.source == self.index]
        self._note()

    def begin(self, minibatch: int, *, trains: bool) -> None:
        """A call begins: its inputs are copied if the next one's may come before its backward."""
        if trains and self.spec.kind.stream and (share := self.share(minibatch)):
            self.inputs[minibatch] = share
        self.outputs = Counter({t: n for t, n in self.outputs.items() if t >= minibatch - 1})
        self._note()

    def share(self, minibatch: int) -> int:
        """Microbatches of a full minibatch that come here."""
        count = self.spec.num_microbatches
        return len(self.spec.share(self.index, self.replica, count, minibatch))

    def execute(self, one: Instruction, base: int) -> None:
        """Account for one instruction, and for what is there only while it runs."""
        at, action = (base + one.minibatch, one.microbatch), one.action
        if action is Action.FORWARD:
            self.in_flight += 1
            self.outputs[at[0]] += 1
            self._note(workspace=self.stage.forward_workspace_bytes, running=True)
        elif action in BACKWARDS:
            self._backward(action, at)
        elif action is Action.STEP:
            self._note(temporaries=0 if self.spec.fetched else self.stage.step_bytes)
            self.buffers.discard(self.spec.closing(self.index, at[0]))
            self.copied.pop(self.spec.closing(self.index, at[0]), None)
        elif action is Action.FREE:
            self.in_flight -= not self.spec.kind.trains
            self._free(at)
        elif action is Action.POST_REDUCE:  # a bucket at a time, where gradients were
            self.buffers.add(self.spec.closing(self.index, at[0]))  # sums, of idle replicas too
            largest = max(BUCKET_BYTES, self.stage.largest_gradient_bytes)
            self._note(workspace=0 if self.spec.fetched else min(self.owned, largest))
        elif action.kind is Kind.GATHER and not self.spec.once:  # packed, from the update on
            self.received += self.owned if action is Action.POST_GATHER else -self.owned
        elif action.phase in _TRANSFER:
            if one.peer == self.rank:
                self._hand_over(one, at)
            elif action.kind is Kind.VALUE:
                self._value(action.phase, one.edge, at)
            else:
                self._message(action, one.edge, at)
        self._note()

    def _backward(self, action: Action, at: _Microbatch) -> None:
        """All of it, or a part: the first takes the gradients, the last ends the microbatch."""
        update = self.spec.closing(self.index, at[0])
        workspace, second = self.stage.workspace_bytes, action is Action.BACKWARD_WEIGHT
        whole = action is Action.BACKWARD
        # The results of a second run die with it.
        freed = self.stage.freed_bytes if self.stage.recompute or at in self.out else 0
        self.out.discard(at)
        if whole:
            again = self.stage.forward_workspace_bytes if self.stage.recompute else 0
            workspace = max(again, workspace - freed)
        to_come = 0  # bytes of gradients that are not there when the first backward needs the most
        if whole and update not in self.buffers and self.stage.first_workspace_bytes:
            all_of_it = max(again, self.stage.first_workspace_bytes - freed)
            to_come = max(0, self.stage.trainable_bytes - all_of_it)
            workspace = max(0, all_of_it - self.stage.trainable_bytes)
        if update not in self.buffers:
            self.copied[update] = self.copies
        self.buffers.add(update)
        if not whole and self.stage.split_bytes:
            first, later = self.stage.split_first_workspace_bytes, self.stage.split_workspace_bytes
            workspace = later if second else first or workspace
        self._note(workspace=workspace, to_come=to_come, running=not second, backward=True)
        if action is Action.BACKWARD_INPUT:
            self._leave(at, self.stage.split_freed_bytes)
        if action in TO_INPUTS:
            self.received -= self.arriving.pop(at, 0)
            self.inputs[at[0]] -= 1
            self.inputs = +self.inputs  # without those that are used up
        self.split += (action is Action.BACKWARD_INPUT) - (action is Action.BACKWARD_WEIGHT)
        self.in_flight -= action in TO_WEIGHTS

    def _hand_over(self, one: Instruction, at: _Microbatch) -> None:
        """Another stage of the rank has a value until it frees it, gradients until a backward, and
        sums of tied ones until it takes them."""
        if one.action.kind is Kind.TIED and one.action.phase is Phase.WAIT_RECV:
            self._message(one.action, one.edge, at)
        if one.action.phase is not Phase.SEND or one.action.kind is Kind.WEIGHT:
            return
        receiver = self.held[one.target]
        if one.action.kind is Kind.TIED:
            self._pass_on(one.edge, at)
        if one.action.kind is not Kind.VALUE:
            receiver._message(POST_RECV[one.action.kind], one.edge, at)
        elif self.stage.recompute:
            receiver._value(Phase.POST_RECV, one.edge, at)
        else:  # it is an activation here, and no copy is made: as if it were out when it is freed
            self._value(Phase.SEND, one.edge, at)
            receiver.borrowed.setdefault(at, []).append((self, one.edge))
        receiver.rest = receiver._parts()

    def _value(self, phase: Phase, edge: int, at: _Microbatch) -> None:
        """A value comes into a slot, or leaves from where the forward has made it."""
        size = self.plan.edges[edge].bytes
        if phase is Phase.POST_RECV:
            self.slots.setdefault(at, []).append(edge)
            self.received += size
        elif phase is Phase.SEND:
            self.sending += size if self.stage.recompute and not self.leaving[at, edge] else 0
            self.leaving[at, edge] += 1
        elif phase is Phase.WAIT_SEND:
            self.leaving[at, edge] -= 1
            if not self.leaving[at, edge]:
                del self.leaving[at, edge]
                if self.stage.recompute:
                    self.sending -= size
                elif at in self.over:
                    self._leave(at, self.over[at][0])
                elif not any(other == at for other, _ in self.leaving):
                    self.out.add(at)

    def _free(self, at: _Microbatch) -> None:
        self.received -= sum(self.plan.edges[edge].bytes for edge in self.slots.pop(at, ()))
        for owner, edge in self.borrowed.pop(at, ()):
            owner._value(Phase.WAIT_SEND, edge, at)
            owner.rest = owner._parts()
        self._leave(at, sum(self.plan.edges[edge].bytes for edge in self.outgoing))

    def _leave(self, at: _Microbatch, most: int) -> None:
        """Hold at most so many bytes for the values of a microbatch that are not out alone: `over`
        has these numbers."""
        if self.stage.recompute:
            return  # counted from the send on
        left = [edge for edge in self.outgoing if (at, edge) in self.leaving]
        held = min(most, sum(self.plan.edges[edge].bytes for edge in left))
        self.sending += held - self.over.pop(at, (0, 0))[1]
        if left:
            self.over[at] = most, held

    def _message(self, action: Action, edge: int, at: _Microbatch) -> None:
        """Gradients are used by a backward, the rest when it has come."""
        phase, kind = action.phase, action.kind
        size = (self.plan.edges if kind is Kind.GRADIENT else self.plan.tied)[edge].bytes
        if phase is Phase.POST_RECV:
            self.received += size
            self.arriving[at] += size if kind is Kind.GRADIENT else 0
        elif phase is Phase.WAIT_RECV:  # new weights, and sums of tied gradients, are used then
            self.received -= 0 if kind is Kind.GRADIENT else size
        elif kind is Kind.WEIGHT:
            pass  # sent from where they live
        elif phase is Phase.SEND:
            self.sending += size
            if kind is Kind.TIED:
                self._pass_on(edge, at)
        elif phase is Phase.WAIT_SEND:
            self.sending -= size

    def _pass_on(self, edge: int, at: _Microbatch) -> None:
        """A copy's sum leaves; a replica without microbatches has none."""
        update = self.spec.closing(self.index, at[0])
        self.copied[update] -= min(self.copied[update], self.plan.tied[edge].bytes)

    def _note(self, **during: int) -> None:
        """Note what is held now, by all stages of the rank."""
        parts = self._parts(**during)
        if not during:
            self.rest = parts
        if len(self.held) > 1:
            others = [one.rest for one in self.held.values() if one is not self]
            parts = tuple(map(sum, zip(parts, *others, strict=True)))
        self.notes.append(parts)

    def _parts(
        self, workspace: int = 0, to_come: int = 0, temporaries: int = 0, running: int = False,
        backward: int = False,
    ) -> _Parts:  # fmt: skip
        """The lines of a ledger, of this stage alone; `running`: it has a graph of autograd."""
        sets = running if self.stage.recompute else self.in_flight - self.split
        gradients = len(self.buffers) * self.owned + sum(self.copied.values()) - to_come
        if self.brought:  # they go to the host as soon as they are whole
            gradients = (backward and self.stage.trainable_bytes) - to_come
        between = self.split * (self.stage.split_bytes or self.stage.saved_bytes)
        kept = sets * self.stage.saved_bytes + between - len(self.out) * self.stage.loose_bytes
        # What is in flight has its outputs among its activations; a second run makes its own.
        apart = sum(self.outputs.values()) - (0 if self.stage.recompute else sets)
        made = max(0, apart) * self.stage.output_bytes
        return (
            self.weights + running * self.brought, gradients, self.state, kept, self.received,
            self.sending, workspace, temporaries, len(self.inputs) * self.stage.input_bytes, made,
        )  # fmt: skip
