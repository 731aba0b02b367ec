"""Instruction: one thing that a rank does, and its form as text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """The instruction set.  Post never blocks, wait may.

    Compute: FORWARD, BACKWARD (one microbatch on one stage), STEP (optimizer update of one
    minibatch on one stage).
    Values (per edge of the plan, microbatch, peer rank): POST_RECV/WAIT_RECV of an activation,
    SEND (posts; the sender keeps the tensor until WAIT_SEND), the same for gradients
    (*_GRADIENT), with the chained sum in them.
    FREE ends the life of a microbatch's receive slots on a stage (activation and gradient
    slots after its backward; in a forward-only program after its forward).
    Tied parameters (edge field: index into plan.tied): SEND_TIED / POST_RECV_TIED /
    WAIT_RECV_TIED carry the per-microbatch gradient chain (m-th microbatch) towards the
    owner; SEND_WEIGHT / POST_RECV_WEIGHT / WAIT_RECV_WEIGHT carry the updated parameter of a
    minibatch from the owner to one other stage.
    Collectives: POST_NORMS / WAIT_NORMS (all ranks of the plan exchange their vectors of
    per-parameter gradient norms of one minibatch), POST_REDUCE / WAIT_REDUCE (gradients of one
    minibatch over the replicas of the stage), LOSS (the loss of one minibatch from a rank of
    the last stage to every other rank; peer −1: send, else post of the receive from `peer`;
    waited for lazily by the user.  Replicas of the last stage send one part each; the loss is
    the sum).
    """

    FORWARD = "F"
    BACKWARD = "B"
    STEP = "STEP"
    POST_RECV = "POST_RECV"
    WAIT_RECV = "WAIT_RECV"
    SEND = "SEND"
    WAIT_SEND = "WAIT_SEND"
    POST_RECV_GRADIENT = "POST_RECV_GRADIENT"
    WAIT_RECV_GRADIENT = "WAIT_RECV_GRADIENT"
    SEND_GRADIENT = "SEND_GRADIENT"
    WAIT_SEND_GRADIENT = "WAIT_SEND_GRADIENT"
    FREE = "FREE"
    SEND_TIED = "SEND_TIED"
    WAIT_SEND_TIED = "WAIT_SEND_TIED"
    POST_RECV_TIED = "POST_RECV_TIED"
    WAIT_RECV_TIED = "WAIT_RECV_TIED"
    SEND_WEIGHT = "SEND_WEIGHT"
    WAIT_SEND_WEIGHT = "WAIT_SEND_WEIGHT"
    POST_RECV_WEIGHT = "POST_RECV_WEIGHT"
    WAIT_RECV_WEIGHT = "WAIT_RECV_WEIGHT"
    POST_NORMS = "POST_NORMS"
    WAIT_NORMS = "WAIT_NORMS"
    POST_REDUCE = "POST_REDUCE"
    WAIT_REDUCE = "WAIT_REDUCE"
    LOSS = "LOSS"

    __hash__ = str.__hash__  # Enum's own is written in Python and slows every lookup


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of one rank.

    `minibatch` is relative to the call (0: this call's, −1: the one before, …), so that the
    steady-state program is one object however long the training runs.  In a flush program −1
    is the last minibatch that was started.  `microbatch` is an index inside its minibatch, −1
    where the action is about a whole minibatch.
    `edge` indexes plan.edges (values) or plan.tied (tied and weight actions), −1 elsewhere.
    `peer` is the rank at the other end of a send or receive, −1 elsewhere.
    `lag`: FORWARD and BACKWARD of minibatch t run on weights W_max(t − lag, 0); a forward-only
    program runs on the newest weights.
    """

    action: Action
    stage: int
    minibatch: int = 0
    microbatch: int = -1
    edge: int = -1
    peer: int = -1
    lag: int = 0

    def text(self, home: int | None = None) -> str:
        """The cell of a table: ``SEND -1:3 e0 >1``; the stage only where it is not `home`."""
        words = [self.action.value]
        where = str(self.microbatch) if self.microbatch >= 0 else ""
        if self.minibatch:
            where = f"{self.minibatch}:{where}"
        if where:
            words.append(where)
        if self.edge >= 0:
            words.append(f"{'t' if _is_parameter(self.action) else 'e'}{self.edge}")
        if self.peer >= 0:
            words.append(f"{'>' if 'SEND' in self.action else '<'}{self.peer}")
        if self.lag:
            words.append(f"W-{self.lag}")
        if self.stage != home:
            words.append(f"s{self.stage}")
        return " ".join(words)

    def __str__(self) -> str:
        return self.text()


def _is_parameter(action: Action) -> bool:
    return action.endswith(("_TIED", "_WEIGHT"))
