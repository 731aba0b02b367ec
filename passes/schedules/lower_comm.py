"""Add communication to the compute order of every rank.

Both ends of a transfer are derived from the same edge (`spec.hops`), receives are posted as
early as the slot pool allows, sends are waited for as late as their window allows:

    POST_RECV   when a slot is free: `pool` slots are in flight plus the next one travelling
    WAIT_RECV   just before the forward or backward that needs the value
    SEND        right after the forward or backward that made it
    WAIT_SEND   before the send that comes `window` later on the same channel; in a stream this
                may be in a later call
    FREE        after the microbatch's backward, both parts of it where it is split
                (forward-only programs: after its forward)

The gradient of a tied parameter is summed over its stages once an update (`TiedSums`).

Deadlock-free under rendezvous sends, because nothing but WAIT blocks and each WAIT needs only
what an earlier microbatch (or a later stage) does; `passes.check` proves it for each program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from pdcompile.schedule import Action, Instruction, Kind
from pdcompile.schedule.instruction import (
    POST_RECV,
    SEND,
    TO_INPUTS,
    TO_WEIGHTS,
    WAIT_RECV,
    WAIT_SEND,
)
from pdcompile.schedule.registry import GRADIENT_SLOTS, Task
from pdcompile.schedule.spec import FORWARD_ONLY_SLOTS, Hop, PipelineSpec, hops

Upto = Literal["forward", "gradients", "update"]  # how far a program takes a minibatch


class StageState(NamedTuple):
    """Rest that a call leaves for the next one of a stage; minibatches are relative to that."""

    pending: tuple[tuple[int, int], ...] = ()  # went forward, not yet backward
    unstepped: tuple[int, ...] = ()
    unreduced: tuple[int, ...] = ()  # minibatches whose collective is not posted
    unsummed: tuple[tuple[int, int, bool], ...] = ()  # (minibatch, tied, receives are posted)
    unsent: tuple[Instruction, ...] = ()  # sends not yet waited for
    unreceived: tuple[tuple[int, int], ...] = ()  # (tied, minibatch): weights to come
    #: minibatches of which it has no microbatch, and whose collective it may post before others'
    idle: tuple[int, ...] = ()


class Column:
    """One rank's program, written instruction by instruction."""

    def __init__(
        self,
        spec: PipelineSpec,
        rank: int,
        states: Mapping[int, StageState],
        upto: Upto = "update",
        phase: int = 0,
    ):
        """`phase`: the minibatch of the call, as far as it decides whose turn it is."""
        self.spec, self.rank, self.upto, self.phase = spec, rank, upto, phase
        self.out: list[Instruction] = []
        self.sends: dict[tuple[Kind, int, int, int], deque[Instruction]] = {}
        self.lanes = {stage: StagePart(self, stage, state) for stage, state in states.items()}
        self.awaited = -spec.reach - 1  # the newest minibatch whose norms are known
        self.with_loss = False

    def begin(self, num_microbatches: int, *, with_loss: bool = True) -> None:
        """Start a call with a minibatch: post the receives for which there are slots."""
        self.with_loss = with_loss
        for stage, lane in self.lanes.items():
            lane.begin(self.share(stage, num_microbatches))

    def share(self, stage: int, num_microbatches: int) -> Sequence[int]:
        replica = self.spec.ranks[stage].index(self.rank)
        return self.spec.share(stage, replica, num_microbatches, self.phase)

    def closing(self, stage: int, minibatch: int) -> int:
        """The minibatch that names the update which takes this one, relative to the call."""
        return self.spec.closing(stage, self.phase + minibatch) - self.phase

    def write(self, tasks: Iterable[Task]) -> None:
        """Write the compute order with its communication, as far as the program goes."""
        listed = [one for one in tasks if self.upto == "update" or one.action is not Action.STEP]
        last = {
            (stage, action in TO_WEIGHTS, minibatch): n
            for n, (stage, action, minibatch, _) in enumerate(listed)
            if action is Action.FORWARD or action in TO_WEIGHTS
        }
        to_inputs = {one[::2]: n for n, one in enumerate(listed) if one.action in TO_INPUTS}
        left_over = self._left_over(listed)
        for stage, lane in self.lanes.items():
            lane.expect([one for one in listed if one.stage == stage])
        for n, (stage, action, minibatch, microbatch) in enumerate(listed):
            lane = self.lanes[stage]
            is_last = last.get((stage, action in TO_WEIGHTS, minibatch)) == n
            if action is Action.FORWARD:
                lane.forward(minibatch, microbatch, is_last)
            elif action is Action.STEP:
                for other in self.lanes.values():  # nobody waits for a replica that has nothing
                    if last.get((other.stage, True, minibatch), -1) < n:
                        other.post_collective(minibatch)
                lane.step(minibatch)
            else:
                over = (stage, minibatch) not in left_over
                lane.backward(action, minibatch, microbatch, is_last and over)
                if over and to_inputs.get((stage, minibatch)) == n:
                    lane.sums.complete(minibatch)
        for lane in self.lanes.values():  # what the caller may read is the same on all replicas
            lane.gather(before=1)
            lane.idle |= lane.nothing  # now that the weights are here with which a sum goes
            lane.post_collective(-self.spec.reach - 1)

    def _left_over(self, listed: list[Task]) -> set[tuple[int, int]]:
        """(stage, minibatch) that still have a backward to come after this call."""
        todo = [(stage, t, i) for stage, lane in self.lanes.items() for t, i in lane.waiting]
        todo += [(s, t, i) for s, action, t, i in listed if action is Action.FORWARD]
        done = {(s, t, i) for s, action, t, i in listed if action in TO_WEIGHTS}
        return {one[:2] for one in todo if one not in done}

    def channel(self, send: Instruction) -> deque[Instruction]:
        """Its sends that are in flight."""
        return self.sends.setdefault((send.action.kind, send.edge, send.peer, send.target), deque())

    def wait_send(self, sent: Instruction) -> None:
        where = (sent.stage, sent.minibatch, sent.microbatch, sent.edge, sent.peer, 0, sent.target)
        self.out.append(Instruction(WAIT_SEND[sent.action.kind], *where))

    def pass_sums(self, upto: int) -> None:
        """Take and pass on the sums of tied gradients, later stages first."""
        for lane in reversed(self.lanes.values()):
            lane.sums.pass_all(upto)

    def has_backward(self, minibatch: int) -> bool:
        return any(lane.sums.has_backward(minibatch) for lane in self.lanes.values())

    def finish(self) -> None:
        """End a program after which nothing is in flight."""
        self.pass_sums(upto=0)
        for lane in self.lanes.values():
            lane.receive_weights(before=1)
            if self.upto == "gradients" and lane.replicated:
                lane.post_collective(0)
                lane.put(Action.WAIT_REDUCE)
        for channel in self.sends.values():
            while channel:
                self.wait_send(channel.popleft())


