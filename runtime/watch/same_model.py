"""Pipelines of one model: refuses those that do not go together, tells each of the others.

In one process stages run on the model's own parameters: a pipeline computes on what another one
trained, as soon as nothing of that one is in flight.  Under torchrun a pipeline takes the model
apart: another one finds the values of its own stages alone, and shares the model where it cuts
it alike.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from pdcompile.compiled import Compiled
from pdcompile.errors import ConfigError, InfeasibleError, some
from pdcompile.ir.stage_interface import holding_stages
from pdcompile.options import Held, Options
from pdcompile.runtime.transport.start_up import StartUp
from pdcompile.schedule.registry import flush_schedules
from pdcompile.warn import warn
from pdcompile.weights.source import slots

# Open pipelines that have started, and the tensors that each shares with whoever has its model.
_started: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
# Of models that are split over ranks: where the tensor is that a module has under a name.
_held: weakref.WeakKeyDictionary[nn.Module, dict[str, Held]] = weakref.WeakKeyDictionary()

_BY_HAND = (
    "optimizer=None for both, forward_backward, and one optimizer of yours for the model's "
    "parameters"
)

_ALIKE = (
    "start this pipeline first, if the other one has more of the model, which then takes its cut; "
    "or give both the same stages, schedule, replicas and group, and the first one a cut that "
    "suits both (constraints=[Pin(module, stage), …]); or have the first one train a copy "
    "(keep_model=True) and bring values over by state dicts"
)


class RefuseForward:
    """A hook before forward of a model that is split over ranks, and of copies of it."""

    def __call__(self, model: nn.Module, args: Any) -> None:
        raise ConfigError(
            f"{type(model).__name__}: this model is split over several ranks and has only this "
            "rank's parameters",
            remedy="call pipe.predict(…) or pipe.eval_step(…), take pipe.to_model(), or give "
            "keep_model=True to compile",
        )


class RefuseState:
    """A hook before state_dict of the modules of such a model, and of copies of it."""

    def __call__(self, module: nn.Module, *_: Any) -> None:
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            raise ConfigError(
                f"{type(module).__name__}: its values are on other ranks, as the model is split",
                remedy="pipe.full_state_dict(), whole on rank 0, or pipe.state_dict(), of each "
                "rank's part: every rank calls them",
            )


def _refusals(model: nn.Module) -> list[tuple[nn.Module, int, RefuseForward]]:
    """Hooks that refuse forward: of which of the model's modules, and the key of each."""
    return [
        (module, key, hook)
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, RefuseForward)
    ]


def allow_forward(model: nn.Module) -> list[tuple[nn.Module, int, RefuseForward]]:
    """Take off the hooks that refuse forward, and return them."""
    taken = _refusals(model)
    for module, key, _ in taken:
        del module._forward_pre_hooks[key]
    return taken


@contextmanager
def forward_allowed(model: nn.Module) -> Iterator[None]:
    """Lets rank 0 capture a model that is split already, from the shapes of its tensors."""
    taken = allow_forward(model)
    try:
        yield
    finally:
        for module, key, hook in taken:
            module._forward_pre_hooks[key] = hook


def note_split(model: nn.Module, compiled: Compiled, group: Any) -> None:
    """The ranks of a pipeline hold the tensors of their own stages, and no others."""
    model.register_forward_pre_hook(RefuseForward())
    for module in model.modules():
        module.register_state_dict_pre_hook(RefuseState())  # type: ignore[no-untyped-call]
    ranks = tuple(map(tuple, compiled.stream.spec.ranks))
    stages = holding_stages(compiled.interfaces)
    for fqn, slot in slots(model).items():
        for name in slot.names if fqn in stages else ():
            path, _, leaf = name.rpartition(".")
            home = _held.setdefault(model.get_submodule(path), {})
            home[leaf] = Held(tuple(stages[fqn]), ranks, group, compiled.capture.division.parts)


