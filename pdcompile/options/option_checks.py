"""Checks of options beside each other; those of one value are in their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdcompile.eager.loss_scale import scaler_of
from pdcompile.errors import ConfigError
from pdcompile.options import Options
from pdcompile.options.chosen_schedule import chosen_schedule
from pdcompile.options.table import ROWS
from pdcompile.options.values import Finding, refuse
from pdcompile.problem.constraints import Split
from pdcompile.schedule.registry import KINDS, allowed, find, flush_schedules, kind_of


def check_model(model: Any) -> None:
    """Refuse what is not a model, before anything asks it for parameters.  Raises ConfigError."""
    from torch import nn

    if not isinstance(model, nn.Module):
        shown = f"the class {model.__name__}" if isinstance(model, type) else repr(model)[:60]
        raise ConfigError(
            f"the model must be a torch.nn.Module, got {shown}",
            remedy="pass an instance: pdcompile.compile(MyModel(), ...)",
        )


def check_options(options: Options) -> None:
    """Refuse what is wrong whatever the model and the minibatch are.  Raises ConfigError."""
    for name, row in ROWS.items():
        if row.check is not None:
            refuse(row.check(name, getattr(options, name)))
    refuse(_contradictions(options))
    chosen_schedule(options)


def _contradictions(options: Options) -> Iterator[Finding]:
    """Messages and remedies of options that cannot be beside each other."""
    kind = find(options.schedule) if isinstance(options.schedule, str) else None
    planned = options.plan is not None or options.sources is not None
    # A plan says the schedule, and whether rates are scaled.
    scales = options.linear_lr_scaling and ("schedule" in options.said or not planned)
    if scales and not (kind and kind.group(2) > 1 and kind.takes_replicas):
        names = (k.name for k in KINDS.values() if k.group(2) > 1 and k.takes_replicas)
        message = f"linear_lr_scaling=True under schedule={options.schedule!r}: it is for updates "
        remedy = f"leave it out, or use schedule={' or '.join(map(repr, names))}"
        yield f"{message}that average as many minibatches as their stage has replicas", remedy
    if options.plan is None and options.parts == 1 and options.split != "auto":
        message = f"split={options.split!r} divides nothing: a stage has one part"
        yield message, "say between how many ranks: parts=2 (--parts 2); or leave split out"
    split = next((one for one in options.constraints if isinstance(one, Split)), None)
    if split is not None and options.parts == 1:
        yield (
            f"{split} divides nothing: a stage has one part",
            f"say between how many ranks: parts=2 (--parts 2); or leave out {split}",
        )
    if options.updates == "home" and options.optimizer is None:
        message = "updates='home' says who makes updates, and optimizer=None makes none"
        yield message, "give optimizer=; or leave updates out"
    if options.allow_edited and options.sources is None:
        message = "allow_edited=True without sources= would have no effect"
        yield message, "give sources=, the folder that was edited"
    if options.stage_compiler is not None and options.detect_nonfinite:
        message = "detect_nonfinite=True looks at each op, and a compiled stage has none"
        yield message, "leave stage_compiler out until the op is found"
    if scaler_of(options.grad_scaler) is None:
        return
    if options.optimizer is None:
        message = "grad_scaler= decides whether an update is made, and optimizer=None makes none"
        remedy = "leave grad_scaler out; in a loop of your own loss_fn can return the loss times a "
        yield message, f"{remedy}scale"
    if options.detect_nonfinite:
        message = "detect_nonfinite=True raises at the gradients that overflow, and a GradScaler "
        yield f"{message}finds its scale by them", "leave one of the two out"


def check_target(options: Options, target: Any) -> None:
    """Raise ConfigError for a target that nothing would use."""
    if target is not None and options.loss_fn is None:
        raise ConfigError(
            "a target was given, but there is no loss_fn to use it",
            remedy="give loss_fn=, or pass it to the model under its own name "
            "(step_call(args, kwargs) for an argument called target)",
        )


def check_trains(schedule: str, call: str) -> None:
    """Refuse a call that trains under a schedule of inference.  Raises ConfigError."""
    if not kind_of(schedule).trains:
        raise ConfigError(
            f"schedule={schedule!r} is for inference: it has no gradients and no updates",
            where=call,
            remedy="call predict or eval_step; or to train, compile the model with a schedule of "
            f"{', '.join(allowed('any'))}",
        )


def check_older_weights(schedule: str, *, updates: bool) -> None:
    """Refuse calls and options without updates under a schedule that runs on older weights."""
    if not updates and kind_of(schedule).stream:
        raise ConfigError(
            f"schedule={schedule!r} computes gradients on older weights, which means nothing "
            "without updates",
            remedy=f"call step with an optimizer=, or use a flush schedule ({flush_schedules()})",
        )


def check_unscaled(options: Options, call: str) -> None:
    """Refuse a call on gradients without an update where a GradScaler decides whether there is one.

    Raises:
        ConfigError: names the `call`.
    """
    if scaler_of(options.grad_scaler) is not None:
        raise ConfigError(
            "grad_scaler= scales the losses of `step`, and decides whether it makes an update",
            where=call,
            remedy="call step; or leave grad_scaler out, and let loss_fn return the loss times a "
            "scale",
        )
