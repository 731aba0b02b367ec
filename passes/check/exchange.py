"""All ranks together: channels, collectives and the absence of deadlock.

A send is a rendezvous: WAIT_SEND ends only once its receive has been posted, and here even
only once the receiver has come to WAIT_RECV (a transport that first exchanges a header posts the
payload's receive there).  Whatever completes like this completes with earlier receives and with
buffered sends too: conditions only become true, never false, and channels are first in first
out, so no order of events can lead elsewhere.  For the same reason one order of walking is enough.

Each program must complete without the next one having begun: in one process it has to.

Channels are one per direction (gloo with tags), or in device order (a rank has at most `OPERATIONS`
transfers and collectives begun and not waited for: on a device they occupy it).  There a rank waits
before it begins the next one, so that two ranks which begin their transfers in unlike orders wait
for each other; a device that queues them instead waits for less.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import product

from pdcompile.passes.check.transfers import Violation
from pdcompile.passes.schedules.program_walk import Operation, ProgramWalk, Step, Visitor
from pdcompile.schedule import Action, Instruction, Kind, Phase, Schedule
from pdcompile.schedule.instruction import DATA, ENDS, POST_RECV, SEND, WAIT_RECV, WAIT_SEND
from pdcompile.schedule.spec import OPERATIONS, Broadcast, PipelineSpec

#: rank, action, item (of an exchange its stage), microbatch, peer
Told = tuple[int, Action, int, int, int]
BROADCAST = (Kind.LOSS, Kind.OUTPUT)
EXCHANGED = (Kind.NORMS, Kind.BUFFERS)  # between calls


class Exchange(Visitor):
    """The state of all channels between calls; `run` executes one program."""

    def __init__(self, spec: PipelineSpec, *, ordered: bool):
        """Nothing is in flight; `ordered`: channels are in device order."""
        self.ordered = ordered
        self.walk = ProgramWalk(spec, self, rendezvous=True)
        #: in device order, what each rank has begun as data and not waited for
        self.unfinished: dict[int, list[Operation]] = {}
        self.told: Counter[Told] = Counter()  # this program's parts in what is between calls

    def run(self, program: Schedule, base: int) -> None:
        """Execute as far as ranks come: those that come to no end are left standing (`walk`).

        Raises Violation.
        """
        self.told.clear()
        self.walk.run([(base, program)])
        if self.walk.standing:
            return
        for rank, begun in self.unfinished.items():
            for operation in begun:
                raise Violation(f"{operation.ends[rank].one} was not waited for", rank)

    def came(self, step: Step, operation: Operation) -> None:
        """Refuse ends of unlike microbatches."""
        rank, one = step.rank, step.one
        if one.peer in (-1, rank):
            return
        ends = operation.ends
        if len(ends) == 2 and ends[rank].label != ends[one.peer].label:
            sender, receiver = operation.members
            (t, i), (due, for_) = ends[sender].label, ends[receiver].label
            raise Violation(
                f"rank {receiver} would receive microbatch {i} of minibatch {t} for microbatch "
                f"{for_} of minibatch {due}",
                rank,
                step.position,
            )

    def stray(self, step: Step) -> None:
        if step.rank == step.one.peer:
            message = "takes what another stage of the rank did not make"
        elif step.one.action.phase is Phase.WAIT:
            message = "waits for what was not posted"
        else:
            sends = step.one.action.phase is Phase.WAIT_SEND
            of = "sends" if sends else "receives"
            message = f"{of} of a channel are waited for out of order"
        raise Violation(message, step.rank, step.position)

    def executed(self, step: Step, operation: Operation | None) -> float:
        rank, one = step.rank, step.one
        action, kind = one.action, one.action.kind
        if kind in BROADCAST and action.phase is not Phase.LOCAL:
            self.told[rank, action, one.edge, one.microbatch, one.peer] += 1
        elif kind is Kind.BUFFERS or (kind is Kind.NORMS and one.stage < 0):
            self.told[rank, action, one.stage, -1, -1] += 1
        if operation and self.ordered and kind in DATA and one.peer != rank:
            self._occupy(step, operation)
        return 0.0

    def _occupy(self, step: Step, operation: Operation) -> None:
        """An operation occupies the device from where it begins to where it is waited for."""
        mine = self.unfinished.setdefault(step.rank, [])
        if step.one.action.phase not in ENDS:
            mine.remove(operation)
            return
        if len(mine) >= OPERATIONS:
            raise Violation(
                f"begins while {mine[0].ends[step.rank].one} is unfinished, and occupies the "
                f"device: {OPERATIONS} at a time in device order",
                step.rank,
                step.position,
            )
        mine.append(operation)

    def expect(self, broadcasts: Sequence[Broadcast], exchanged: Kind | None) -> None:
        """Raise Violation unless the program had these broadcasts, and between calls this exchange
        of all its members, each once, and no others."""
        due: Counter[Told] = Counter()
        for kind, item, microbatch, root, receivers in broadcasts:
            told: tuple[dict[Kind, Action], ...] = (SEND, WAIT_SEND)
            heard: tuple[dict[Kind, Action], ...] = (POST_RECV, WAIT_RECV)
            if kind is Kind.LOSS:
                told, heard = ({kind: Action.TELL_LOSS},), ({kind: Action.HEAR_LOSS},)
            for peer in receivers:
                due.update((root, table[kind], item, microbatch, peer) for table in told)
                due.update((peer, table[kind], item, microbatch, root) for table in heard)
        groups = [(stage, ranks) for stage, ranks in enumerate(self.walk.spec.ranks) if ranks[1:]]
        if exchanged is Kind.NORMS:
            groups = [(-1, tuple(self.walk.stage_of))]
        for stage, members in groups if exchanged is not None else ():
            actions = (action for action in Action if action.kind is exchanged)
            due.update(product(members, actions, (stage,), (-1,), (-1,)))
        for wrong, text in (
            (due - self.told, "was forgotten"),
            (self.told - due, "is not expected, or was done before"),
        ):
            for rank, action, item, microbatch, peer in wrong:
                stage, edge = (item, -1) if action.kind in EXCHANGED else (-1, item)
                one = Instruction(action, stage, 0, microbatch, edge, peer)
                raise Violation(f"{one.text(-1)} {text}", rank)

    def state(self, base: int) -> tuple[object, ...]:
        """All that the future depends on, relative to the next call."""
        begun = sorted(self.walk.begun.items())
        return tuple(
            (
                key,
                tuple(
                    (t - base, i, one.over, one.awaited)
                    for one in queue
                    for t, i in (one.ends[key[0]].label,)
                ),
            )
            for key, queue in begun
            if queue
        )


def waited_for(step: Step, operation: Operation) -> tuple[int, ...]:
    """Ranks that one waits for: the other end, or those that have not come to a collective."""
    missing = tuple(rank for rank in operation.members if rank not in operation.ends)
    return missing if step.one.peer < 0 else (step.one.peer,)


def shortest_cycle(waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Ranks that wait for each other in a circle; or a chain that ends at a finished rank."""
    best: list[int] = []
    for start in sorted(waits):
        paths = deque([[start]])
        seen = {start}
        while paths:
            path = paths.popleft()
            for other in waits.get(path[-1], ()):
                if other == start and (not best or len(path) < len(best)):
                    best = path
                if other not in seen:
                    seen.add(other)
                    paths.append([*path, other])
    if best:
        return best
    chain = [min(waits)]
    while chain[-1] in waits:
        chain.append(waits[chain[-1]][0])
    return chain