def split_before(model: nn.Module, options: Options) -> dict[str, Held]:
    """Holders of the tensors that an earlier pipeline has left to some ranks, by their names.

    With ``weights=`` all get their values anew, once that pipeline was closed.

    Raises:
        ConfigError: it is open, and has to keep its values; or nobody knows where they are.
    """
    found, modules = {}, dict(model.named_modules(remove_duplicate=False))
    for fqn, slot in slots(model).items():
        path, _, leaf = slot.names[0].rpartition(".")
        if one := _held.get(modules[path], {}).get(leaf):
            found[fqn] = one
    hooked = _refusals(model)
    what = "split this model over several ranks, and each has only its own stages' parameters"
    if any(one.parts > 1 for one in found.values()):
        raise ConfigError(
            f"{type(model).__name__}: an earlier pipeline {what}, and of these its part's slices",
            remedy="build the model again and load a state_dict (full_state_dict of that one); or "
            "have the first one train a copy (keep_model=True)",
        )
    if options.weights is not None:
        if next(_beside(None, _tensors(model)), None) is not None:
            raise ConfigError(
                f"{type(model).__name__}: another pipeline has {what}",
                remedy="leave weights= out: this one takes the values that the ranks have, and is "
                "cut alike; or close the other one first; or have it train a copy "
                "(keep_model=True)",
            )
        allow_forward(model)
        return {}
    if hooked and not found:
        raise ConfigError(
            f"{type(hooked[0][0]).__name__}: this is a copy of a model; an earlier pipeline {what}",
            remedy="compile the model itself, which is then cut alike; or say where the values of "
            "all are: weights=, a .safetensors file of what full_state_dict() gave; or build the "
            "model again",
        )
    return found


def settled(
    model: nn.Module, held: Mapping[str, Held], options: Options, start: StartUp
) -> Options:
    """The options for a model that was split: cut alike, unless all ranks have all values again
    and no open pipeline counts on them.  Every rank calls it."""
    if not held:
        return options
    lacking = any(one.tensor.is_meta for fqn, one in slots(model).items() if fqn in held)
    alone = not lacking and next(_beside(None, _tensors(model)), None) is None
    everywhere = all(map(json.loads, start.tell("alone", json.dumps(alone))))
    return options if everywhere else options.beside(held)


def beside_error(error: InfeasibleError) -> ConfigError:
    """The error for a plan that cannot have tensors where a split model has them: the pins are
    not the user's."""
    return ConfigError(
        "another pipeline has split this model over the ranks, and no plan of this one leaves "
        f"all tensors where they are: {error.message}",
        remedy=_ALIKE,
    )


def check_alike(compiled: Compiled, options: Options) -> None:
    """Raise ConfigError where a plan has a tensor on ranks that do not hold it.  All ranks do."""
    ranks = compiled.stream.spec.ranks
    written = {fqn for stage in range(len(ranks)) for fqn in compiled.written_buffers(stage)}
    for fqn, stages in holding_stages(compiled.interfaces).items():
        was = options.held.get(fqn)
        if was is None:
            continue
        here = {rank for stage in stages for rank in ranks[stage]}
        fits = here == was.holders if fqn in written else here <= was.holders
        if fits and was.group is options.group and was.owners == tuple(ranks[stages[0]]):
            continue
        raise ConfigError(
            f"another pipeline has split this model over the ranks, with {fqn} on rank "
            f"{', '.join(map(str, sorted(was.holders)))}, and this plan has it on rank "
            f"{', '.join(map(str, sorted(here)))}",
            where=fqn,
            remedy=_ALIKE,
        )


def started(pipe: Any, model: nn.Module, session: Any) -> None:
    """Notes a pipeline whose session begins.

    Warns where it and another one train the same parameters, and raises ConfigError where both
    hold several versions of them: each would overwrite the other's older ones.
    """
    tensors = _tensors(model)
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
    different versions of their weights until then, and tell them that copies may become old."""
    tensors = _started.get(pipe, frozenset())
    for other in [*_beside(pipe, tensors)]:
        if other.unsettled:
            other.flush()
        other._session.forget_copies()


def _tensors(model: nn.Module) -> frozenset[int]:
    return frozenset(id(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _beside(pipe: Any, tensors: Collection[int]) -> Iterator[Any]:
    """Other open pipelines that have some of these tensors."""
    for other, theirs in [*_started.items()]:
        is_open = not other._closed and other._session.failed is None
        if other is not pipe and is_open and not theirs.isdisjoint(tensors):
            yield other


def _trained(session: Any) -> dict[str, int]:
    """The parameters that the optimizer of a session updates, by name."""
    if session.optimizer is None:
        return {}
    held = {id(one) for group in session.optimizer.param_groups for one in group["params"]}
    named = session.state.trainable().items()
    wholes = session.homes.wholes
    return {name: id(one) for name, one in named if id(wholes.get(name, one)) in held}
