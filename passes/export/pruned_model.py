"""Models as torchtitan cuts them: a copy for each stage, without the modules of the others.

Forward runs whole on every stage.  What it computes itself, beside its modules, it computes on each
of them, which is the model only where the models are written for it; so that is tried.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from pdcompile.batch import FlatCall
from pdcompile.eager.modes import in_mode
from pdcompile.eager.randomness import preserved_rng
from pdcompile.errors import ConfigError
from pdcompile.passes.export.subject import refused


def check_pruned(model: nn.Module, call: FlatCall, stages: Sequence[Collection[str]]) -> None:
    """Run the stages one after the other, and the model, on the example.

    Raises:
        ConfigError: a stage fails without the modules of the others, or the results differ.
    """
    args, kwargs, _ = call.unflatten(call.leaves)
    with torch.no_grad(), preserved_rng(), in_mode(model, False):
        expected = model(*args, **kwargs)
        value: Any = None
        for k, names in enumerate(stages):
            given = (args, kwargs) if k == 0 else _with_first(args, kwargs, value)
            try:
                value = pruned(model, names)(*given[0], **given[1])
            except Exception as error:
                raise _another_model(
                    f"without the modules of others, stage {k} raised {type(error).__name__}: "
                    f"{error}"
                ) from error
    try:
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    except (AssertionError, TypeError) as error:
        raise _another_model(
            "its stages, one after the other, do not compute what the model does"
        ) from error


def pruned(model: nn.Module, names: Collection[str]) -> nn.Module:
    """The model with those of its children, and entries of their lists and dicts, that are named.
    Tensors and modules are those of the model."""
    found = copy.copy(model)
    found._modules = dict(model._modules)  # one that is there twice stays under its second name
    for name, child in model.named_children():
        kept: nn.Module | None = child if name in names else None
        if isinstance(child, nn.ModuleDict):
            kept = nn.ModuleDict({n: one for n, one in child.items() if f"{name}.{n}" in names})
        elif isinstance(child, nn.ModuleList):
            kept = nn.ModuleList(one for i, one in enumerate(child) if f"{name}.{i}" in names)
        found._modules[name] = kept
    return found


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with another first argument."""
    if args:
        return (value, *args[1:]), kwargs
    return args, {name: value if i == 0 else one for i, (name, one) in enumerate(kwargs.items())}


def _another_model(message: str) -> ConfigError:
    return refused(
        "torchtitan",
        f"torchtitan runs the model's whole forward on every stage: {message}",
        "--to torch-pipelining; or have forward do nothing beside its modules, and pass by those "
        "that are None",
    )
