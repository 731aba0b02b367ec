"""Several pipelines of one model: which go together, and what each has to know of the others.

In one process stages run on the model's own parameters: a pipeline computes on what another one
trained, as soon as nothing of that one is in flight.  Under torchrun a pipeline takes the model
apart, and no other one finds the tensors of all stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pdcompile.errors import ConfigError, some
from pdcompile.options import Options
from pdcompile.schedule.registry import flush_schedules
from pdcompile.warn import warn

# Open pipelines that have started, and the tensors that each shares with whoever has its model.
_started: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()

_BY_HAND = (
    "optimizer=None for both, forward_backward, and one optimizer of yours for the model's "
    "parameters"
)


class RefuseForward:
    """A hook before forward of a model that is split over ranks, and of copies of it."""

    def __init__(self, pipe: Any = None) -> None:
        self.pipe = (lambda: None) if pipe is None else weakref.ref(pipe)

    def __call__(self, model: nn.Module, args: Any) -> None:
        raise ConfigError(
            f"{type(model).__name__}: this model is split over several ranks and has only this "
            "rank's parameters",
            remedy="call pipe.predict(...) or pipe.eval_step(...), take pipe.to_model(), or give "
            "keep_model=True to compile",
        )

    def __deepcopy__(self, memo: Any) -> RefuseForward:
        return RefuseForward()

    def __reduce__(self) -> tuple[Any, ...]:
        return (RefuseForward, ())


def allow_forward(model: nn.Module) -> None:
    """Take off the hook that refuses forward."""
    for key, hook in [*model._forward_pre_hooks.items()]:
        if isinstance(hook, RefuseForward):
            del model._forward_pre_hooks[key]


@contextmanager
def forward_allowed(model: nn.Module) -> Iterator[None]:
    """Without the hook that refuses forward, of a model that is captured again."""
    hooks = dict(model._forward_pre_hooks)
    allow_forward(model)
    try:
        yield
    finally:
        model._forward_pre_hooks.clear()
        model._forward_pre_hooks.update(hooks)


def refuse_split(model: nn.Module, options: Options) -> None:
    """Raise ConfigError for a model of which an earlier pipeline left this rank a part.

    Once that one was closed, ``weights=`` can give all of its tensors anew.
    """
    for module in model.modules():
        hook = next((h for h in module._forward_pre_hooks.values() if isinstance(h, RefuseForward)),
                    None)  # fmt: skip
        if hook is None:
            continue
        if hook.pipe() is not None and is_open(hook.pipe()):
            raise ConfigError(
                f"{type(module).__name__}: another pipeline has split this model over several "
                "ranks, and each has only its own stages' parameters",
                remedy="evaluate by the other one's eval_step and predict; or have it train a copy "
                "(keep_model=True); or close it, and build the model again for this one",
            )
        if options.weights is None:
            raise ConfigError(
                f"{type(module).__name__}: an earlier pipeline split this model over several "
                "ranks, and each has only its own stages' parameters",
                remedy="say where the values of all are: weights=, a .safetensors file of what the "
                "earlier one's full_state_dict() gave before it was closed; or build the model "
                "again",
            )
        allow_forward(module)


def is_open(pipe: Any) -> bool:
    """Whether a pipeline has started, and was neither closed nor has failed."""
    session = pipe._session
    return session is not None and not pipe._closed and session.failed is None


def started(pipe: Any, model: nn.Module, session: Any) -> None:
    """Notes a pipeline whose session begins, all of it in this process.

    Warns where it and another one train the same parameters, and raises ConfigError where both
    hold several versions of them: each would overwrite the other's older ones.
    """
    tensors = frozenset(id(tensor) for tensor in (*model.parameters(), *model.buffers()))
    trained = _trained(session)
    for other in _beside(pipe, tensors):
        held = set(_trained(other._session).values())
        both = [name for name, tensor in trained.items() if tensor in held]
        what = f"another pipeline of this process trains {some(both, 2)} too"
        if both and session.compiled.overlaps and other._session.compiled.overlaps:
            raise ConfigError(
                f"{what}, and both keep older versions of their weights",
                where="schedule",
                remedy="close() the other one if it is done; or use a flush schedule "
                f"({flush_schedules()}), and {_BY_HAND}",
            )
        if both:
            warn(
                f"{what}, each with an optimizer of its own, whose moments and learning rates do "
                "not know of the other's updates; close() the other one if it is done, give the "
                f"one that only evaluates optimizer=None, or give {_BY_HAND}"
            )
    _started[pipe] = tensors


def settle_others(pipe: Any) -> None:
    """A call begins: finish what other pipelines of the model have in flight, whose stages are at
    different versions of their weights until then."""
    tensors = _started.get(pipe, frozenset())
    for other in [one for one in _beside(pipe, tensors) if one.unsettled]:
        other.flush()


def _beside(pipe: Any, tensors: Collection[int]) -> Iterator[Any]:
    """Other open pipelines that have some of these tensors."""
    for other, theirs in [*_started.items()]:
        if other is not pipe and is_open(other) and not theirs.isdisjoint(tensors):
            yield other


def _trained(session: Any) -> dict[str, int]:
    """The parameters that the optimizer of a session updates, by name."""
    if session.optimizer is None:
        return {}
    held = {id(one) for group in session.optimizer.param_groups for one in group["params"]}
    named = session.state.trainable().items()
    return {name: id(tensor) for name, tensor in named if id(tensor) in held}
