"""Checks of one value each: what an option cannot be, whatever model and minibatch are.

Each is called with the option's name and a value, and raises ConfigError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdcompile.cluster import Cluster
from pdcompile.clusters import FORMS, cluster_of
from pdcompile.errors import ConfigError, did_you_mean
from pdcompile.files import is_path
from pdcompile.problem.constraints import KNOWN, Constraint
from pdcompile.units import parse_bytes

SEARCHED = ("1", "equal", "any")  # replicas that the planner decides, and how many stages there are
SPLITS = ("auto", "width", "width+sequence", "sequence", "context", "samples")
OUTPUTS = ("none", "evaluation", "last", "everything", "all")

Check = Callable[[str, Any], None]


def one_of(*known: Any, or_else: str = "") -> Check:
    """Check for one of some values, which are of the same type too."""

    def check(name: str, given: Any) -> None:
        if not any(given is one or (type(given) is type(one) and given == one) for one in known):
            raise ConfigError(
                f"{name}={given!r} is not a valid value",
                remedy=did_you_mean(str(given), [one for one in known if isinstance(one, str)])
                + f"one of {', '.join(map(repr, known))}{or_else}",
            )

    return check


def number(*, integer: bool = False, least: float | None = None) -> Check:
    """Check for None, or a number of at least so much."""

    def check(name: str, given: Any) -> None:
        if given is None:
            return
        kinds = (int,) if integer else (int, float)
        if isinstance(given, bool) or not isinstance(given, kinds):
            kind = "a whole number" if integer else "a number"
            raise ConfigError(f"{name}={given!r} is not {kind}", remedy=f"give {name} {kind}")
        if least is not None and not given >= least:
            raise ConfigError(f"{name}={given!r} is below {least}", remedy=f"{least} or more")

    return check


def norm(name: str, given: Any) -> None:
    """Check for None, or a positive, finite number."""
    number()(name, given)
    if given is not None and not 0 < given < float("inf"):
        raise ConfigError(
            f"{name}={given!r} is not a positive, finite number",
            remedy="for example 1.0; None for no clipping",
        )


def count(otherwise: str) -> Check:
    """Check for a number from 1 up, or what `otherwise` begins with: None or 'auto'."""

    def check(name: str, given: Any) -> None:
        if (given is None and otherwise.startswith("None")) or (
            given == "auto" and otherwise.startswith("'auto'")
        ):
            return
        whole = isinstance(given, int) and not isinstance(given, bool)
        if not whole or given < 1:
            problem = "below 1" if whole else "not a whole number"
            raise ConfigError(
                f"{name}={given!r} is {problem}",
                remedy=f"a whole number from 1 up, such as {name}=4, or {otherwise}",
            )

    return check


def path(made: str) -> Check:
    """Check for None, or a path of what is `made` so."""

    def check(name: str, given: Any) -> None:
        if not (given is None or is_path(given)):
            raise ConfigError(f"{name}={given!r} is not a path", remedy=f"the path of {made}")

    return check


def plan(name: str, given: Any) -> None:
    """Check for a plan or its path."""
    from pdcompile.plan import Plan

    if not isinstance(given, Plan):
        path("a plan.json, or a Plan")(name, given)


def loss_fn(name: str, given: Any) -> None:
    """Check for what can be called as ``loss_fn(output, target)``, or None."""
    if given is None:
        return
    form = "give (output, target) -> scalar, or None where the model returns its loss"
    if not callable(given):
        raise ConfigError(f"{name} is {_shown(given)}, which cannot be called", remedy=form)
    if isinstance(given, type):
        raise ConfigError(
            f"{name} is the class {given.__name__}; calling a class makes an instance, not a loss",
            remedy=f"give an instance: {name}={given.__name__}()",
        )
    _takes(name, given, "output", "target")


def loss_reduction(name: str, given: Any) -> None:
    """Check for the name of a reduction, or a function that counts items."""
    if callable(given):
        _takes(name, given, "args", "kwargs", "target")
        return
    one_of("mean", "sum", or_else=", or a function (args, kwargs, target) -> number of items")(
        name, given
    )


def optimizer(name: str, given: Any) -> None:
    """Check for what makes an optimizer of parameters, or None."""
    if given is None:
        return
    if hasattr(given, "param_groups"):
        kind = type(given).__name__
        raise ConfigError(
            f"{name} is an instance of {kind}; every rank makes one for its own parameters",
            remedy=f"give what makes it, without parameters: partial(torch.optim.{kind}, lr=…)",
        )
    if not callable(given):
        raise ConfigError(
            f"{name} is {_shown(given)}, which cannot be called",
            remedy="give partial(torch.optim.AdamW, lr=3e-4), or None",
        )
    _takes(name, given, "parameters")


def recompute(name: str, given: Any) -> None:
    """Check for a bool, one for each stage, or "auto"."""
    several = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    if given == "auto" or all(isinstance(one, bool) for one in (given if several else [given])):
        return
    raise ConfigError(
        f"{name}={given!r} says of no stage whether it recomputes",
        remedy="False, True, 'auto' (the planner decides), or one of these for each stage: "
        "(True, False)",
    )


def replicas(name: str, given: Any) -> None:
    """Check for a number, one for each stage, or how the planner decides."""
    many = isinstance(given, tuple) and bool(given)
    for one in given if many else (given,):
        whole = isinstance(one, int) and not isinstance(one, bool) and one >= 1
        if not whole and (many or given not in SEARCHED):
            raise ConfigError(
                f"{name}={given!r} does not say how many replicas a stage has",
                remedy="a number for every stage (2), one for each ((3, 1)), 'equal' or 'any'",
            )


def parts(name: str, given: Any) -> None:
    """Check for a number of parts, the same for all stages."""
    for one in given if isinstance(given, tuple) and given else (given,):
        count("1: stages whole")(name, one)
    if isinstance(given, tuple):
        raise ConfigError(
            f"{name}={given!r} is not the same number for each of the stages",
            remedy="one number for all stages (2): stages of unlike numbers of parts are not "
            "supported; replicas= may differ by stage",
        )


def constraints(name: str, given: Any) -> None:
    """Check for a list of constraints."""
    known = f"a list of {KNOWN}; () for none"
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"{name}={given!r} is not a list", remedy=known)
    for one in given:
        if not isinstance(one, Constraint):
            raise ConfigError(f"{one!r} in {name}= is not a constraint", remedy=known)


def cluster(name: str, given: Any) -> None:
    """Check for machines, or text that describes some; a file is not read yet."""
    if isinstance(given, str | Path):
        text = str(given)
        if text != "auto" and not text.endswith(".toml"):
            cluster_of(text)
    elif not isinstance(given, Cluster):
        hint = f"; for {given} stages: stages={given}" if type(given) is int and given > 0 else ""
        raise ConfigError(
            f"cluster={given!r} is not a cluster", remedy=f"Cluster.local(4), {FORMS}{hint}"
        )


def memory(name: str, given: Any) -> None:
    """Check for None, or a number of bytes."""
    if given is not None:
        parse_bytes(given, what=name)


def batch_dims(name: str, given: Any) -> None:
    """Check for dimensions of inputs."""
    from pdcompile.batch import check_batch_dims

    check_batch_dims(given)


def autocast(name: str, given: Any) -> None:
    """Check for a dtype that autocast casts to, or a region of it."""
    from pdcompile.eager.autocast import autocast_text

    autocast_text(given)


def group(name: str, given: Any) -> None:
    """Check for a process group that has this process."""
    if given is None:
        return
    import torch.distributed as dist

    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"this process is not a member of {name}", remedy="compile on the group's ranks only"
        )
    if not isinstance(given, dist.ProcessGroup):
        raise ConfigError(
            f"{name}={given!r} is not a process group", remedy="torch.distributed.new_group([0, 1])"
        )


def _takes(name: str, function: Any, *arguments: str) -> None:
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
