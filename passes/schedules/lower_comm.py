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
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from pdcompile.plan import Edge
from pdcompile.schedule import Action, Instruction, Kind, Schedule
from pdcompile.schedule.instruction import POST_RECV, SEND, WAIT_RECV, WAIT_SEND
from pdcompile.schedule.registry import GRADIENT_SLOTS, Task
from pdcompile.schedule.spec import FORWARD_ONLY_SLOTS, Hop, PipelineSpec, hops, with_edges


class StageState(NamedTuple):
    """What a call leaves for the next one of a stage; minibatches are relative to the next."""

    pending: tuple[tuple[int, int], ...] = ()  # went forward, not yet backward
    unstepped: tuple[int, ...] = ()
    unreduced: tuple[int, ...] = ()  # minibatches whose collective is not posted
    unsent: tuple[Instruction, ...] = ()  # sends not yet waited for
    unreceived: tuple[tuple[int, int], ...] = ()  # (tied, minibatch): weights not waited for


class Column:
    """One rank's program, written instruction by instruction."""

    def __init__(self, spec: PipelineSpec, rank: int, states: Mapping[int, StageState]):
        self.spec, self.rank = spec, rank
        self.out: list[Instruction] = []
        self.sends: dict[tuple[Kind, int, int, int], deque[Instruction]] = {}
        self.lanes = {stage: Lane(self, stage, state) for stage, state in states.items()}
        self.awaited = -3  # the newest minibatch whose norms are known

    def begin(self, num_microbatches: int) -> None:
        """Start a call that trains: it has one minibatch more."""
        last = max(self.lanes)
        self.out += loss_receives(self.spec, last, self.rank, num_microbatches)
        for stage, lane in self.lanes.items():
            lane.unstepped.append(0)
            lane.unreduced.append(0)
            replica = self.spec.ranks[stage].index(self.rank)
            lane.begin(self.spec.share(stage, replica, num_microbatches), self.spec.pool(stage))

    def train(self, tasks: Iterable[Task]) -> None:
        """Write the compute order with its communication."""
        listed = list(tasks)
        last = {(s, t): n for n, (s, a, t, _) in enumerate(listed) if a is Action.BACKWARD}
        last_forward = {
            s: n for n, (s, action, _, _) in enumerate(listed) if action is Action.FORWARD
        }
        left_over = self._left_over(listed)
        for n, (stage, action, minibatch, microbatch) in enumerate(listed):
            lane = self.lanes[stage]
            if action is Action.FORWARD:
                lane.forward_to_train(minibatch, microbatch)
                if n == last_forward[stage]:
                    lane.send_loss()
            elif action is Action.BACKWARD:
                key = (stage, minibatch)
                lane.backward(minibatch, microbatch, last[key] == n and key not in left_over)
            else:
                lane.step(minibatch)

    def _left_over(self, listed: list[Task]) -> set[tuple[int, int]]:
        """(stage, minibatch) that still have a backward to come after this call."""
        todo = [(stage, t, i) for stage, lane in self.lanes.items() for t, i in lane.waiting]
        todo += [(s, t, i) for s, action, t, i in listed if action is Action.FORWARD]
        done = {(s, t, i) for s, action, t, i in listed if action is Action.BACKWARD}
        return {one[:2] for one in todo if one not in done}

    def forward_only(self, num_microbatches: int, loss: bool) -> None:
        """Each microbatch through all stages of the rank before the next one."""
        shares = {}
        for stage, lane in self.lanes.items():
            replica = self.spec.ranks[stage].index(self.rank)
            shares[stage] = self.spec.share(stage, replica, num_microbatches)
            lane.begin(shares[stage], FORWARD_ONLY_SLOTS)
        for microbatch in range(num_microbatches):
            for stage, lane in self.lanes.items():
                if microbatch in shares[stage]:
                    lane.forward(0, microbatch, 0)
                    lane.put(Action.FREE, 0, microbatch)
                    lane.post_value()
        for stage, lane in self.lanes.items():
            if loss and shares[stage]:
                lane.send_loss()

    def channel(self, send: Instruction) -> deque[Instruction]:
        """Its sends that are under way."""
        key = (send.action.kind, send.edge, send.peer, send.target)
        found = self.sends.get(key)
        if found is None:
            found = self.sends[key] = deque()
        return found

    def wait_send(self, sent: Instruction) -> None:
        where = (sent.stage, sent.minibatch, sent.microbatch, sent.edge, sent.peer, 0, sent.target)
        self.out.append(Instruction(WAIT_SEND[sent.action.kind], *where))

    def finish(self) -> None:
        """End a program after which nothing is in flight."""
        for lane in self.lanes.values():
            lane.receive_weights(before=1)
        for channel in self.sends.values():
            while channel:
                self.wait_send(channel.popleft())


