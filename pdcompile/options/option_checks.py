"""Checks of options that need neither model nor minibatch: `compile` makes them at once."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdcompile.batch import check_batch_dims
from pdcompile.cluster import Cluster
from pdcompile.clusters import cluster_of
from pdcompile.eager.autocast import autocast_text
from pdcompile.eager.loss_scale import scaler_of
from pdcompile.errors import ConfigError, did_you_mean
from pdcompile.files import is_path
from pdcompile.options import OUTPUTS, Options
from pdcompile.options.chosen_schedule import check_count, chosen_schedule
from pdcompile.options.configuration import SEARCHED, not_a_cluster
from pdcompile.plan import Plan
from pdcompile.problem.constraints import KNOWN, Constraint
from pdcompile.schedule.registry import KINDS, find, flush_schedules
from pdcompile.units import parse_bytes


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
    check_loss_fn(options.loss_fn)
    _optimizer(options.optimizer)
    _number("seed", options.seed, integer=True, least=0)
    _number("time_limit", options.time_limit, least=0)
    for name in ("stall_timeout", "progress_timeout"):
        _number(name, getattr(options, name), least=1)  # beats come twice a second
    _number("max_grad_norm", options.max_grad_norm)
    _number("cut_tolerance", options.cut_tolerance, least=0)
    _one_of("refine", options.refine, ("auto", True, False))
    _one_of("progress", options.progress, ("auto", True, False))
    _one_of("verify", options.verify, ("auto", "full", "blocks", "off"))
    _one_of("outputs", options.outputs, OUTPUTS)
    _one_of("max_staleness", options.max_staleness, (0, 1, "any"))
    if callable(options.loss_reduction):
        _takes("loss_reduction", options.loss_reduction, ("args", "kwargs", "target"))
    else:
        _one_of(
            "loss_reduction",
            options.loss_reduction,
            ("mean", "sum"),
            or_else=", or a function (args, kwargs, target) -> number of items",
        )
    _recompute(options.recompute)
    for name in ("keep_model", "allow_edited", "linear_lr_scaling", "detect_nonfinite"):
        _one_of(name, getattr(options, name), (False, True))
    _scaling(options)
    _constraints(options.constraints)
    if options.allow_edited and options.sources is None:
        raise ConfigError(
            "allow_edited=True without sources= would have no effect",
            remedy="give sources=, the folder that was edited",
        )
    clip = options.max_grad_norm
    if clip is not None and not 0 < clip < float("inf"):
        raise ConfigError(
            f"max_grad_norm={clip!r} is not a positive, finite number",
            remedy="for example 1.0; None for no clipping",
        )
    _group(options.group)
    autocast_text(options.autocast)
    _grad_scaler(options)
    if options.memory is not None:
        parse_bytes(options.memory, what="memory")
    chosen_schedule(options)
    _machines(options)
    for name, made in (
        ("plan", "a plan.json, or a Plan"),
        ("sources", "a folder that dump wrote"),
        ("resume", "a folder that pipe.save wrote"),
    ):
        given = getattr(options, name)
        plan = name == "plan" and isinstance(given, Plan)
        if not (given is None or plan or is_path(given)):
            raise ConfigError(f"{name}={given!r} is not a path", remedy=f"the path of {made}")


def _grad_scaler(options: Options) -> None:
    if scaler_of(options.grad_scaler) is None:
        return
    if options.optimizer is None:
        raise ConfigError(
            "grad_scaler= decides whether an update is made, and optimizer=None makes none",
            remedy="leave grad_scaler out; in a loop of your own loss_fn can return the loss times "
            "a scale",
        )
    if options.detect_nonfinite:
        raise ConfigError(
            "detect_nonfinite=True raises at the gradients that overflow, and a GradScaler finds "
            "its scale by them",
            remedy="leave one of the two out",
        )


def _recompute(given: Any) -> None:
    several = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    if given == "auto" or all(isinstance(one, bool) for one in (given if several else [given])):
        return
    raise ConfigError(
        f"recompute={given!r} says of no stage whether it recomputes",
        remedy="False, True, 'auto' (the planner decides), or one of these for each stage: "
        "(True, False)",
    )


def _constraints(given: Any) -> None:
    known = f"a list of {KNOWN}; () for none"
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"constraints={given!r} is not a list", remedy=known)
    for one in given:
        if not isinstance(one, Constraint):
            raise ConfigError(f"{one!r} in constraints= is not a constraint", remedy=known)


def _machines(options: Options) -> None:
    check_count("stages", options.stages, "None: one a device")
    _replicas(options.replicas)
    if options.microbatches != "auto":
        check_count("microbatches", options.microbatches, "'auto'")
    check_batch_dims(options.batch_dims)
    cluster = options.cluster
    if isinstance(cluster, str | Path):
        text = str(cluster)
        if text != "auto" and not text.endswith(".toml"):
            cluster_of(text)
    elif not isinstance(cluster, Cluster):
        raise not_a_cluster(cluster)


def _scaling(options: Options) -> None:
    """Refuse learning rates by stage where all stages average the same samples."""
    kind = find(options.schedule) if isinstance(options.schedule, str) else None
    if "schedule" not in options.said and not (options.plan is None is options.sources):
        return  # the plan says the schedule, and whether rates are scaled
    if options.linear_lr_scaling and not (kind and kind.updates_each and kind.takes_replicas):
        names = (k.name for k in KINDS.values() if k.updates_each and k.takes_replicas)
        raise ConfigError(
            f"linear_lr_scaling=True under schedule={options.schedule!r}: it is for updates that "
            "average as many minibatches as their stage has replicas",
            remedy=f"leave it out, or use schedule={' or '.join(map(repr, names))}",
        )


def _replicas(given: Any) -> None:
    many = isinstance(given, tuple) and bool(given)
    for count in given if many else (given,):
        whole = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if not whole and (many or given not in SEARCHED):
            raise ConfigError(
                f"replicas={given!r} does not say how many replicas a stage has",
                remedy="a number for every stage (2), one for each ((3, 1)), 'equal' or 'any'",
            )


def check_target(options: Options, target: Any) -> None:
    """Raise ConfigError for a target that nothing would use."""
    if target is not None and options.loss_fn is None:
        raise ConfigError(
            "a target was given, but there is no loss_fn to use it",
            remedy="give loss_fn=, or pass it to the model under its own name "
            "(step_call(args, kwargs) for an argument called target)",
        )


def check_older_weights(schedule: str, *, updates: bool) -> None:
    """Refuse calls and options without updates under a schedule that runs on older weights."""
    if not updates:
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


def check_loss_fn(loss_fn: Any) -> None:
    """Raise ConfigError unless it can be called as ``loss_fn(output, target)``, or is None."""
    if loss_fn is None:
        return
    form = "give (output, target) -> scalar, or None where the model returns its loss"
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn is {_shown(loss_fn)}, which cannot be called", remedy=form)
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise ConfigError(
            f"loss_fn is the class {name}; calling a class makes an instance, not a loss",
            remedy=f"give an instance: loss_fn={name}()",
        )
    _takes("loss_fn", loss_fn, ("output", "target"))


def _optimizer(given: Any) -> None:
    form = "partial(torch.optim.AdamW, lr=3e-4), or None"
    if given is None:
        return
    if hasattr(given, "param_groups"):
        name = type(given).__name__
        raise ConfigError(
            f"optimizer is an instance of {name}; every rank makes one for its own parameters",
            remedy=f"give what makes it, without parameters: partial(torch.optim.{name}, lr=…)",
        )
    if not callable(given):
        raise ConfigError(
            f"optimizer is {_shown(given)}, which cannot be called", remedy=f"give {form}"
        )
    _takes("optimizer", given, ("parameters",))


def _takes(name: str, function: Any, arguments: tuple[str, ...]) -> None:
    """Refuse a function that cannot be called with these positional arguments."""
    called = getattr(function, "forward", function)  # of an nn.Module, whose call takes anything
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # not every builtin has one
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        wanted = ", ".join(arguments)
        raise ConfigError(
            f"{name} takes {signature}, but is called with ({wanted}): {error}",
            remedy=f"let it take ({wanted}), used or not: lambda {wanted}: …",
        ) from None


def _shown(given: Any) -> str:
    return repr(given) if len(repr(given)) < 60 else f"an object of class {type(given).__name__}"


def _group(given: Any) -> None:
    if given is None:
        return
    import torch.distributed as dist

    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "this process is not a member of group", remedy="compile on the group's ranks only"
        )
    if not isinstance(given, dist.ProcessGroup):
        raise ConfigError(
            f"group={given!r} is not a process group", remedy="torch.distributed.new_group([0, 1])"
        )


def _number(name: str, given: Any, *, integer: bool = False, least: float | None = None) -> None:
    if given is None:
        return
    kinds = (int,) if integer else (int, float)
    if isinstance(given, bool) or not isinstance(given, kinds):
        number = "a whole number" if integer else "a number"
        raise ConfigError(f"{name}={given!r} is not {number}", remedy=f"give {name} {number}")
    if least is not None and not given >= least:
        raise ConfigError(f"{name}={given!r} is below {least}", remedy=f"{least} or more")


def _one_of(name: str, given: Any, known: tuple[Any, ...], or_else: str = "") -> None:
    if not any(given is one or (type(given) is type(one) and given == one) for one in known):
        raise ConfigError(
            f"{name}={given!r} is not a valid value",
            remedy=did_you_mean(str(given), [one for one in known if isinstance(one, str)])
            + f"one of {', '.join(map(repr, known))}{or_else}",
        )
