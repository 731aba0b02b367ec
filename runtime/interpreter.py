"""One rank's interpreter: executes instructions against tensors.

`passes.check` walks the same lists with tokens and `passes.simulate` with seconds; nothing is
communicated here that is not in the list.  POST and SEND never block, WAIT may.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pdcompile.batch.step_result import total_loss
from pdcompile.compiled import Compiled
from pdcompile.eager.gradients import clip, memory_of
from pdcompile.errors import ClosedError
from pdcompile.runtime.device import Fetched, Handle, RankDevice
from pdcompile.runtime.failure.instruction_log import InstructionLog
from pdcompile.runtime.optimizer import Updater
from pdcompile.runtime.recording import Recording
from pdcompile.runtime.stage.compute import Compute, Feed, expected
from pdcompile.runtime.stage.replicas import OF_REPLICAS, Replicas
from pdcompile.runtime.stage.weights import StageWeights
from pdcompile.runtime.transport.contract import Channel, Expected
from pdcompile.runtime.transport.point_to_point import GroupTransport
from pdcompile.runtime.transport.reductions import Norms
from pdcompile.schedule import Action, Instruction, Kind, Phase
from pdcompile.schedule.spec import hops

#: by minibatch: what one place of a program makes or gets, until it is taken
Slot = dict[int, Any]
#: of broadcasts by item and microbatch: the tensors that are here, and what is to arrive
Box = dict[tuple[int, int], Any]


class Loss:
    """The loss of one minibatch on this rank: a part of every rank that has the last stage.

    `own` is this rank's part, where it has one; the others are in flight since a call.
    """

    def __init__(self, call: int) -> None:
        self.call = call
        self.own: Tensor | None = None
        self.parts: dict[int, Handle] = {}  # by rank
        self._value: Tensor | None = None

    def ready(self) -> bool:
        return self._value is not None or all(part.ready() for part in self.parts.values())

    def wait(self) -> Tensor:
        if self._value is None:
            if not self.parts:
                raise ClosedError(
                    "the pipeline ended before this loss arrived",
                    remedy="read the losses, or call pipe.flush(), before the pipeline ends",
                )
            self._value = total_loss([part.wait() for _, part in sorted(self.parts.items())])
            self.parts.clear()
        return self._value


class Losses(dict[int, Loss]):
    """The losses that a rank knows or waits for, by minibatch; `call` is the present one."""

    def __init__(self, worker: Worker, dtype: torch.dtype, device: RankDevice) -> None:
        self.call = 0
        self._worker, self._dtype, self._device = worker, dtype, device

    def of(self, minibatch: int) -> Loss:
        return self.setdefault(minibatch, Loss(self.call))

    def settle(self, call: int | None, reach: int) -> None:
        """Call `call` begins (None: the last one ended): wait for those of `reach` calls ago."""
        for minibatch, loss in list(self.items()):
            if call is None or loss.call <= call - reach:
                self.pop(minibatch).wait()
        self.call = self.call if call is None else call

    def sum(self, minibatch: int) -> None:
        """This rank's part, of its microbatches' losses."""
        loss = self.of(minibatch)
        loss.own = total_loss(self._worker.feeds[minibatch].losses)
        loss.parts[self._worker.rank] = self._device.fetch(loss.own)

    def tell(self, minibatch: int, peer: int, at: Place) -> None:
        loss, worker = self.of(minibatch), self._worker
        if (stages := worker.near.get(peer)) is not None:
            theirs = stages[max(stages)].losses.of(minibatch)
            theirs.parts[worker.rank] = loss.parts[worker.rank]
        elif worker.transport is not None:  # else it is a rank without a stage, in this process
            assert loss.own is not None
            worker.transport.defer(at.send(loss.own, minibatch))

    def hear(self, minibatch: int, peer: int, at: Place) -> None:
        if peer not in self._worker.near:  # else the part is added by who tells it
            expected = Expected((), self._dtype, minibatch)
            self.of(minibatch).parts[peer] = at.receive(expected, minibatch)


class Worker:
    """State of one stage of a rank while it runs; `near`: those of all ranks of this process.

    `transport`: to other processes; `updater` None: gradients only, no STEP may come.
    """

    def __init__(
        self, stage: int, rank: int, compute: Compute, compiled: Compiled, weights: StageWeights,
        norms: Norms, transport: GroupTransport | None, device: RankDevice,
    ) -> None:  # fmt: skip
        plan, train = compiled.plan, compiled.capture.train
        self.stage, self.rank, replica = stage, rank, plan.spec.ranks[stage].index(rank)
        self.replicas: Replicas | None = None
        self.near: dict[int, dict[int, Worker]] = {rank: {stage: self}}
        self.weights, self.norms, self.transport = weights, norms, transport
        self.updater: Updater | None = None
        self.recording: Recording | None = None
        self.current: Instruction | None = None
        self.feeds: dict[int, Feed] = {}
        loss_dtype = "float32" if train.loss is None else train.values[train.loss].dtype
        self.losses = Losses(self, getattr(torch, loss_dtype), device)
        self.compute, self._device, self.base = compute, device, 0
        self.tied, self._reach = plan.tied, plan.spec.reach
        self._hops = hops(plan.spec, stage, replica)
        self._max_norm = plan.training.max_grad_norm
        self.box: Box = {}
        self._clips_to: float | None = None  # where the user clips what is in .grad now
        self.weights_at: set[int] | None = None  # their memory; None: it may be another now
        self.slots: defaultdict[tuple[int, ...], Slot] = defaultdict(dict)  # by phase, kind, …
        self._bound = cache(self._bind)  # of the present wiring

    @property
    def held(self) -> dict[int, Worker]:
        """All stages of its rank."""
        return self.near[self.rank]

    @property
    def far(self) -> GroupTransport:
        """Transport of what another process sends or gets."""
        assert self.transport is not None
        return self.transport

    def begin(
        self, base: int, feed: Feed | None = None, box: Box | None = None,
        max_norm: float | None = None,
    ) -> None:  # fmt: skip
        """A program begins, whose minibatch 0 is number `base`."""
        self.base, self._clips_to = base, max_norm
        self.box = {} if box is None else box
        self.weights.updating = False
        if feed is not None:
            self.feeds[feed.minibatch] = feed
            if feed.wiring is not self.compute.wiring:
                self.compute.wire(feed.wiring)
                self._bound.cache_clear()

    def settle(self, call: int | None = None) -> None:
        """Call `call` begins (None: the last one ended): finish what no program reaches back to.

        Losses come first: the `settle` of their senders waits for that, whoever asks for them.
        """
        for one in self.held.values():
            one.losses.settle(call, self._reach)
            for minibatch in [t for t in one.feeds if t < max(one.base - self._reach, 0)]:
                del one.feeds[minibatch]
        if self.transport is not None:
            self.transport.settle(call)

    def abandon(self, minibatch: int | None = None) -> None:
        """Forget what is in flight: all of it, or `minibatch` where nothing else is."""
        self.current = None
        self._device.abandon()
        for one in [*self.losses] if minibatch is None else [minibatch]:
            self.losses.of(one).parts.clear()
            del self.losses[one]
        if minibatch is None:
            self.weights.leave()
        else:
            self.feeds.pop(minibatch, None)
            self.weights.abandon(minibatch)
        self._bound.cache_clear()
        for part in (*self.slots.values(), *(feed.flights for feed in self.feeds.values())):
            part.clear()
        self.norms.abandon()
        if self.replicas is not None:
            self.replicas.abandon()
        if self.transport is not None:
            self.transport.abandon()

    def ready(self, ins: Instruction) -> bool:
        """True if `execute` would return at once; taken for granted where a process has one rank,
        which waits."""
        if self.transport is not None:
            return True
        if ins.action.phase is Phase.WAIT_RECV:
            return self.base + ins.minibatch in self._bound(ins).args[2].coming
        if ins.action is Action.WAIT_NORMS:
            return self.norms.ready(self.base + ins.minibatch)
        if self.replicas is not None and ins.action in OF_REPLICAS:
            return self.replicas.ready(ins.action, self.base + ins.minibatch)
        return True

    def execute(self, ins: Instruction) -> None:
        """Run one instruction; after an error, `current` says which one it was."""
        self.current = ins
        self._bound(ins)(self.base + ins.minibatch)
        self.current = None

    def _bind(self, ins: Instruction) -> partial[None]:
        """The instruction of any minibatch, with all that is the same for each of them."""
        run = _OF_PHASE.get(ins.action.phase) or _OF_ACTION[ins.action]
        return partial(run, self, ins, Place(self, ins))

    # -- messages ----------------------------------------------------------------------------

    def _post(self, ins: Instruction, at: Place, minibatch: int) -> None:
        if at.near is None:  # else it is handed over when it is sent
            size = self.feeds[minibatch].sizes[ins.microbatch] if at.sized else 0
            at.coming[minibatch] = at.receive(at.expected(size), minibatch)

    def _wait(self, ins: Instruction, at: Place, minibatch: int) -> None:
        tensor, kind = at.coming.pop(minibatch).wait(), at.kind
        if at.sized:
            at.coming[minibatch] = tensor
        elif kind is Kind.WEIGHT:
            self.weights.receive(at.fqn, minibatch, tensor)
        elif kind is Kind.TIED:
            peers = [hop.peer for hop in self._hops.sums_in if hop.edge == ins.edge]
            self.weights.receive_sum(at.fqn, minibatch, peers.index(ins.peer), tensor)
        else:
            self.box[ins.edge, ins.microbatch] = tensor

    def _send(self, ins: Instruction, at: Place, minibatch: int) -> None:
        if at.sized:
            each = at.leaving[minibatch]
            tensor = each.pop()
            if not each:
                del at.leaving[minibatch]
        elif at.kind is Kind.WEIGHT:
            tensor = self.weights.master(at.fqn)
        elif at.kind is Kind.TIED:
            tensor = self.weights.pass_on(at.fqn, minibatch)
        else:
            tensor = self.box[ins.edge, ins.microbatch]
        if at.near is None:
            at.sent[minibatch] = at.send(tensor, minibatch)
        else:
            at.near[minibatch] = Fetched(tensor.detach())

    def _wait_send(self, _: Instruction, at: Place, minibatch: int) -> None:
        if at.near is None:
            at.sent.pop(minibatch).wait()

    # -- what is computed --------------------------------------------------------------------

    def _forward(self, ins: Instruction, at: Place, minibatch: int) -> None:
        microbatch, feed, version = ins.microbatch, self.feeds[minibatch], self.weights.newest
        if feed.wiring.training:
            version = self.weights.version_of(minibatch, ins.lag)
        came = {edge: slot.pop(minibatch) for edge, slot in at.came}
        values = self.compute.forward(feed, microbatch, version, came)
        outputs: dict[str, Tensor] = {}
        for port, edge in feed.wiring.outputs:
            if edge is None and not feed.keep_outputs:
                continue
            outputs[port.value] = value = _apart(self, values[port.value])
            if edge is not None:
                at.left[edge][minibatch] = [value] * feed.wiring.fan_out[edge]
        if feed.keep_outputs:
            feed.outputs[microbatch] = outputs
        feed.leaves[microbatch] = {}

    def _backward(self, ins: Instruction, at: Place, minibatch: int) -> None:
        version = self.weights.version_of(minibatch, ins.lag)
        came = {edge: slot.pop(minibatch) for edge, slot in at.came}
        feed, split = self.feeds[minibatch], ins.action is Action.BACKWARD_INPUT
        sent = self.compute.backward(feed, ins.microbatch, version, came, split=split)
        for edge, gradient in sent:
            at.left[edge][minibatch] = [gradient]

    def _backward_weight(self, ins: Instruction, _: Place, minibatch: int) -> None:
        version = self.weights.version_of(minibatch, ins.lag)
        self.compute.backward_weight(self.feeds[minibatch], ins.microbatch, version)

    def _step(self, _: Instruction, __: Place, minibatch: int) -> None:
        assert self.updater is not None
        scale = self.norms.scale
        skipped = scale is not None and scale.skips(minibatch)
        if self.updater.update(self.weights, minibatch, self.stage, skipped=skipped):
            self.weights_at = None

    def _gradients(self, minibatch: int) -> dict[str, Tensor]:
        """Gradients of all stages of the rank, by name."""
        held, shown = [one.weights for one in self.held.values()], self._clips_to is not None
        parts = [one.present_gradients() if shown else one.harvest(minibatch) for one in held]
        return {fqn: gradient for part in parts for fqn, gradient in part.items()}

    def _of_replicas(self, ins: Instruction, _: Place, minibatch: int) -> None:
        assert self.replicas is not None
        self.replicas.execute(ins.action, minibatch)

    def _post_norms(self, _: Instruction, __: Place, minibatch: int) -> None:
        self.norms.post(minibatch, self._gradients(minibatch))

    def _wait_norms(self, _: Instruction, __: Place, minibatch: int) -> None:
        total, most = self.norms.wait(minibatch), self._clips_to or self._max_norm
        if most is not None:
            clip(self._gradients(minibatch).values(), total, most)


class Place:
    """Slots, channel and form of one instruction's message, the same for each minibatch; of what is
    computed, the slots of what came in and of what goes out, by edge."""

    def __init__(self, worker: Worker, ins: Instruction) -> None:
        kind, phase = ins.action.kind, ins.action.phase
        wiring, slots = worker.compute.wiring, worker.slots
        if kind is Kind.VALUE and wiring is not None:
            kind = wiring.kind
        tied = kind in (Kind.TIED, Kind.WEIGHT)
        self.kind, self.sized = kind, kind in (Kind.VALUE, Kind.EVAL_VALUE, Kind.GRADIENT)
        if phase is Phase.COMPUTE and wiring is not None:
            microbatch = ins.microbatch
            back = wiring.chained.union(wiring.fan_out).intersection(wiring.differentiable)
            comes = wiring.ports.keys() - wiring.fan_out if ins.action is Action.FORWARD else back
            self.came = [(edge, slots[Phase.WAIT_RECV, kind, edge, microbatch]) for edge in comes]
            self.left = {edge: slots[Phase.SEND, kind, edge, microbatch] for edge in wiring.ports}
        if ins.peer < 0:
            return
        which = ins.peer if kind is Kind.TIED else ins.microbatch
        self.coming = slots[Phase.WAIT_RECV, kind, ins.edge, which]  # a handle, and then the tensor
        self.leaving = slots[Phase.SEND, kind, ins.edge, which]  # the tensor, once a receiver
        self.sent = slots[Phase.WAIT_SEND, kind, ins.edge, ins.microbatch, ins.peer, ins.target]
        self.fqn = worker.tied[ins.edge].fqn if tied else ""
        self.near: Slot | None = None  # of the receiver, in this process
        if (stages := worker.near.get(ins.peer)) is not None:
            receiver = stages.get(ins.target) or next(iter(stages.values()))
            which = worker.rank if kind is Kind.TIED else ins.microbatch
            self.near = receiver.slots[Phase.WAIT_RECV, kind, ins.edge, which]
        elif phase is Phase.HEAR:
            self.receive = worker.far.incoming(Channel(kind, 0, ins.peer)).receive
        elif phase is Phase.TELL and worker.transport is not None:
            self.send = worker.transport.outgoing(Channel(kind, 0, ins.peer)).send
        elif phase is Phase.POST_RECV:
            target = worker.stage if len(worker.held) > 1 and ins.stage >= 0 else -1
            self.receive = worker.far.incoming(Channel(kind, ins.edge, ins.peer, target)).receive
            if tied:
                one = worker.weights.parameter(0, self.fqn)
                form = Expected(tuple(one.shape), one.dtype, 0)
                self.expected: Callable[[int], Expected] = lambda _: form
            elif self.sized and wiring is not None:
                self.expected = cache(partial(expected, wiring.ports[ins.edge]))
            else:
                self.expected = lambda _: worker.box[ins.edge, ins.microbatch]
        elif phase is Phase.SEND:
            channel = Channel(kind, ins.edge, ins.peer, ins.target)
            self.send = worker.far.outgoing(channel).send


_Run = Callable[[Worker, Instruction, Place, int], None]
_OF_PHASE: dict[Phase, _Run] = {
    Phase.POST_RECV: Worker._post,
    Phase.WAIT_RECV: Worker._wait,
    Phase.SEND: Worker._send,
    Phase.WAIT_SEND: Worker._wait_send,
}
_OF_ACTION: dict[Action, _Run] = {
    Action.FORWARD: Worker._forward,
    Action.BACKWARD: Worker._backward,
    Action.BACKWARD_INPUT: Worker._backward,
    Action.BACKWARD_WEIGHT: Worker._backward_weight,
    Action.FREE: lambda *_: None,  # what came in goes with the last that refers to it
    Action.STEP: Worker._step,
    Action.POST_NORMS: Worker._post_norms,
    Action.WAIT_NORMS: Worker._wait_norms,
    **dict.fromkeys(OF_REPLICAS, Worker._of_replicas),
    Action.LOSS: lambda one, _, __, minibatch: one.losses.sum(minibatch),
    Action.TELL_LOSS: lambda one, ins, at, minibatch: one.losses.tell(minibatch, ins.peer, at),
    Action.HEAR_LOSS: lambda one, ins, at, minibatch: one.losses.hear(minibatch, ins.peer, at),
}


def _apart(worker: Worker, value: Tensor) -> Tensor:
    """A result of a stage, copied where it is a view of the stage's own tensors."""
    if worker.weights_at is None:
        worker.weights_at = worker.weights.memories(parameters=True)
    value, memory = value.detach(), memory_of(value)
    own = memory in worker.weights_at or memory in worker.weights.memories(parameters=False)
    return value.clone() if own else value


def run_together(
    workers: list[Worker],
    columns: list[tuple[Instruction, ...]],
    log: InstructionLog | None = None,
) -> None:
    """Run all ranks in one thread, each instruction's result used next where the program lets it.

    The rank behind goes on after each instruction, else the one before: what was just written is
    read while it is in the processor's cache, and little waits.  `workers[n]` is one of the stages
    of rank n.  They come to the end, as is proved of programs.
    """
    position = [0] * len(workers)
    n = waiting = 0  # `waiting` ranks, n + 1 and up and around, cannot go on
    while waiting < len(workers):
        if position[n] < len(columns[n]):
            ins = columns[n][position[n]]
            if (stage := workers[n].held.get(ins.stage, workers[n])).ready(ins):
                if log is not None:
                    log.begin(ins, stage.base)
                began = perf_counter()
                stage.execute(ins)
                if stage.recording is not None:
                    stage.recording.add(stage.rank, ins, stage.base, began)
                position[n] += 1
                n, waiting = min(n + 1, len(workers) - 1), 0
                continue
        n, waiting = (n - 1) % len(workers), waiting + 1
    assert position == [*map(len, columns)], f"no rank can go on at {position}"
