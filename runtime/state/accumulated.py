"""Gradients that wait for the rest of their group, as states hold them.

Where an update of a stage takes several minibatches, a state may be of a moment within a group: it
then has the sum of the gradients so far, and of how many minibatches it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdcompile.errors import InputError
from pdcompile.position import Accumulated
from pdcompile.runtime.interpreter import Worker
from pdcompile.runtime.session import Session
from pdcompile.warn import warn


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
