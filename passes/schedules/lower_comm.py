"""Add communication to the compute order of every rank.

Both ends of a transfer are derived from the same edge (`spec.hops`), receives are posted as
early as the slot pool allows, sends are waited for as late as their window allows:

    POST_RECV   when a slot is free: `pool` slots are in flight plus the next one travelling
    WAIT_RECV   just before the forward or backward that needs the value
    SEND        right after the forward or backward that made it
    WAIT_SEND   before the send that comes `window` later on the same channel; in a stream this
                may be in a later call
    FREE        after the microbatch's backward (forward-only programs: after its forward)

Deadlock-free under rendezvous sends, because nothing but WAIT blocks and each WAIT needs only
what an earlier microbatch (or a later stage) does; `passes.check` proves it for each program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from pdcompile.plan import Edge
from pdcompile.schedule import Action, Instruction, Kind, Schedule
from pdcompile.schedule.instruction import POST_RECV, SEND, WAIT_RECV, WAIT_SEND
from pdcompile.schedule.registry import GRADIENT_SLOTS, Task
from pdcompile.schedule.spec import FORWARD_ONLY_SLOTS, Hop, PipelineSpec, hops, with_edges


class RankState(NamedTuple):
    """What a call leaves for the next one on a rank; minibatches are relative to the next."""

    pending: tuple[tuple[int, int], ...] = ()  # went forward, not yet backward
    unstepped: tuple[int, ...] = ()
    unreduced: tuple[int, ...] = ()  # minibatches whose collective is not posted
    unsent: tuple[Instruction, ...] = ()  # sends not yet waited for
    unreceived: tuple[tuple[int, int], ...] = ()  # (tied, minibatch): weights not waited for


class Column:
    """One rank's program, written instruction by instruction."""

    def __init__(self, spec: PipelineSpec, stage: int, replica: int, state: RankState):
        self.spec = spec
        self.stage = stage
        self.rank = spec.ranks[stage][replica]
        self.hops = hops(spec, stage)
        self.lag = spec.kind.lag
        self.out: list[Instruction] = []
        self.waiting = deque(state.pending)
        self.unstepped = deque(state.unstepped)
        self.unreduced = deque(state.unreduced)
        self.unreceived = deque(state.unreceived)
        self.sends: dict[tuple[Kind, int, int], deque[Instruction]] = {}
        for send in state.unsent:
            self._channel(send.action.kind, send.edge, send.peer).append(send)
        self.to_post: deque[int] = deque()

    # -- writing ---------------------------------------------------------------------------

    def put(self, action: Action, minibatch: int = 0, microbatch: int = -1) -> None:
        self.out.append(Instruction(action, self.stage, minibatch, microbatch))

    def receive(self, action: Action, hop: Hop, minibatch: int, microbatch: int) -> None:
        peer = self.spec.rank(hop.stage, max(microbatch, 0))
        self.out.append(Instruction(action, self.stage, minibatch, microbatch, hop.edge, peer))

    def send(self, hop: Hop, minibatch: int, microbatch: int) -> None:
        peer = self.spec.rank(hop.stage, max(microbatch, 0))
        channel = self._channel(hop.kind, hop.edge, peer)
        while len(channel) >= hop.window:
            self._wait_send(channel.popleft())
        sent = Instruction(SEND[hop.kind], self.stage, minibatch, microbatch, hop.edge, peer)
        channel.append(sent)
        self.out.append(sent)

    def wait_sends(self) -> None:
        for channel in self.sends.values():
            while channel:
                self._wait_send(channel.popleft())

    def _channel(self, kind: Kind, edge: int, peer: int) -> deque[Instruction]:
        return self.sends.setdefault((kind, edge, peer), deque())

    def _wait_send(self, sent: Instruction) -> None:
        self.out.append(
            Instruction(
                WAIT_SEND[sent.action.kind],
                sent.stage,
                sent.minibatch,
                sent.microbatch,
                sent.edge,
                sent.peer,
            )
        )

    # -- compute ---------------------------------------------------------------------------

    def begin(self, microbatches: Iterable[int], pool: int) -> None:
        """Start a call: post the receives for which there are slots."""
        self.to_post = deque(microbatches)
        for _ in range(pool - len(self.waiting)):
            self.post_value()

    def post_value(self) -> None:
        if self.to_post:
            microbatch = self.to_post.popleft()
            for hop in self.hops.before_forward:
                self.receive(POST_RECV[hop.kind], hop, 0, microbatch)

    def post_gradients(self, place: int) -> None:
        """Post the receives for the microbatch at `place` of those waiting for backward."""
        if place < len(self.waiting):
            for hop in self.hops.before_backward:
                self.receive(POST_RECV[hop.kind], hop, *self.waiting[place])

    def forward(self, minibatch: int, microbatch: int, lag: int) -> None:
        for hop in self.hops.before_forward:
            self.receive(WAIT_RECV[hop.kind], hop, minibatch, microbatch)
        self.out.append(Instruction(Action.FORWARD, self.stage, minibatch, microbatch, -1, -1, lag))
        for hop in self.hops.after_forward:
            self.send(hop, minibatch, microbatch)

    def forward_to_train(self, minibatch: int, microbatch: int) -> None:
        self._receive_weights(before=minibatch - 1)
        self.forward(minibatch, microbatch, self.lag)
        self.waiting.append((minibatch, microbatch))
        if len(self.waiting) <= GRADIENT_SLOTS:
            self.post_gradients(len(self.waiting) - 1)

    def backward(self, minibatch: int, microbatch: int, is_last: bool) -> None:
        for hop in self.hops.before_backward:
            self.receive(WAIT_RECV[hop.kind], hop, minibatch, microbatch)
        self.waiting.popleft()
        self.out.append(
            Instruction(Action.BACKWARD, self.stage, minibatch, microbatch, -1, -1, self.lag)
        )
        for hop in self.hops.after_backward:
            self.send(hop, minibatch, microbatch)
        self.put(Action.FREE, minibatch, microbatch)
        self.post_gradients(GRADIENT_SLOTS - 1)
        self.post_value()
        if is_last:
            self._post_collective(minibatch)

    # -- update ----------------------------------------------------------------------------

    def step(self, minibatch: int) -> None:
        """Collectives, update, and the new weights of tied parameters."""
        self._receive_weights(before=minibatch)
        self._post_collective(minibatch)
        if len(self.spec.ranks[self.stage]) > 1:
            self.put(Action.WAIT_REDUCE, minibatch)
            if self.spec.clipping:
                self.put(Action.POST_NORMS, minibatch)
        if self.spec.clipping:
            self.put(Action.WAIT_NORMS, minibatch)
        for hop in self.hops.after_step:  # the last weights sent must be out before new ones
            channel = self._channel(hop.kind, hop.edge, self.spec.rank(hop.stage, 0))
            while channel:
                self._wait_send(channel.popleft())
        self.put(Action.STEP, minibatch)
        self.unstepped.remove(minibatch)
        for hop in self.hops.after_step:
            self.send(hop, minibatch, -1)
        for hop in self.hops.weights:
            self.receive(POST_RECV[hop.kind], hop, minibatch, -1)
            self.unreceived.append((hop.edge, minibatch))

    def _post_collective(self, last: int) -> None:
        """In order of minibatches, also where a replica has no microbatch of one."""
        while self.unreduced and self.unreduced[0] <= last:
            minibatch = self.unreduced.popleft()
            if len(self.spec.ranks[self.stage]) > 1:
                self.put(Action.POST_REDUCE, minibatch)
            elif self.spec.clipping:
                self.put(Action.POST_NORMS, minibatch)

    def _receive_weights(self, before: int) -> None:
        while self.unreceived and self.unreceived[0][1] < before:
            edge, minibatch = self.unreceived.popleft()
            hop = next(hop for hop in self.hops.weights if hop.edge == edge)
            self.receive(WAIT_RECV[hop.kind], hop, minibatch, -1)

    # -- a call ----------------------------------------------------------------------------

    def train(self, tasks: Iterable[Task]) -> None:
        """Write the compute order with its communication."""
        listed = list(tasks)
        last = {t: n for n, (_, action, t, _) in enumerate(listed) if action is Action.BACKWARD}
        last_forward = max(
            (n for n, one in enumerate(listed) if one.action is Action.FORWARD), default=-1
        )
        left_over = self._left_over(listed)
        for n, (_, action, minibatch, microbatch) in enumerate(listed):
            if action is Action.FORWARD:
                self.forward_to_train(minibatch, microbatch)
                if n == last_forward:
                    self.send_loss()
            elif action is Action.BACKWARD:
                is_last = last[minibatch] == n and minibatch not in left_over
                self.backward(minibatch, microbatch, is_last)
            else:
                self.step(minibatch)

    def forward_only(self, microbatches: Iterable[int], loss: bool) -> None:
        self.begin(microbatches, FORWARD_ONLY_SLOTS)
        listed = list(microbatches)
        for microbatch in listed:
            self.forward(0, microbatch, 0)
            self.put(Action.FREE, 0, microbatch)
            self.post_value()
        if loss and listed:
            self.send_loss()

    def send_loss(self) -> None:
        if self.stage == len(self.spec.ranks) - 1:
            self.put(Action.LOSS)

    def receive_loss(self, num_microbatches: int) -> None:
        self.out += loss_receives(self.spec, self.stage, self.rank, num_microbatches)

    def _left_over(self, listed: list[Task]) -> set[int]:
        """Minibatches that still have a backward to come after this call."""
        todo = list(self.waiting)
        todo += [(t, i) for _, action, t, i in listed if action is Action.FORWARD]
        done = {(t, i) for _, action, t, i in listed if action is Action.BACKWARD}
        return {t for t, i in todo if (t, i) not in done}

    def finish(self) -> None:
        """End a program after which nothing is under way."""
        self._receive_weights(before=1)
        self.wait_sends()

    def state(self, shift: int) -> RankState:
        """What is left, seen from the next call (`shift` 1 after a step)."""
        return RankState(
            tuple((t - shift, i) for t, i in self.waiting),
            tuple(t - shift for t in self.unstepped),
            tuple(t - shift for t in self.unreduced),
            tuple(
                Instruction(s.action, s.stage, s.minibatch - shift, s.microbatch, s.edge, s.peer)
                for channel in self.sends.values()
                for s in channel
            ),
            tuple((edge, t - shift) for edge, t in self.unreceived),
        )


