"""The workload that a command-line target returns: a model and what it is trained on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pdcompile.errors import ConfigError, refuse_unknown
from pdcompile.options import values
from pdcompile.options.table import ROWS
from pdcompile.user_functions import call, load_function, own_errors

if TYPE_CHECKING:
    import torch

AN_OPTION = (
    "it is an option: {0}=… of pdcompile.compile; of the command line, see pdcompile plan --help"
)
REQUIRED: Any = ...  # in place of a value that has to be given
IN_BATCHES = "batches is a function that returns a fresh iterable of (inputs, target): `lambda: {}`"
# What people look for in a workload, and where it is.
NOT_FIELDS = {
    **dict.fromkeys(("target", "targets"), "the example's target is example_target"),
    **{name: IN_BATCHES.format(name) for name in ("data", "dataset", "dataloader", "loader")},
    **dict.fromkeys(
        ("scheduler", "lr_scheduler"),
        "it steps in a loop of your own: over pipe.optimizer of the pipeline that "
        "pdcompile.compile returns",
    ),
    "batch_size": "it is that of the minibatch: example_inputs is a whole one",
    "lr": "it is the optimizer's: --lr on the command line, or optimizer=",
}


@dataclass(frozen=True, slots=True, init=False)
class Workload:
    """A model and what it is trained on.

    Args:
        model: any nn.Module; may be on the meta device.
        example_inputs: one global minibatch (batch dimension first): a tensor, a tuple of
            positional or a dict of keyword arguments of forward.  Where `batches` are given, of
            their form and size.
        loss_fn: ``loss_fn(output, target) -> scalar``; None: the model returns the loss.
        batches: called for a fresh pass over the data, yields ``(inputs, target)`` pairs of
            global minibatches; inputs have the form of `example_inputs`, target is any pytree
            (None without loss_fn).
        weights: for a model on the meta device, where its values come from: as in
            `pdcompile.compile`.
        example_target: what belongs to `example_inputs`; left out: the first of `batches` tells.
        **options: of a training, as `pdcompile.compile` takes them: optimizer, batch_dims,
            loss_reduction, autocast, grad_scaler, max_grad_norm, linear_lr_scaling, seed, outputs.
            What the command line says takes their place.
    """

    model: torch.nn.Module
    example_inputs: Any
    loss_fn: Callable[[Any, Any], Any] | None
    batches: Callable[[], Iterable[tuple[Any, Any]]] | None
    weights: Any
    target: Any
    options: Mapping[str, Any]

    def __init__(
        self,
        model: torch.nn.Module = REQUIRED,
        example_inputs: Any = REQUIRED,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        batches: Callable[[], Iterable[tuple[Any, Any]]] | None = None,
        weights: Any = None,
        *,
        example_target: Any = REQUIRED,
        **options: Any,
    ) -> None:
        """Raises ConfigError: a field that there is not, with what is meant instead; or model or
        example_inputs are missing."""
        if {"target", "options"} <= options.keys():  # dataclasses.replace gives every field
            example_target = options.pop("target")
            options |= options.pop("options")
        of_training = [name for name, row in ROWS.items() if row.of_training]
        training = {name: options.pop(name) for name in of_training if name in options}
        given = (model, example_inputs, loss_fn, batches, weights, example_target, training)
        known = tuple(field.name for field in fields(self))
        if options:
            meant = {name: AN_OPTION.format(name) for name in ROWS}
            taken = (*known[:-2], "example_target", *of_training)
            refuse_unknown("Workload has no field", options, taken, meant | NOT_FIELDS)
        if missing := [n for n, one in zip(known[:2], given, strict=False) if one is REQUIRED]:
            raise ConfigError(
                f"Workload has no {' and no '.join(missing)}",
                where=missing[0],
                remedy="Workload(model, example_inputs, loss_fn, batches): example_inputs is a "
                "whole minibatch, as forward takes it",
            )
        for name, value in zip(known, given, strict=True):
            object.__setattr__(self, name, value)  # it is frozen

    def example_target(self) -> Any:
        """The target that belongs to the example: as it was given, or that of the first batch.

        Returns:
            None without a loss_fn: then the model takes its targets as inputs.

        Raises:
            ConfigError: there is a loss_fn and neither target nor batches, or these yield nothing.
        """
        return self.example()[1]

    def example(self) -> tuple[Any, Any]:
        """``(inputs, target)`` to capture with; inputs and target are of one batch.

        Raises:
            ConfigError: as `example_target`.
        """
        if self.loss_fn is None:
            return self.example_inputs, None
        if self.target is not REQUIRED:
            return self.example_inputs, self.target
        if self.batches is None:
            raise ConfigError(
                "the workload has a loss_fn but no batches, so there is no example target",
                where="Workload.batches",
                remedy="give Workload(..., batches=function) that yields (inputs, target), or "
                "example_target=",
            )
        return next(self.stream())

    def stream(self) -> Iterator[tuple[Any, Any]]:
        """Minibatches without end: `batches` from the start again whenever it is used up.

        Without batches, the example for ever.
        """
        if self.batches is None:
            while True:
                yield self.example_inputs, None if self.target is REQUIRED else self.target
        while True:
            empty = True
            for index, batch in enumerate(_quoting(self.batches)):
                if not (isinstance(batch, tuple | list) and len(batch) == 2):
                    raise ConfigError(
                        f"batch {index} is {_kind(batch)}, not a pair (inputs, target)",
                        where="Workload.batches",
                        remedy="yield (inputs, target); target is None when the model has the loss",
                    )
                empty = False
                yield batch[0], batch[1]
            if empty:
                raise ConfigError(
                    "batches() yields nothing",
                    where="Workload.batches",
                    remedy="return a fresh iterable of (inputs, target) at every call",
                )


def _quoting(batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Minibatches that batches() yields.  Raises ConfigError: it raised, with the line."""
    made, remedy, end = None, "iterate over batches() alone first", object()
    for count in itertools.count():
        with own_errors(f"batches() raised at minibatch {count}", "Workload.batches", remedy):
            made = iter(batches()) if made is None else made
            batch = next(made, end)
        if batch is end:
            return
        yield batch


def load_target(target: str) -> Workload:
    """Import ``file.py:function`` or ``package.module:function`` and call it.

    The function returns a `Workload`, or a tuple of its first fields.  This runs code that
    the user names, as ``python file.py`` would.

    Raises:
        ConfigError: the text has another form; file, module or function is missing; the
            function wants arguments, raises (the cause is chained) or returns something else.
    """
    from torch import nn

    from pdcompile.options.option_checks import check_model

    value = call(load_function(target), target)
    if isinstance(value, nn.Module):
        raise ConfigError(
            f"the target returned only a model ({type(value).__name__}), without example inputs",
            where=target,
            remedy="return pdcompile.Workload(model, example_inputs, loss_fn, batches)",
        )
    if isinstance(value, tuple) and 2 <= len(value) <= 5:
        value = Workload(*value)
    if not isinstance(value, Workload):
        raise ConfigError(
            f"the target returned {_kind(value)}, not a workload",
            where=target,
            remedy="return pdcompile.Workload(model, example_inputs, loss_fn, batches) "
            "or a tuple of its first fields",
        )
    if not (value.batches is None or callable(value.batches)):
        raise ConfigError(
            f"the workload's batches is {_kind(value.batches)}, not a function",
            where=target,
            remedy="batches is a function that returns a fresh iterable of (inputs, target)",
        )
    try:
        check_model(value.model)
        values.refuse(values.loss_fn("loss_fn", value.loss_fn))
    except ConfigError as error:
        error.where = target
        raise
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
