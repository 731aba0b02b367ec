"""Refuses models and options that the reference cannot use, before anything runs."""

from __future__ import annotations

from typing import Literal

from torch import nn

from pdcompile.eager.module_copies import copy_of
from pdcompile.errors import ConfigError
from pdcompile.options import Options, option_checks
from pdcompile.options.chosen_schedule import microbatches_of
from pdcompile.schedule.registry import kind_of
from pdcompile.weights.source import materialise, open_source


def chosen_model(model: nn.Module, options: Options) -> nn.Module:
    """The model to train, a copy where `keep_model` says so, with its values from `weights`."""
    option_checks.check_model(model)
    chosen = copy_of(model) if options.keep_model else model
    if options.weights is not None:
        materialise(chosen, open_source(options.weights, seed=options.seed))
    return chosen


def check_model(model: nn.Module) -> None:
    """Refuses wrapped models, and tensors without values."""
    wrapped = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if isinstance(model, wrapped) or hasattr(model, "_orig_mod"):
        raise ConfigError(
            f"the model is wrapped already, in {type(model).__name__}",
            remedy="pass the model itself (model.module, or the argument of torch.compile)",
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                "a parameter has no shape yet", where=name, remedy="call the model once"
            )
        if tensor.is_meta:
            raise ConfigError(
                "a tensor is on the meta device and has no values to compute with",
                where=name,
                remedy="give weights=, or model.to_empty(device='cpu') and load its weights",
            )


def check_options(options: Options) -> int:
    """Refuses options that the reference cannot use; returns the number of microbatches."""
    option_checks.check_options(options)
    if options.resume is not None:
        raise ConfigError(
            "a reference does not resume from checkpoints",
            where="resume",
            remedy="pdcompile.load_checkpoint(folder, model) loads one into plain PyTorch",
        )
    microbatches: int | Literal["auto"] = microbatches_of(options)
    if options.schedule != "auto" and kind_of(options.schedule).updates_each:
        return 1
    for name, value in (("schedule", options.schedule), ("microbatches", microbatches)):
        if value == "auto":
            raise ConfigError(
                f"{name}='auto' is the planner's choice, which a reference does not have",
                remedy="give it (pipe.plan.training has it), or plan=pipe.plan",
            )
    assert microbatches != "auto"
    return microbatches