def loss_receives(
    spec: PipelineSpec, stage: int, rank: int, num_microbatches: int
) -> list[Instruction]:
    """One for each rank of the last stage that has a microbatch and is another one."""
    senders = spec.ranks[-1][:num_microbatches]
    return [Instruction(Action.LOSS, stage, peer=peer) for peer in senders if peer != rank]


def project(
    spec: PipelineSpec, name: str, columns: Iterable[Column], num_microbatches: int
) -> Schedule:
    """Put the columns at their ranks; ranks without a stage only hear the loss."""
    placed = {column.rank: tuple(column.out) for column in columns}
    return Schedule(
        name,
        tuple(
            placed[rank]
            if rank in placed
            else tuple(loss_receives(spec, -1, rank, num_microbatches))
            for rank in range(spec.num_ranks)
        ),
    )


def lower_evaluation(
    spec: PipelineSpec, edges: tuple[Edge, ...], num_microbatches: int, with_loss: bool
) -> Schedule:
    """Forward-only program: complete in itself, on the newest weights."""
    spec = with_edges(spec, edges)
    columns = []
    for stage, ranks in enumerate(spec.ranks):
        for replica in range(len(ranks)):
            column = Column(spec, stage, replica, RankState())
            if with_loss:
                column.receive_loss(num_microbatches)
            column.forward_only(spec.share(stage, replica, num_microbatches), with_loss)
            column.wait_sends()
            columns.append(column)
    return project(spec, f"{spec.name}+eval", columns, num_microbatches if with_loss else 0)
