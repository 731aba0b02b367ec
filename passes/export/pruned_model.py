"""Models as torchtitan cuts them: a copy for each stage, without the modules of the others.

Forward runs whole on every stage.  What it computes itself, beside its modules, it computes on each
of them, which is the model only where the models are written for it; so that is tried.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

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
    leaves = dict(call.leaves)
    with torch.no_grad(), preserved_rng(), in_mode(model, False):
        args, kwargs, _ = call.unflatten(leaves)
        expected = model(*args, **kwargs)
        for k, names in enumerate(stages):
            args, kwargs, _ = call.unflatten(leaves)
            try:
                value = pruned(model, names)(*args, **kwargs)
            except Exception as error:
                raise _another_model(
                    f"without the modules of others, stage {k} raised {type(error).__name__}: "
                    f"{error}"
                ) from error
            leaves[next(iter(leaves))] = value  # the first input of the next one
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


def _another_model(message: str) -> ConfigError:
    return refused(
        "torchtitan",
        "torchtitan runs the model's whole forward on every stage, of whose children and entries "
        f"of their ModuleList or ModuleDict all but the stage's are None: {message}",
        "--to torch-pipelining; or give the model's class its layers directly, and have forward do "
        "nothing beside them, pass by those that are None, and hand on one value",
    )
