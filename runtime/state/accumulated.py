"""Gradients that wait for the rest of their group, as states hold them.

Where an update of a stage takes several minibatches, a state may be of a moment within a group: it
then has the sum of the gradients so far, and of how many minibatches it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pdcompile.errors import InputError
from pdcompile.hardware import devices
from pdcompile.position import Accumulated
from pdcompile.runtime.interpreter import Box, Worker
from pdcompile.runtime.session import Session
from pdcompile.runtime.transport.contract import Expected
from pdcompile.schedule import Kind
from pdcompile.schedule.spec import Broadcast
from pdcompile.warn import warn


def held(session: Session, minibatches: int) -> dict[str, Accumulated]:
    """What waits on the stages of this process; after a drain, `minibatches` so far."""
    found: dict[str, Accumulated] = {}
    for worker in session.workers:
        count = worker.weights.numbers.waiting(minibatches)
        if worker.replicas is not None and count:
            shown = worker.replicas.shown
            found |= {f: Accumulated(count, shown.get(f)) for f in worker.weights.owned}
    return found


def gathered(session: Session, minibatches: int) -> dict[str, Accumulated]:
    """What waits on all stages, on rank 0; elsewhere {}.

    A channel has tensors of one shape for ever: whichever stages wait, each gradient has a number
    of its own, after those of the state.
    """
    own = held(session, minibatches)
    if session.world is None:
        return own
    box, broadcasts, asked = Box({}, {}), [], dict[int, list[str]]()
    trainable = session.state.trainable()
    following = len(session.state.dtypes)
    for stage, ranks in enumerate(session.spec.ranks):
        names = [f for f in session.compiled.interfaces[stage].parameters if f in trainable]
        first, following = following, following + 1 + len(names)
        if minibatches % session.spec.group(stage) == 0:
            continue
        tensors = [torch.zeros(1 + len(names), dtype=torch.int64), *(trainable[f] for f in names)]
        given = _told(names, tensors, own) if ranks[0] in session.ranks else tensors
        for item, tensor in enumerate(given, first):
            if ranks[0] in session.ranks:
                box.tensors[item, -1] = tensor
            else:
                box.expected[item, -1] = Expected(tuple(tensor.shape), tensor.dtype, 0)
            receivers = (0,) if ranks[0] else ()
            broadcasts.append(Broadcast(Kind.STATE, item, -1, ranks[0], receivers))
        asked[first] = names
    session.share(tuple(broadcasts), box)
    return _heard(asked, box) if 0 in session.ranks else {}


def _told(names: list[str], tensors: list[Tensor], own: Mapping[str, Accumulated]) -> list[Tensor]:
    """How many minibatches, and which parameters have a gradient; then the gradients."""
    nothing = Accumulated(0, None)
    waiting = [own.get(name, nothing) for name in names]
    counts = max((one.minibatches for one in waiting), default=0)
    present = [int(one.gradient is not None) for one in waiting]
    return [
        torch.tensor([counts, *present]),
        *(
            torch.zeros_like(like) if one.gradient is None else one.gradient
            for one, like in zip(waiting, tensors[1:], strict=True)
        ),
    ]


def _heard(asked: Mapping[int, list[str]], box: Box) -> dict[str, Accumulated]:
    """`asked`: the names of a stage's parameters, by the number of what comes before them."""
    found = dict[str, Accumulated]()
    for first, names in asked.items():
        count, *present = box.tensors[first, -1].tolist()
        for item, (name, has) in enumerate(zip(names, present, strict=True), first + 1):
            gradient = devices.to_host(box.tensors[item, -1].detach()).clone() if has else None
            if count:
                found[name] = Accumulated(count, gradient)
    return found


def check_accumulated(session: Session, accumulated: Mapping[str, Accumulated]) -> None:
    """Raise InputError for gradients of another model."""
    trainable = session.state.trainable()
    for name, (_, gradient) in accumulated.items():
        if name not in trainable:
            message = "the model trains nothing of this name, and the state has a gradient of it"
        elif gradient is not None and gradient.shape != trainable[name].shape:
            message = f"an accumulated gradient is {tuple(gradient.shape)}, the parameter is "
            message += f"{tuple(trainable[name].shape)}"
        else:
            continue
        raise InputError(message, where=name, remedy="load a state of this model")


def resume(session: Session, minibatches: int, accumulated: Mapping[str, Accumulated]) -> None:
    """Go on within groups, with the gradients that a state holds of their beginnings."""
    for worker in session.workers:
        fits = worker.replicas is not None and worker.replicas.resume(minibatches, accumulated)
        if not fits:
            _say_what_is_lost(worker, minibatches, accumulated)


def _say_what_is_lost(
    worker: Worker, minibatches: int, accumulated: Mapping[str, Accumulated]
) -> None:
    weights = worker.weights
    known = max(
        (one.minibatches for f, one in accumulated.items() if f in weights.owned), default=0
    )
    within = minibatches % weights.numbers.group
    if weights.owned and (known or within):
        warn(
            f"training goes on after {minibatches} minibatches: stage {worker.stage} updates after "
            f"every {weights.numbers.group}, {within} of the present group are over, and the state "
            f"holds the gradients of {known}; they are in no update"
        )