class Lane:
    """One stage's part of its rank's program."""

    def __init__(self, column: Column, stage: int, state: StageState):
        self.column, self.stage = column, stage
        self.spec = column.spec
        self.hops = hops(self.spec, stage)
        self.lag = self.spec.kind.lag
        self.replicated = len(self.spec.ranks[stage]) > 1
        self.waiting = deque(state.pending)
        self.unstepped = deque(state.unstepped)
        self.unreduced = deque(state.unreduced)
        self.unreceived = deque(state.unreceived)
        for send in state.unsent:
            column.channel(send).append(send)
        self.to_post: deque[int] = deque()

    # -- writing ---------------------------------------------------------------------------

    def put(self, action: Action, minibatch: int = 0, microbatch: int = -1) -> None:
        self.column.out.append(Instruction(action, self.stage, minibatch, microbatch))

    def post(self, hop: Hop, minibatch: int, microbatch: int) -> None:
        if not hop.local:
            self._receive(POST_RECV[hop.kind], hop, minibatch, microbatch)

    def wait(self, hop: Hop, minibatch: int, microbatch: int) -> None:
        self._receive(WAIT_RECV[hop.kind], hop, minibatch, microbatch)

    def _receive(self, action: Action, hop: Hop, minibatch: int, microbatch: int) -> None:
        peer = self.spec.rank(hop.stage, max(microbatch, 0))
        self.column.out.append(
            Instruction(action, self.stage, minibatch, microbatch, hop.edge, peer)
        )

    def send(self, hop: Hop, minibatch: int, microbatch: int) -> None:
        peer = self.spec.rank(hop.stage, max(microbatch, 0))
        action, target = SEND[hop.kind], hop.stage if hop.ambiguous else -1
        sent = Instruction(action, self.stage, minibatch, microbatch, hop.edge, peer, 0, target)
        if not hop.local:
            channel = self.column.channel(sent)
            while len(channel) >= hop.window:
                self.column.wait_send(channel.popleft())
            channel.append(sent)
        self.column.out.append(sent)

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
                self.post(hop, 0, microbatch)

    def post_gradients(self, place: int) -> None:
        """Post the receives for the microbatch at `place` of those waiting for backward."""
        if place < len(self.waiting):
            for hop in self.hops.before_backward:
                self.post(hop, *self.waiting[place])

    def forward(self, minibatch: int, microbatch: int, lag: int) -> None:
        for hop in self.hops.before_forward:
            self.wait(hop, minibatch, microbatch)
        self.column.out.append(
            Instruction(Action.FORWARD, self.stage, minibatch, microbatch, -1, -1, lag)
        )
        for hop in self.hops.after_forward:
            self.send(hop, minibatch, microbatch)

    def forward_to_train(self, minibatch: int, microbatch: int) -> None:
        self.receive_weights(before=minibatch - 1)
        self.forward(minibatch, microbatch, self.lag)
        self.waiting.append((minibatch, microbatch))
        if len(self.waiting) <= GRADIENT_SLOTS:
            self.post_gradients(len(self.waiting) - 1)

    def backward(self, minibatch: int, microbatch: int, is_last: bool) -> None:
        for hop in self.hops.before_backward:
            self.wait(hop, minibatch, microbatch)
        self.waiting.popleft()
        self.column.out.append(
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
        self.receive_weights(before=minibatch)
        self._post_collective(minibatch)
        if self.replicated:
            self.put(Action.WAIT_REDUCE, minibatch)
            if self.spec.clipping:
                self.put(Action.POST_NORMS, minibatch)
        if self.spec.clipping and self.column.awaited < minibatch:
            self.put(Action.WAIT_NORMS, minibatch)
            self.column.awaited = minibatch
        for hop in self.hops.after_step:  # the last weights sent must be out before new ones
            for channel in self._channels(hop):
                while channel:
                    self.column.wait_send(channel.popleft())
        self.put(Action.STEP, minibatch)
        self.unstepped.remove(minibatch)
        for hop in self.hops.after_step:
            self.send(hop, minibatch, -1)
        for hop in self.hops.weights:
            self.post(hop, minibatch, -1)
            self.unreceived.append((hop.edge, minibatch))

    def _channels(self, hop: Hop) -> list[deque[Instruction]]:
        key = (hop.kind, hop.edge, self.spec.rank(hop.stage, 0))
        target = hop.stage if hop.ambiguous else -1
        return [self.column.sends[*key, target]] if (*key, target) in self.column.sends else []

    def _post_collective(self, last: int) -> None:
        """In order of minibatches, also where a replica has no microbatch of one.

        A rank of several stages posts their norms together, after the last of them.
        """
        while self.unreduced and self.unreduced[0] <= last:
            minibatch = self.unreduced.popleft()
            if self.replicated:
                self.put(Action.POST_REDUCE, minibatch)
            elif self.spec.clipping and not any(
                minibatch in lane.unreduced for lane in self.column.lanes.values()
            ):
                self.put(Action.POST_NORMS, minibatch)

    def receive_weights(self, before: int) -> None:
        while self.unreceived and self.unreceived[0][1] < before:
            edge, minibatch = self.unreceived.popleft()
            hop = next(hop for hop in self.hops.weights if hop.edge == edge)
            self.wait(hop, minibatch, -1)

    def send_loss(self) -> None:
        if self.stage == len(self.spec.ranks) - 1:
            self.put(Action.LOSS)

    def state(self, shift: int) -> StageState:
        """What is left, seen from the next call (`shift` 1 after a step)."""
        return StageState(
            tuple((t - shift, i) for t, i in self.waiting),
            tuple(t - shift for t in self.unstepped),
            tuple(t - shift for t in self.unreduced),
            tuple(
                replace(one, minibatch=one.minibatch - shift)
                for channel in self.column.sends.values()
                for one in channel
                if one.stage == self.stage
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
    for rank, stages in spec.holders:
        column = Column(spec, rank, dict.fromkeys(stages, StageState()))
        if with_loss:
            column.out += loss_receives(spec, stages[-1], rank, num_microbatches)
        column.forward_only(num_microbatches, with_loss)
        column.finish()
        columns.append(column)
    return project(spec, f"{spec.name}+eval", columns, num_microbatches if with_loss else 0)


def lower_refresh(spec: PipelineSpec) -> Schedule:
    """Owners send their tied parameters to the other holders, outside any update."""
    columns = []
    for rank, stages in spec.holders:
        column = Column(spec, rank, dict.fromkeys(stages, StageState()))
        for lane in column.lanes.values():
            for hop in lane.hops.weights:
                lane.post(hop, 0, -1)
        for lane in column.lanes.values():
            for hop in lane.hops.after_step:
                lane.send(hop, 0, -1)
        for lane in column.lanes.values():
            for hop in lane.hops.weights:
                lane.wait(hop, 0, -1)
        column.finish()
        columns.append(column)
    return project(spec, f"{spec.name}+refresh", columns, 0)
