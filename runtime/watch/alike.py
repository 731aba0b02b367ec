"""Facts that all ranks of a pipeline have to have alike, as short texts that they compare.

Rank 0 captures, plans and generates the stages, and every rank runs them: where another one built
another model, or was given another loss, learning rate or number of microbatches, its own would be
passed over in silence.  Texts say what counts and leave out what a rank may have of its own:
devices, loggers, hooks, paths, values of weights, what closures hold.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import platform
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.batch import FlatCall
from pdcompile.cluster import HOST_KIND
from pdcompile.compiled import Compiled
from pdcompile.eager.autocast import autocast_text
from pdcompile.eager.loss_scale import scaler_of
from pdcompile.eager.optimizers import make_optimizer
from pdcompile.eager.randomness import preserved_rng
from pdcompile.eager.snapshot import attribute
from pdcompile.errors import InfeasibleError
from pdcompile.options import Options
from pdcompile.options.table import ROWS
from pdcompile.runtime.transport.launch import from_rank0
from pdcompile.runtime.transport.start_up import LOOSE, MAYBE, StartUp
from pdcompile.runtime.watch.attribute_watch import owners
from pdcompile.runtime.watch.optimizer_watch import small_copy
from pdcompile.runtime.watch.same_model import beside_error, check_alike
from pdcompile.weights.source import slots

_PLACES = re.compile(r"^(cpu|cuda|xpu|mps|hip|meta)(:\d+)?$|/|\\")  # devices and paths
_KERNELS = ("foreach", "fused", "capturable", "differentiable", "params", "param_names")
_CODE = f"under Python {platform.python_version()}"
_ITEMS, _DEPTH, _LONGEST = 50, 4, 120

Facts = dict[str, str]


def compiled_alike(
    start: StartUp,
    model: nn.Module,
    options: Options,
    flat: FlatCall | None,
    build: Callable[[nn.Module, Any, Options, int], Compiled],
) -> Compiled:
    """Result of rank 0's build, on every rank, of a program that is the same on all of them.

    Raises:
        LaunchError: it is not, on every rank; RankError: rank 0 has raised something else.
    """
    start.compare("program", facts_of_start(model, options, flat))
    try:
        compiled = from_rank0(start, lambda: build(model, flat, options, start.size))
    except InfeasibleError as error:
        if not options.held:
            raise
        raise beside_error(error) from error
    check_alike(compiled, options)
    read = compiled.capture.attributes
    start.compare("read", facts_of_reads(model, options.loss_fn, read, start.rank))
    return compiled


def facts_of_start(model: nn.Module, options: Options, flat: FlatCall | None) -> Facts:
    """Facts that are compared before the build: options, model, loss, optimizer, example."""
    found = {
        f"option {name}": text(getattr(options, name)) for name, row in ROWS.items() if row.compared
    }
    if callable(options.loss_reduction):
        found |= _of_code("loss_reduction", options.loss_reduction)
    found["option autocast"] = str(autocast_text(options.autocast, HOST_KIND)).rpartition(":")[2]
    scaler = scaler_of(options.grad_scaler)
    found["option grad_scaler"] = str(None if scaler is None else scaler.state_dict())
    found["option outputs"] = "'all'" if options.outputs == "all" else "not 'all'"
    found |= _of_modules("", model)
    loss_fn = options.loss_fn
    found |= _of_modules("loss_fn", loss_fn) if isinstance(loss_fn, nn.Module) else _of_code(
        "the loss function", loss_fn
    )  # fmt: skip
    found |= _of_optimizer(options.optimizer, model)
    leaves = {} if flat is None else flat.leaves
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    for path, leaf in tensors.items():
        found[f"input {path} of the first minibatch{MAYBE}"] = _shape(leaf)
    return found


def facts_of_reads(
    model: nn.Module, loss_fn: Any, places: Iterable[tuple[str, ...]], rank: int
) -> Facts:
    """Facts that are compared once rank 0 has captured the model: attributes that forward read.

    A value that may be the rank's number, or tell whether it is rank 0, may be there for a log, and
    so may None and a function of the user's.
    """
    number, found = rf"(?<![\d.])0*{rank}(?![\d.])", {}
    read = [*owners(model, loss_fn, places)]
    by_attribute = {id(owner) for owner, *_ in read}  # of which each is compared that was read
    for owner, name, path, _ in read:
        value = attribute(owner, name)
        said = "" if id(value) in by_attribute else text(value)
        loose = value is None or said == str(rank == 0) or bool(re.search(number, said))
        loose = loose or (isinstance(value, _NAMED) and not said.startswith(_LIBRARIES))
        found[f"{path}{MAYBE}"] = f"{LOOSE * loose}{said}" if said else ""
    return found


_NAMED = (type, FunctionType, BuiltinFunctionType, functools.partial, MethodType)
_LIBRARIES = ("torch.", "math.", "operator.")


def text(value: Any, depth: int = 0) -> str:
    """A value as a text that is equal for equal values; "" for what may differ."""
    if isinstance(value, str):
        return "" if _PLACES.search(value) else repr(value)[:_LONGEST]
    if value is None or isinstance(value, int | float | complex | bytes | torch.dtype | enum.Enum):
        return repr(value)[:_LONGEST]
    if isinstance(value, _NAMED):
        return _named(value, depth)
    if isinstance(value, tuple | list | set | frozenset | dict):
        return _items(value, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, PurePath):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return type(value).__qualname__ + _items(fields, depth)
    return ""


def _items(value: Any, depth: int) -> str:
    if depth >= _DEPTH:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        pairs = [*value.items()][:_ITEMS]
        said = [f"{text(key)}: {text(one, depth + 1)}" for key, one in pairs]
    else:
        said = [text(one, depth + 1) for one in [*value][:_ITEMS]]
        said = sorted(said) if isinstance(value, set | frozenset) else said
    said += [f"… {len(value)} in all"] if len(value) > _ITEMS else []
    plain = ", ".join(said)
    return f"[{plain}]" if isinstance(value, list) else f"({plain})"


def _named(value: Any, depth: int = 0) -> str:
    """The name of a function or class, with the arguments of a partial one."""
    if isinstance(value, functools.partial):
        given = [*map(text, value.args)]
        given += [f"{name}={text(one, depth + 1)}" for name, one in value.keywords.items()]
        return f"partial({', '.join([_named(value.func), *given])})"
    home = str(getattr(value, "__module__", None) or "builtins")
    return f"{home}.{getattr(value, '__qualname__', value)}"


def _of_modules(root: str, model: nn.Module) -> Facts:
    """Classes, code and tensors of a model's modules; of torch's own also their numbers."""
    found: Facts = {}
    classes: dict[type, None] = {}
    arguments: dict[type, frozenset[str]] = {}  # layers are alike
    modules = dict(model.named_modules())
    for path, module in modules.items():
        kind = type(module)
        classes.update(dict.fromkeys(kind.__mro__))
        parent = type(modules[path.rpartition(".")[0]])
        # A rank may have one of its own that counts or logs: no tensors, no place in a container.
        tensors = next(module.parameters(), next(module.buffers(), None))
        own = path and tensors is None and not _of_torch(kind) and not _of_torch(parent)
        place = f"module {'.'.join(filter(None, (root, path))) or 'itself'}"
        said = kind.__qualname__
        if _of_torch(kind):
            if kind not in arguments:  # other attributes of torch's modules are the user's
                arguments[kind] = frozenset(inspect.signature(kind).parameters)
            numbers = {n: text(v) for n, v in vars(module).items() if n in arguments[kind]}
            shown = [f"{n}={said}" for n, said in numbers.items() if said]
            said += f"({', '.join(shown)})" if shown else ""
        if module.training != model.training:
            said += ", in evaluation mode" if model.training else ", in training mode"
        found[place + (MAYBE if own else "")] = said
    for kind in classes:
        if not _of_torch(kind) and kind is not object:
            for name, member in vars(kind).items():
                found |= _of_code(f"{kind.__qualname__}.{name}", member, only_code=True)
    for fqn, slot in slots(model).items():
        name = ".".join(filter(None, (root, fqn)))
        grad = ", trained" if slot.tensor.requires_grad else ""
        tied = f", also {', '.join(slot.names[1:])}" if slot.names[1:] else ""
        found[f"tensor {name}"] = _shape(slot.tensor) + grad + tied
    return found


def _of_torch(one: Any) -> bool:
    """True if a class or function is torch's own."""
    return (one.__module__ or "").partition(".")[0] == "torch"


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _of_code(what: str, given: Any, *, only_code: bool = False) -> Facts:
    """The name of a function (or of the class of what is called), and a digest of its code."""
    function, found = given, {}
    if isinstance(function, staticmethod | classmethod | MethodType):
        function = function.__func__
    if isinstance(function, property):
        function = function.fget
    if not only_code:
        known = callable(given) and not hasattr(given, "__name__")
        other = isinstance(given, functools.partial) or given is None or not known
        found[what] = text(given) if other else _named(type(given))
        if isinstance(function, functools.partial):
            function = function.func
        elif known:
            function = type(given).__call__
    while isinstance(getattr(function, "__wrapped__", None), FunctionType):
        function = function.__wrapped__
    if isinstance(function, FunctionType) and not _of_torch(function):
        home = function.__globals__
        # Where a global name stands for one of torch's functions, it is part of the code.
        used = [text(home[name]) for name in function.__code__.co_names if name in home]
        named = [one for one in used if one.startswith("torch.")]
        found[f"the code of {what} {_CODE}{MAYBE}"] = _digest(function.__code__, *named)
    return found