class StagePart:
    """One stage's part of its rank's program."""

    def __init__(self, column: Column, stage: int, state: StageState):
        self.column, self.stage = column, stage
        self.spec = column.spec
        self.hops = hops(self.spec, stage, self.spec.ranks[stage].index(column.rank))
        self.lag = self.spec.lag(stage)
        self.replicated = len(self.spec.ranks[stage]) > 1
        self.reduced = -self.spec.reach - 1  # the newest minibatch whose sum is known
        self.waiting = deque(state.pending)
        self.posted = min(GRADIENT_SLOTS, len(self.waiting))  # of them, with receives of gradients
        self.to_return: deque[tuple[int, int]] = deque()  # the others, as they go backward
        self.unstepped = deque(state.unstepped)
        self.unreduced = deque(state.unreduced)
        self.unreceived = list(state.unreceived)
        self.ungathered = deque[int]()  # minibatches whose new weights are on their way from homes
        self.idle, self.nothing = set(state.idle), set[int]()
        self.sums = TiedSums(self, state.unsummed)
        for send in state.unsent:
            column.channel(send).append(send)
        self.to_post: deque[int] = deque()

    # -- writing ---------------------------------------------------------------------------

    def put(self, action: Action, minibatch: int = 0, microbatch: int = -1, lag: int = 0) -> None:
        self.column.out.append(Instruction(action, self.stage, minibatch, microbatch, -1, -1, lag))

    def post(self, hop: Hop, minibatch: int, microbatch: int) -> None:
        if not hop.local:
            self._receive(POST_RECV[hop.kind], hop, minibatch, microbatch)

    def wait(self, hop: Hop, minibatch: int, microbatch: int) -> None:
        self._receive(WAIT_RECV[hop.kind], hop, minibatch, microbatch)

    def _receive(self, action: Action, hop: Hop, minibatch: int, microbatch: int) -> None:
        peer = self.spec.peer(hop, microbatch, self.column.phase + minibatch)
        where = self.stage, minibatch, microbatch, hop.edge, peer
        self.column.out.append(Instruction(action, *where))

    def send(self, hop: Hop, minibatch: int, microbatch: int) -> None:
        sent = self._sent(hop, minibatch, microbatch)
        if not hop.local:
            self._make_room(hop, sent).append(sent)
        self.column.out.append(sent)

    def _sent(self, hop: Hop, minibatch: int, microbatch: int) -> Instruction:
        peer = self.spec.peer(hop, microbatch, self.column.phase + minibatch)
        action, target = SEND[hop.kind], hop.stage if hop.ambiguous else -1
        return Instruction(action, self.stage, minibatch, microbatch, hop.edge, peer, 0, target)

    def _make_room(self, hop: Hop, send: Instruction) -> deque[Instruction]:
        """Wait for sends of a channel until another one fits into its window."""
        channel = self.column.channel(send)
        while len(channel) >= hop.window:
            self.column.wait_send(channel.popleft())
        return channel

    # -- compute ---------------------------------------------------------------------------

    def begin(self, microbatches: Iterable[int]) -> None:
        upto, closes = self.column.upto, self.column.closing(self.stage, 0) == 0
        self.unstepped += [0] * (closes and upto == "update")
        self.unreduced += [0] * (closes and upto != "forward")
        if upto != "forward":
            self.sums.begin()
        self.to_post = deque(microbatches)
        if self.unreduced and self.spec.group(self.stage) > 1 and not self.to_post:
            # Its part was backward before the group was complete, if it is not in flight.
            first = next((t for t, _ in self.waiting), 1)
            self.post_collective(self.column.closing(self.stage, first) - 1)
        early = self.spec.gathers(self.stage) and self.spec.halfway(self.stage)
        kind = self.spec.kind  # an owner of tied weights would wait here for their sums
        alone = (kind.alone or kind.dispatched) and not self.sums.owned
        if not self.to_post and upto == "update" and (early or alone):
            self.nothing.add(0)  # others are not to wait for its own update
        pool = FORWARD_ONLY_SLOTS if upto == "forward" else self.spec.pool(self.stage)
        for _ in range(pool - len(self.waiting)):
            self.post_value()

    def post_value(self) -> None:
        if self.to_post:
            microbatch = self.to_post.popleft()
            for hop in self.hops.before_forward:
                self.post(hop, 0, microbatch)

    def expect(self, tasks: Sequence[Task]) -> None:
        """Set the order of backwards: as in these tasks, the others afterwards."""
        backwards = [(t, i) for _, action, t, i in tasks if action in TO_INPUTS]
        forwards = [(t, i) for _, action, t, i in tasks if action is Action.FORWARD]
        order = dict.fromkeys((*backwards, *self.waiting, *forwards))
        self.to_return = deque(list(order)[self.posted :])

    def post_gradients(self) -> None:
        """Post the receives for the next backwards whose forward has run."""
        while self.posted < GRADIENT_SLOTS and self.to_return:
            if self.to_return[0] not in self.waiting:
                return
            one = self.to_return.popleft()
            for hop in self.hops.before_backward:
                self.post(hop, *one)
            self.posted += 1

    def forward(self, minibatch: int, microbatch: int, is_last: bool) -> None:
        """Add a forward; where no backward is to come, the microbatch is done after it."""
        trains = self.column.upto != "forward"
        if trains:
            self.receive_weights(before=minibatch - self.lag)
        for hop in self.hops.before_forward:
            self.wait(hop, minibatch, microbatch)
        self.put(Action.FORWARD, minibatch, microbatch, self.lag if trains else 0)
        for hop in self.hops.after_forward:
            self.send(hop, minibatch, microbatch)
        if trains:
            self.waiting.append((minibatch, microbatch))
            self.post_gradients()
            if is_last and not self.spec.kind.stream:
                self.sums.post(minibatch)  # they come while this stage drains
        else:
            self.put(Action.FREE, minibatch, microbatch)
            self.post_value()
        if is_last and self.column.with_loss and self.stage == len(self.spec.ranks) - 1:
            self.put(Action.LOSS)
            for peer in self.spec.others(self.column.rank):
                self.column.out.append(Instruction(Action.TELL_LOSS, self.stage, peer=peer))

    def backward(self, action: Action, minibatch: int, microbatch: int, is_last: bool) -> None:
        """All of it, or one part of a split one: to the inputs, or to the weights."""
        passing = self.sums.passing()
        sends, ends = action in TO_INPUTS, action in TO_WEIGHTS
        for hop in self.hops.before_backward if sends else ():
            self.wait(hop, minibatch, microbatch)
        self.put(action, minibatch, microbatch, self.lag)
        for hop in self.hops.after_backward if sends else ():
            self.send(hop, minibatch, microbatch)
        if ends:
            self.put(Action.FREE, minibatch, microbatch)
        if sends:
            self.waiting.remove((minibatch, microbatch))
            self.posted -= 1
            self.post_gradients()
        if ends:
            self.post_value()
        for one in passing:
            self.sums.take(*one)
        late = self.sums.owned and (self.spec.kind.stream or self.column.has_backward(minibatch))
        if ends and is_last and not late:  # it would wait here for the sums
            self.post_collective(self.column.closing(self.stage, minibatch))

    # -- update ----------------------------------------------------------------------------

    def step(self, minibatch: int) -> None:
        """Collectives, update, and the new weights of tied parameters."""
        self.receive_weights(before=minibatch)
        self.column.pass_sums(upto=minibatch)
        # Norms are those of all stages of the rank, of gradients that replicas have summed.
        for lane in self.column.lanes.values() if self.spec.clipping else (self,):
            lane.wait_reduced(minibatch)
        if self.spec.clipping and self.column.awaited < minibatch:
            if self.replicated:
                self.put(Action.POST_NORMS, minibatch)
            self.put(Action.WAIT_NORMS, minibatch)
            self.column.awaited = minibatch
        for hop in self.hops.after_step:  # what the update overwrites must be out
            if not hop.local:
                self._make_room(hop, self._sent(hop, minibatch, -1))
        self.put(Action.STEP, minibatch)
        self.unstepped.remove(minibatch)
        if self.spec.gathers(self.stage):
            self.put(Action.POST_GATHER, minibatch)
            self.ungathered.append(minibatch)
        for hop in self.hops.after_step:
            self.gather(before=minibatch + 1)
            self.send(hop, minibatch, -1)
        for hop in () if self.spec.kind.stream else self.hops.weights:
            self.expect_weights(hop.edge, minibatch)

    def wait_reduced(self, minibatch: int) -> None:
        """Once a minibatch, its collective posted before."""
        self.post_collective(minibatch)
        if self.replicated and self.reduced < minibatch:
            self.put(Action.WAIT_REDUCE, minibatch)
            self.reduced = minibatch

    def post_collective(self, last: int) -> None:
        """Post in order of minibatches, also where a replica has no microbatch of one.

        A rank of several stages posts their norms together, after the last of them.
        """
        while self.unreduced and (self.unreduced[0] <= last or self.unreduced[0] in self.idle):
            minibatch = self.unreduced.popleft()
            if self.sums.owned and (self.replicated or self.spec.clipping):
                self.column.pass_sums(upto=minibatch)
            if self.replicated:
                self.put(Action.POST_REDUCE, minibatch)
            elif (
                self.spec.clipping
                and self.column.upto == "update"
                and not any(minibatch in lane.unreduced for lane in self.column.lanes.values())
            ):
                self.put(Action.POST_NORMS, minibatch)

    def expect_weights(self, edge: int, minibatch: int) -> None:
        """Expect the owner's new weights: in a stream since the stage's part of the sum is out, for
        they take the place of a version that no backward needs."""
        for hop in self.hops.weights:
            if hop.edge == edge and self.column.upto == "update":
                if all(edge != other for other, _ in self.unreceived):
                    self.post(hop, minibatch, -1)
                self.unreceived.append((edge, minibatch))

    def receive_weights(self, before: int) -> None:
        """Wait for new weights, and post the receive of those of the next update, one at a time.

        A parameter whose sums take longer is expected later than another one's next update.
        """
        self.gather(before)
        due = sorted((t, n, edge) for n, (edge, t) in enumerate(self.unreceived) if t < before)
        for minibatch, _, edge in due:
            self.unreceived.remove((edge, minibatch))
            hop = next(hop for hop in self.hops.weights if hop.edge == edge)
            self.wait(hop, minibatch, -1)
            following = next((t for other, t in self.unreceived if other == edge), None)
            if following is not None:
                self.post(hop, following, -1)

    def gather(self, before: int) -> None:
        """Wait for the weights that other replicas have updated, of minibatches before this one."""
        while self.ungathered and self.ungathered[0] < before:
            self.put(Action.WAIT_GATHER, self.ungathered.popleft())

    def state(self, shift: int) -> StageState:
        """The rest, seen from the next call (`shift` 1 after a step)."""
        return StageState(
            tuple((t - shift, i) for t, i in self.waiting),
            tuple(t - shift for t in self.unstepped),
            tuple(t - shift for t in self.unreduced),
            self.sums.state(shift),
            tuple(
                one._replace(minibatch=one.minibatch - shift)
                for channel in self.column.sends.values()
                for one in channel
                if one.stage == self.stage
            ),
            tuple((edge, t - shift) for edge, t in self.unreceived),
            tuple(t - shift for t in sorted(self.idle.intersection(self.unreduced))),
        )


