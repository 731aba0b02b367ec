"""Training and evaluation mode of a model's modules, switched as a user's own loop does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from pdcompile.eager.digest import digest
from pdcompile.errors import ConfigError
from pdcompile.warn import warn

Modes = dict[nn.Module, bool]  # module: whether it is in training mode


def modes(model: nn.Module) -> Modes:
    """The present mode of every module."""
    return {module: module.training for module in model.modules()}


@contextmanager
def in_mode(model: nn.Module, training: bool, *, back: bool = True) -> Iterator[None]:
    """Switches the model by ``model.train(training)``; with `back` each module is then restored.

    A model in that mode already is left alone, so that modules in another one stay so.  It is
    switched back by ``train`` too, for classes whose own does more than set flags.
    """
    before = modes(model)
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        if back and model.training != before[model]:
            model.train(before[model])
        for module, mode in before.items() if back else ():
            module.training = mode


def modes_in(model: nn.Module, training: bool) -> Modes:
    """The mode of every module while the model trains, or is evaluated."""
    with in_mode(model, training):
        return modes(model)


def modes_after_switch(model: nn.Module, training: bool) -> Modes:
    """The mode of every module after ``model.train(training)``, whatever it is in now."""
    with in_mode(model, not training):
        return modes_in(model, training)


def apply_overrides(model: nn.Module) -> None:
    """Puts a model in training mode into the state that its own ``train()`` gives it.

    All modules of a new model are in training mode until ``train()`` is called, as a training loop
    does; a class that overrides it to freeze batch norms relies on that.  Modules in evaluation
    mode stay there.

    Raises:
        ConfigError: switching between the modes writes parameters or buffers.
    """
    if not overrides_train(model):
        return
    _refuse_writes(model)
    if not model.training:
        return
    before = modes(model)
    model.train()
    frozen = [name for name, module in model.named_modules() if before[module] > module.training]
    for module, mode in before.items():
        module.training = module.training and mode
    if frozen:
        warn(
            f"the model's train() puts {', '.join(frozen[:3])}{', …' if len(frozen) > 3 else ''} "
            f"({len(frozen)} modules) into evaluation mode, where they were not yet; they stay "
            "there in training, as after model.train()"
        )


def _refuse_writes(model: nn.Module) -> None:
    """Refuses a switch of mode that writes tensors: stages hold weights in one form."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    before = [digest(tensor) for _, tensor in tensors]
    with in_mode(model, not model.training):
        written = [n for (n, t), was in zip(tensors, before, strict=True) if digest(t) != was]
    if written:
        raise ConfigError(
            "the model's train() or eval() writes this tensor, as adapters do that merge their "
            "weights for evaluation; stages hold weights in one form",
            where=written[0],
            remedy="turn merging off (merge_weights=False), so that switching only sets flags",
        )


def overrides_train(model: nn.Module) -> bool:
    """True if some module has its own ``train()``, which may do more than set flags."""
    return any(
        getattr(module.train, "__func__", None) is not nn.Module.train for module in model.modules()
    )