def _digest(code: CodeType, *more: str) -> str:
    """A short digest of code, without files and lines."""
    parts: list[str] = [repr((code.co_code, code.co_names, code.co_freevars, more))]
    for one in code.co_consts:
        if isinstance(one, frozenset):
            parts.append(repr(sorted(map(repr, one))))
        else:
            parts.append(_digest(one) if isinstance(one, CodeType) else repr(one))
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _of_optimizer(make: Callable[..., Any] | None, model: nn.Module) -> Facts:
    """Its class, and the numbers of its parameter groups for small copies of all parameters.

    Where it cannot be made of these, its numbers are not compared.
    """
    found = {"the optimizer": "None" if make is None else "given"}
    copies = [(name, small_copy(one)) for name, one in model.named_parameters()]
    try:
        with preserved_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = make_optimizer(make, copies)
    except Exception:  # of any class: the user's code may want the true parameters, and gets them
        return found
    if made is None:
        return found
    found |= _of_code(f"{type(made).__qualname__}.step", type(made).step, only_code=True)
    found[f"the class of the optimizer{MAYBE}"] = _named(type(made))
    found[f"the number of parameter groups{MAYBE}"] = str(len(made.param_groups))
    for number, group in enumerate(made.param_groups):
        found[f"parameters in group {number}{MAYBE}"] = str(len(group["params"]))
        for name, value in group.items():
            if name not in _KERNELS:
                plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                found[f"{name} of parameter group {number}{MAYBE}"] = text(plain)
    return found