class TiedSums:
    """One stage's part in the sums of tied gradients, from the last holder to the owner.

    Once an update each holder adds its own gradient to the sum of later ones and passes it on.
    """

    def __init__(self, part: StagePart, unsummed: Iterable[tuple[int, int, bool]]):
        self.part, hops = part, part.hops
        self.open = {(t, edge): posted for t, edge, posted in unsummed}
        self.received = {hop.edge for hop in hops.sums_in}
        self.edges = sorted(self.received.union(hop.edge for hop in hops.sums_out))
        self.owned = any(self._owner(edge) == part.stage for edge in self.received)

    def begin(self) -> None:
        """A minibatch begins."""
        self.open |= {(0, edge): False for edge in self.edges}

    def complete(self, minibatch: int) -> None:
        """A minibatch's last gradients of inputs are made, and with them those of tied copies.

        The last holder sends its own now.  One between takes the sum of later ones and passes it
        on after its next backward (where its rank holds other stages now, because what these wait
        for may wait for the sum), the owner takes it before the update.
        """
        self.post(minibatch)
        for t, edge in list(self.open):
            passes = self._owner(edge) != self.part.stage and len(self.part.column.lanes) > 1
            if t <= minibatch and (passes or edge not in self.received) and self._came(t, edge):
                self.take(t, edge)

    def post(self, minibatch: int) -> None:
        """Post the receives of minibatches up to this one."""
        for (t, edge), posted in self.open.items():
            if t <= minibatch and not posted:
                self._post(t, edge)

    def _post(self, minibatch: int, edge: int) -> None:
        self.open[minibatch, edge] = True
        for hop in self.part.hops.sums_in:
            if hop.edge == edge:
                self.part.post(hop, minibatch, -1)

    def pass_all(self, upto: int) -> None:
        """Take and pass on what is not yet, of minibatches up to this one."""
        for t, edge in list(self.open):
            if t <= upto and not self.has_backward(t) and self._came(t, edge):
                self.take(t, edge)

    def passing(self) -> list[tuple[int, int]]:
        """Sums that this stage only adds to, and has all that it adds.  A replica without
        microbatches sends its part no earlier than with its update."""
        spec = self.part.spec
        return [
            (t, edge)
            for (t, edge), posted in self.open.items()
            if posted
            and self._owner(edge) != self.part.stage
            and all(len(spec.ranks[stage]) == 1 for stage in spec.tied[edge].stages)
            and not self.has_backward(t)
        ]

    def _later(self, edge: int) -> list[TiedSums]:
        """Those of the same rank, whose sums come here."""
        own, lanes = self.part.hops.sums_in, self.part.column.lanes
        return [lanes[hop.stage].sums for hop in own if hop.edge == edge and hop.local]

    def _came(self, t: int, edge: int) -> bool:
        """True unless another stage of the rank has still to add to it."""
        return all(x._came(t, edge) and not x.has_backward(t) for x in self._later(edge))

    def take(self, minibatch: int, edge: int) -> None:
        """Wait for the sum of later holders, and pass it on unless it ends here."""
        for one in self._later(edge):
            if (minibatch, edge) in one.open:  # it had nothing to add
                one.take(minibatch, edge)
        if not self.open[minibatch, edge]:
            self._post(minibatch, edge)
        del self.open[minibatch, edge]
        hops = self.part.hops
        for hop in (one for one in hops.sums_in if one.edge == edge):
            self.part.wait(hop, minibatch, -1)
        for hop in (one for one in hops.sums_out if one.edge == edge):
            self.part.send(hop, minibatch, -1)
        if self.part.spec.kind.stream:
            self.part.expect_weights(edge, minibatch)

    def state(self, shift: int) -> tuple[tuple[int, int, bool], ...]:
        """Returns open sums, seen from the next call (`shift` 1 after a step)."""
        return tuple((t - shift, edge, posted) for (t, edge), posted in self.open.items())

    def _owner(self, edge: int) -> int:
        return self.part.spec.tied[edge].stages[0]

    def has_backward(self, minibatch: int) -> bool:
        """True if a backward is still to come; among several stages its forward may be too."""
        later = self.part.to_return if len(self.part.column.lanes) > 1 else ()
        return any(t == minibatch for t, _ in (*self.part.waiting, *later))
