"""Checks of one value each: what an option cannot be, whatever model and minibatch are.

Each is called with the name of an option and a value; `refuse` raises for the first finding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pdcompile.cluster import Cluster
from pdcompile.clusters import FORMS, cluster_of
from pdcompile.errors import ConfigError, did_you_mean
from pdcompile.files import is_path
from pdcompile.parts.shard import Split
from pdcompile.problem.constraints import KNOWN, Constraint
from pdcompile.units import parse_bytes

SEARCHED = ("1", "equal", "any")  # replicas that the planner decides, and how many stages there are
SPLITS = get_args(Split)[1:]
OUTPUTS = ("none", "evaluation", "last", "everything", "all")

#: what is wrong with a value of an option, by its name, and what to do
Finding = tuple[str, str]
Check = Callable[[str, Any], Iterable[Finding]]


def refuse(found: Iterable[Finding]) -> None:
    """Raise ConfigError for the first thing that is wrong."""
    for message, remedy in found:
        raise ConfigError(message, remedy=remedy)


def one_of(*known: Any, or_else: str = "") -> Check:
    """Check for one of some values, which are of the same type too."""

    def check(name: str, given: Any) -> Iterator[Finding]:
        if not any(given is one or (type(given) is type(one) and given == one) for one in known):
            meant = did_you_mean(str(given), [one for one in known if isinstance(one, str)])
            remedy = f"{meant}one of {', '.join(map(repr, known))}{or_else}"
            yield f"{name}={given!r} is not a valid value", remedy

    return check


def number(*, integer: bool = False, least: float | None = None) -> Check:
    """Check for None, or a number of at least so much."""

    def check(name: str, given: Any) -> Iterator[Finding]:
        if given is None:
            return
        if isinstance(given, bool) or not isinstance(given, int if integer else int | float):
            kind = "a whole number" if integer else "a number"
            yield f"{name}={given!r} is not {kind}", f"give {name} {kind}"
        elif least is not None and not given >= least:
            yield f"{name}={given!r} is below {least}", f"{least} or more"

    return check


def backend(name: str, given: Any) -> Iterator[Finding]:
    """Check for None, or what torch.compile takes as a backend."""
    if given is None or callable(given):
        return
    import torch

    if given not in (known := torch.compiler.list_backends(())):
        usual = ["aot_eager", *torch.compiler.list_backends()]
        message = f"{name}={given!r} is not a backend of torch.compile"
        remedy = f"{did_you_mean(str(given), known)}one of {', '.join(map(repr, usual))}"
        yield message, f"{remedy}, or a function of a graph module and its inputs"


def norm(name: str, given: Any) -> Iterator[Finding]:
    """Check for None, or a positive, finite number."""
    yield from number()(name, given)
    if given is not None and not 0 < given < float("inf"):
        message = f"{name}={given!r} is not a positive, finite number"
        yield message, "for example 1.0; None for no clipping"


def count(otherwise: str) -> Check:
    """Check for a number from 1 up, or what `otherwise` begins with: None or 'auto'."""

    def check(name: str, given: Any) -> Iterator[Finding]:
        if given in (None, "auto") and otherwise.startswith(repr(given)):
            return
        whole = isinstance(given, int) and not isinstance(given, bool)
        if not whole or given < 1:
            problem = "below 1" if whole else "not a whole number"
            remedy = f"a whole number from 1 up, such as {name}=4, or {otherwise}"
            yield f"{name}={given!r} is {problem}", remedy

    return check


def path(made: str) -> Check:
    """Check for None, or a path of what is `made` so."""

    def check(name: str, given: Any) -> Iterator[Finding]:
        if not (given is None or is_path(given)):
            yield f"{name}={given!r} is not a path", f"the path of {made}"

    return check


def plan(name: str, given: Any) -> Iterator[Finding]:
    """Check for a plan or its path."""
    from pdcompile.plan import Plan

    if not isinstance(given, Plan):
        yield from path("a plan.json, or a Plan")(name, given)


def loss_fn(name: str, given: Any) -> Iterator[Finding]:
    """Check for what can be called as ``loss_fn(output, target)``, or None."""
    if given is None:
        return
    if not callable(given):
        form = "give (output, target) -> scalar, or None where the model returns its loss"
        yield f"{name} is {_shown(given)}, which cannot be called", form
    if isinstance(given, type):
        message = f"{name} is the class {given.__name__}; calling a class makes an instance, not a "
        yield f"{message}loss", f"give an instance: {name}={given.__name__}()"
    yield from _takes(name, given, "output", "target")


def loss_reduction(name: str, given: Any) -> Iterator[Finding]:
    """Check for the name of a reduction, or a function that counts items."""
    if callable(given):
        yield from _takes(name, given, "args", "kwargs", "target")
        return
    other = ", or a function (args, kwargs, target) -> number of items"
    yield from one_of("mean", "sum", or_else=other)(name, given)


def optimizer(name: str, given: Any) -> Iterator[Finding]:
    """Check for what makes an optimizer of parameters, or None."""
    if given is None:
        return
    if hasattr(given, "param_groups"):
        kind = type(given).__name__
        message = f"{name} is an instance of {kind}; every rank makes one for its own parameters"
        remedy = f"give what makes it, without parameters: partial(torch.optim.{kind}, lr=…)"
        yield message, remedy
    if not callable(given):
        message = f"{name} is {_shown(given)}, which cannot be called"
        yield message, "give partial(torch.optim.AdamW, lr=3e-4), or None"
    yield from _takes(name, given, "parameters")


def recompute(name: str, given: Any) -> Iterator[Finding]:
    """Check for a bool, one for each stage, or "auto"."""
    several = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    known = all(isinstance(one, bool) for one in (given if several else [given]))
    if given != "auto" and not known:
        remedy = "False, True, 'auto' (the planner decides), or one of these for each stage: "
        yield f"{name}={given!r} says of no stage whether it recomputes", f"{remedy}(True, False)"


def replicas(name: str, given: Any) -> Iterator[Finding]:
    """Check for a number, one for each stage, or how the planner decides."""
    many = isinstance(given, tuple) and bool(given)
    for one in given if many else (given,):
        whole = isinstance(one, int) and not isinstance(one, bool) and one >= 1
        if not whole and (many or given not in SEARCHED):
            remedy = "a number for every stage (2), one for each ((3, 1)), 'equal' or 'any'"
            yield f"{name}={given!r} does not say how many replicas a stage has", remedy


def parts(name: str, given: Any) -> Iterator[Finding]:
    """Check for a number of parts, of all stages or of each, where others than whole ones agree;
    "any": the planner chooses."""
    if given == "any":
        return
    many = given if isinstance(given, tuple) and given else (given,)
    for one in many:
        yield from count("1: stages whole")(name, one)
    if len(numbers := {*many} - {1}) > 1:
        yield (
            f"{name}={given!r} has stages of {' and of '.join(map(str, sorted(numbers)))} parts",
            "one number for the stages that are divided, and 1 for those that are whole: (2, 1)",
        )


def constraints(name: str, given: Any) -> Iterator[Finding]:
    """Check for a list of constraints."""
    known = f"a list of {KNOWN}; () for none"
    if not isinstance(given, Sequence) or isinstance(given, str):
        yield f"{name}={given!r} is not a list", known
    for one in given:
        if not isinstance(one, Constraint):
            yield f"{one!r} in {name}= is not a constraint", known


def cluster(name: str, given: Any) -> Iterator[Finding]:
    """Check for machines, or text that describes some; a file is not read yet."""
    if isinstance(given, str | Path):
        text = str(given)
        if text != "auto" and not text.endswith(".toml"):
            cluster_of(text)
    elif not isinstance(given, Cluster):
        hint = f"; for {given} stages: stages={given}" if type(given) is int and given > 0 else ""
        yield f"{name}={given!r} is not a cluster", f"Cluster.local(4), {FORMS}{hint}"


def memory(name: str, given: Any) -> Iterable[Finding]:
    """Check for None, or a number of bytes, which its parser makes."""
    if given is not None:
        parse_bytes(given, what=name)
    return ()


def batch_dims(name: str, given: Any) -> Iterable[Finding]:
    """Check for dimensions of inputs."""
    from pdcompile.batch import check_batch_dims

    check_batch_dims(given)
    return ()


def autocast(name: str, given: Any) -> Iterable[Finding]:
    """Check for a dtype that autocast casts to, or a region of it."""
    from pdcompile.eager.autocast import autocast_text

    autocast_text(given)
    return ()


def group(name: str, given: Any) -> Iterator[Finding]:
    """Check for a process group that has this process."""
    if given is None:
        return
    import torch.distributed as dist

    if given is dist.GroupMember.NON_GROUP_MEMBER:
        yield f"this process is not a member of {name}", "compile on the group's ranks only"
    if not isinstance(given, dist.ProcessGroup):
        message = f"{name}={given!r} is not a process group"
        yield message, "torch.distributed.new_group([0, 1])"


def _takes(name: str, function: Any, *arguments: str) -> Iterator[Finding]:
    """Check for a function that can be called with these positional arguments."""
    called = getattr(function, "forward", function)  # of an nn.Module, whose call takes anything
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # not every builtin has one
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        wanted = ", ".join(arguments)
        message = f"{name} takes {signature}, but is called with ({wanted}): {error}"
        yield message, f"let it take ({wanted}), used or not: lambda {wanted}: …"


def _shown(given: Any) -> str:
    return repr(given) if len(repr(given)) < 60 else f"an object of class {type(given).__name__}"
