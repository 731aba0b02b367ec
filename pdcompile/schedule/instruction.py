"""Instruction: one thing that a rank does, and its form as text."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, StrEnum, auto
from typing import NamedTuple


class Phase(IntEnum):
    """Role of an instruction for its kind; only the waits may block."""

    COMPUTE = auto()
    POST_RECV = auto()
    WAIT_RECV = auto()
    SEND = auto()
    WAIT_SEND = auto()
    POST = auto()  # this rank's part of a collective
    WAIT = auto()
    LOCAL = auto()  # neither computes nor communicates
    TELL = auto()  # send, and do not wait: a later call does
    HEAR = auto()  # post the receive: whoever reads what comes waits for it


class Kind(IntEnum):
    """Thing that is computed, or carried by a channel.  The numbers tag messages."""

    VALUE = 0
    GRADIENT = 1
    TIED = 2
    WEIGHT = 3
    NORMS = 4
    LOSS = 5
    EVAL_VALUE = 6
    OUTPUT = 7
    STATE = 8  # the whole model's, which goes to the first process: needs none either
    CALL = 9  # which call this is: needs no header, it is one
    REDUCE = 10
    BUFFERS = 11
    GATHER = 12


class Action(StrEnum):
    """The instruction set: a phase and a kind.  Post never blocks, wait may.

    Compute: FORWARD, BACKWARD (one microbatch on one stage), STEP (optimizer update of one
    minibatch on one stage).  A BACKWARD may be split: BACKWARD_INPUT makes the gradients that
    earlier stages wait for, BACKWARD_WEIGHT those of the parameters, any time later.
    Values (per edge of the plan, microbatch, peer rank): POST_RECV/WAIT_RECV of an activation,
    SEND (posts; the sender keeps the tensor until WAIT_SEND), the same for gradients
    (*_GRADIENT), with the chained sum in them.
    FREE ends the life of a microbatch's receive slots on a stage (activation and gradient
    slots after its backward; in a forward-only program after its forward).  BACKWARD_INPUT frees
    the gradient slots itself: what it still needs of them is kept with the activations.
    Tied parameters (edge field: index into plan.tied): SEND_TIED / POST_RECV_TIED /
    WAIT_RECV_TIED carry the sum of a minibatch's gradients from holder to holder towards the
    owner, each adding its own; SEND_WEIGHT / POST_RECV_WEIGHT / WAIT_RECV_WEIGHT carry the updated
    parameter of a minibatch from the owner to one other stage.
    Collectives: POST_NORMS / WAIT_NORMS (all ranks of the plan exchange their vectors of
    per-parameter gradient norms of one minibatch), POST_REDUCE / WAIT_REDUCE (gradients of one
    minibatch over the replicas of the stage; what the last backward before it completes may be
    on its way already, and all is after it), POST_GATHER / WAIT_GATHER (where updates are made at
    homes: the new weights of an update, from their homes to all replicas), POST_BUFFERS /
    WAIT_BUFFERS (between calls: the buffers that training writes, over the replicas of the stage,
    which compare weights as well).
    LOSS sums what the microbatches of a minibatch lost on a rank of the last stage; TELL_LOSS
    sends it to one other rank, HEAR_LOSS posts the receive, which the user waits for lazily.
    Replicas of the last stage send one part each; the loss is the sum.
    Broadcasts between calls, from the rank that has something to one that needs it: *_OUTPUT (an
    output of the last stage; edge field: its number).
    """

    phase: Phase
    kind: Kind

    FORWARD = "F", Phase.COMPUTE, Kind.VALUE
    BACKWARD = "B", Phase.COMPUTE, Kind.GRADIENT
    BACKWARD_INPUT = "I", Phase.COMPUTE, Kind.GRADIENT
    BACKWARD_WEIGHT = "W", Phase.COMPUTE, Kind.GRADIENT
    STEP = "STEP", Phase.COMPUTE, Kind.WEIGHT
    POST_RECV = "POST_RECV", Phase.POST_RECV, Kind.VALUE
    WAIT_RECV = "WAIT_RECV", Phase.WAIT_RECV, Kind.VALUE
    SEND = "SEND", Phase.SEND, Kind.VALUE
    WAIT_SEND = "WAIT_SEND", Phase.WAIT_SEND, Kind.VALUE
    POST_RECV_GRADIENT = "POST_RECV_GRADIENT", Phase.POST_RECV, Kind.GRADIENT
    WAIT_RECV_GRADIENT = "WAIT_RECV_GRADIENT", Phase.WAIT_RECV, Kind.GRADIENT
    SEND_GRADIENT = "SEND_GRADIENT", Phase.SEND, Kind.GRADIENT
    WAIT_SEND_GRADIENT = "WAIT_SEND_GRADIENT", Phase.WAIT_SEND, Kind.GRADIENT
    FREE = "FREE", Phase.LOCAL, Kind.VALUE
    SEND_TIED = "SEND_TIED", Phase.SEND, Kind.TIED
    WAIT_SEND_TIED = "WAIT_SEND_TIED", Phase.WAIT_SEND, Kind.TIED
    POST_RECV_TIED = "POST_RECV_TIED", Phase.POST_RECV, Kind.TIED
    WAIT_RECV_TIED = "WAIT_RECV_TIED", Phase.WAIT_RECV, Kind.TIED
    SEND_WEIGHT = "SEND_WEIGHT", Phase.SEND, Kind.WEIGHT
    WAIT_SEND_WEIGHT = "WAIT_SEND_WEIGHT", Phase.WAIT_SEND, Kind.WEIGHT
    POST_RECV_WEIGHT = "POST_RECV_WEIGHT", Phase.POST_RECV, Kind.WEIGHT
    WAIT_RECV_WEIGHT = "WAIT_RECV_WEIGHT", Phase.WAIT_RECV, Kind.WEIGHT
    POST_NORMS = "POST_NORMS", Phase.POST, Kind.NORMS
    WAIT_NORMS = "WAIT_NORMS", Phase.WAIT, Kind.NORMS
    POST_REDUCE = "POST_REDUCE", Phase.POST, Kind.REDUCE
    WAIT_REDUCE = "WAIT_REDUCE", Phase.WAIT, Kind.REDUCE
    POST_GATHER = "POST_GATHER", Phase.POST, Kind.GATHER
    WAIT_GATHER = "WAIT_GATHER", Phase.WAIT, Kind.GATHER
    POST_BUFFERS = "POST_BUFFERS", Phase.POST, Kind.BUFFERS
    WAIT_BUFFERS = "WAIT_BUFFERS", Phase.WAIT, Kind.BUFFERS
    LOSS = "LOSS", Phase.LOCAL, Kind.LOSS
    TELL_LOSS = "TELL_LOSS", Phase.TELL, Kind.LOSS
    HEAR_LOSS = "HEAR_LOSS", Phase.HEAR, Kind.LOSS
    SEND_OUTPUT = "SEND_OUTPUT", Phase.SEND, Kind.OUTPUT
    WAIT_SEND_OUTPUT = "WAIT_SEND_OUTPUT", Phase.WAIT_SEND, Kind.OUTPUT
    POST_RECV_OUTPUT = "POST_RECV_OUTPUT", Phase.POST_RECV, Kind.OUTPUT
    WAIT_RECV_OUTPUT = "WAIT_RECV_OUTPUT", Phase.WAIT_RECV, Kind.OUTPUT

    def __new__(cls, text: str, phase: Phase, kind: Kind) -> Action:
        made = str.__new__(cls, text)
        made._value_, made.phase, made.kind = text, phase, kind
        return made

    __hash__ = str.__hash__  # Enum's own is written in Python and slows every lookup


#: the actions of a backward that is not split, and of one that is
BACKWARDS = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)
#: those that give earlier stages their gradients
TO_INPUTS = frozenset((Action.BACKWARD, Action.BACKWARD_INPUT))
#: those that end a microbatch's backward on a stage
TO_WEIGHTS = frozenset((Action.BACKWARD, Action.BACKWARD_WEIGHT))
#: collectives of the replicas of a stage
REPLICATED = (Kind.REDUCE, Kind.BUFFERS, Kind.GATHER)
#: what stages send each other: the edge field counts edges or tied parameters of the plan
TRANSFERS = (Kind.VALUE, Kind.GRADIENT, Kind.TIED, Kind.WEIGHT)
#: what devices send each other: values, gradients, sums, weights.  The rest is control: which call
#: this is, what was lost, and what is brought together between calls
DATA = frozenset((*TRANSFERS, Kind.EVAL_VALUE, Kind.NORMS, *REPLICATED))
#: what the edge field counts, as a letter: edges, tied parameters, outputs
LETTERS = {Kind.TIED: "t", Kind.WEIGHT: "t", Kind.OUTPUT: "o"}
#: the four phases of a transfer: of which action, by what is transferred
POST_RECV, WAIT_RECV, SEND, WAIT_SEND = (
    {action.kind: action for action in Action if action.phase is phase}
    for phase in (Phase.POST_RECV, Phase.WAIT_RECV, Phase.SEND, Phase.WAIT_SEND)
)
#: what waits for that which a phase begins: of which action, by what is transferred
ENDS = {
    Phase.SEND: WAIT_SEND,
    Phase.POST_RECV: WAIT_RECV,
    Phase.POST: {action.kind: action for action in Action if action.phase is Phase.WAIT},
}


def most_held(tasks: Iterable[tuple[int, Action]], num_stages: int) -> tuple[int, ...]:
    """The most microbatches between forward and backward of each stage, by stage and action."""
    now, most = [0] * num_stages, [0] * num_stages
    for stage, action in tasks:
        now[stage] += (action is Action.FORWARD) - (action in TO_WEIGHTS)
        most[stage] = max(most[stage], now[stage])
    return tuple(most)


class Instruction(NamedTuple):  # a dataclass takes four times as long to make
    """One instruction of one rank.

    `minibatch` is relative to the call (0: this call's, −1: the one before, …), so that the
    steady-state program is one object however long the training runs.  In a flush program −1
    is the last minibatch that was started.  `microbatch` is an index inside its minibatch, −1
    where the action is about a whole minibatch.
    `stage` is −1 where it is about the whole rank.
    `edge` indexes plan.edges (values) or plan.tied (tied and weight actions), −1 elsewhere.
    `peer` is the rank at the other end of a send or receive, −1 elsewhere.
    `lag`: forward and backward of minibatch t run on weights W_max(t − lag, 0); a forward-only
    program runs on the newest weights.  Where one update takes several minibatches
    (`PipelineSpec.group`), lag and weights count updates, and the last minibatch names the update.
    `target` is the stage that receives, where the peer of a send holds several; −1 elsewhere.
    A send to the own rank hands a value to another stage of it: it costs nothing, and neither
    its receive is posted nor its end waited for.
    """

    action: Action
    stage: int
    minibatch: int = 0
    microbatch: int = -1
    edge: int = -1
    peer: int = -1
    lag: int = 0
    target: int = -1

    def text(self, home: int | None = None) -> str:
        """The cell of a table: ``SEND -1:3 e0 >1``; the stage only where it is not `home`."""
        words = [self.action.value]
        where = str(self.microbatch) if self.microbatch >= 0 else ""
        if self.minibatch:
            where = f"{self.minibatch}:{where}"
        if where:
            words.append(where)
        if self.edge >= 0:
            words.append(f"{LETTERS.get(self.action.kind, 'e')}{self.edge}")
        if self.peer >= 0:
            sends = self.action.phase in (Phase.SEND, Phase.WAIT_SEND, Phase.TELL)
            target = f"/{self.target}" if self.target >= 0 else ""
            words.append(f"{'>' if sends else '<'}{self.peer}{target}")
        if self.lag:
            words.append(f"W-{self.lag}")
        if self.stage != home:
            words.append(f"s{self.stage}")
        return " ".join(words)

    def __str__(self) -> str:
        return self.text()
