"""The arguments of a call, and its target, as leaves named by path."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pdcompile.errors import ConfigError, InputError, did_you_mean
from pdcompile.releases.torch_internals import pytree

TARGET = "target"
DEFAULT = object()  # in a prefix of batch dimensions: the default rule


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter of forward (or one ``**kwargs`` entry, `key`) and the leaves below it."""

    parameter: str
    key: str | None
    root: str  # path of the whole argument; leaves' paths begin with it
    tree: pytree.TreeSpec
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallSpec:
    """The structure of a call: equal for calls that differ in the leaves' values only, or in
    what is passed by keyword."""

    arguments: tuple[Argument, ...]
    target: Argument
    signature: inspect.Signature = field(compare=False, repr=False)


EVALUATION = -1


class Whole(NamedTuple):
    """A minibatch of which a call has a part: its samples, and a digest of their order.

    `turn`: which minibatch of the training it has to be, where replicas take them in turn
    (EVALUATION: none); None: any call.
    """

    size: int
    order: int
    turn: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FlatCall:
    """A flattened call: path -> tensor, or constant (any other value, None included).

    Paths: the parameter's name in forward and the way through containers: ``x``,
    ``batch['ids']``, ``pair[0]``, ``point.x`` (named tuples), ``args[1]`` for ``*args``, the
    keyword itself for ``**kwargs`` (``kwargs['a']`` where a positional-only parameter has the
    same name).  The loss target is ``target``; a parameter of forward with that name is
    ``forward.target``.  Defaults that were not passed are not leaves.
    `whole`: the leaves have the samples of some microbatches of this alone.
    """

    leaves: dict[str, Any]
    spec: CallSpec
    whole: Whole | None = None

    def unflatten(
        self, leaves: Mapping[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """(args, kwargs, target) with the given leaves in place (default: the call's own).

        Raises:
            InputError: a path of the call is not among the leaves.
        """
        values = self.leaves if leaves is None else leaves
        bound = inspect.BoundArguments(self.spec.signature, {})
        for argument in self.spec.arguments:
            value = rebuild(argument, values)
            if argument.key is None:
                bound.arguments[argument.parameter] = value
            else:
                bound.arguments.setdefault(argument.parameter, {})[argument.key] = value
        return bound.args, bound.kwargs, rebuild(self.spec.target, values)

    def root(self, path: str) -> str:
        """The argument, as batch_dims names it, that a leaf belongs to."""
        every = (*self.spec.arguments, self.spec.target)
        return next(argument.root for argument in every if path in argument.paths)


def copied(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of a call, tensors copied: a model may write into its inputs."""
    return {
        path: leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, Tensor) else leaf
        for path, leaf in leaves.items()
    }  # fmt: skip


def flatten_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any = None,
    *,
    signature: inspect.Signature | None = None,
) -> FlatCall:
    """Names every leaf of ``model(*args, **kwargs)`` and of the target.

    `signature`: of forward; None: the model's.

    Raises:
        InputError: the call does not fit forward, or a leaf hides tensors from pytrees.
    """
    name = type(model).__name__
    signature = signature or inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        surplus = [key for key in kwargs if key not in signature.parameters]
        open_ones = [p for p in signature.parameters if p not in kwargs][len(args) :]
        hint = "".join(did_you_mean(key, open_ones) for key in surplus[:1])
        if surplus and len(open_ones) == 1 and not hint:
            hint = (
                f"a dict holds keyword arguments: where forward takes it as its {open_ones[0]!r}, "
                "give it in a tuple, (batch,); or "
            )
        raise InputError(
            f"the call does not fit the model's forward: {error}",
            where=f"{name}.forward{signature}",
            remedy=hint
            + "pass the arguments that the model takes; those of the loss alone are passed as "
            "target=",
        ) from None
    leaves: dict[str, Any] = {}
    arguments: list[Argument] = []
    for parameter, value in bound.arguments.items():
        kind = signature.parameters[parameter].kind
        if kind is not inspect.Parameter.VAR_KEYWORD:
            root = f"forward.{parameter}" if parameter == TARGET else parameter
            arguments.append(_argument(parameter, None, root, value, leaves))
            continue
        for key, entry in value.items():
            root = f"{parameter}[{key!r}]" if key in signature.parameters else key
            root = f"forward.{key}" if key == TARGET else root
            arguments.append(_argument(parameter, key, root, entry, leaves))
    loss_target = _argument(TARGET, None, TARGET, target, leaves)
    bare = [path for path, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.is_meta]
    if bare and not all(one.is_meta for one in model.parameters()):  # else it is only planned
        raise InputError("a meta tensor has no values", where=bare[0], remedy="pass its values")
    return FlatCall(leaves, CallSpec(tuple(arguments), loss_target, signature))


def example_call(model: nn.Module, example_inputs: Any, target: Any = None) -> FlatCall:
    """The call for ``example_inputs``: a tensor is the one argument, a tuple holds positional
    arguments, a dict keyword arguments.

    Raises:
        InputError: another type, or a call that does not fit forward.
    """
    check_example(example_inputs)
    if isinstance(example_inputs, Tensor):
        return flatten_call(model, (example_inputs,), {}, target)
    if isinstance(example_inputs, Mapping):
        return flatten_call(model, (), example_inputs, target)
    return flatten_call(model, example_inputs, {}, target)


def empty_call(model: nn.Module, whole: Whole) -> FlatCall:
    """The call of a process that reads nothing of a minibatch."""
    target = Argument(TARGET, None, TARGET, pytree.tree_structure(None), ())
    return FlatCall({}, CallSpec((), target, inspect.signature(model.forward)), whole)


def as_one_argument(given: Any) -> str:
    """The remedy where a whole batch may have been passed as forward's one argument, else ""."""
    if isinstance(given, Mapping):
        return (
            "one dict was passed as the one argument of forward: where forward takes its entries "
            "as keywords, step(**batch) passes them"
        )
    if isinstance(given, tuple | list) and any(isinstance(one, Tensor) for one in given):
        return (
            f"one {type(given).__name__} was passed as the one argument of forward: step(*batch) "
            "passes its parts one by one; for (x, y) with y for loss_fn: step(x, target=y)"
        )
    return ""


def check_example(example_inputs: Any) -> None:
    """Raises InputError unless the inputs are a tensor, a tuple or a dict."""
    if isinstance(example_inputs, Tensor | Mapping) or type(example_inputs) is tuple:
        return
    several = "tuple(x), or " * isinstance(example_inputs, list | tuple)
    raise InputError(
        f"example_inputs is of type {type(example_inputs).__name__}: it is to be a tensor, a tuple "
        "of forward's positional arguments, or a dict of its keyword arguments",
        remedy=f"example_inputs={several}(x,) where it is one argument",
    )


def _argument(
    parameter: str, key: str | None, root: str, value: Any, leaves: dict[str, Any]
) -> Argument:
    found = [(path, leaf) for path, leaf, _ in walk(value, root, DEFAULT)]
    for path, leaf in found:
        wrong = _unusable(leaf)
        if path in leaves:
            wrong = "two inputs have the same path", "give one of the keys another name"
        if wrong is not None:
            raise InputError(wrong[0], where=path, remedy=wrong[1])
        leaves[path] = leaf
    tree = pytree.tree_structure(value)
    return Argument(parameter, key, root, tree, tuple(path for path, _ in found))


def walk(value: Any, path: str, prefix: Any) -> Iterator[tuple[str, Any, Any]]:
    """(path, leaf, batch dimension asked for) in the order of pytree's leaves."""
    children = children_of(value)
    if children is None:
        if not (prefix is DEFAULT or is_dim(prefix)):
            raise _misfit(path, prefix)
        yield path, value, prefix
        return
    prefixes = _child_prefixes(prefix, [key for key, _, _ in children], path)
    for (_, name, child), below in zip(children, prefixes, strict=True):
        yield from walk(child, path + name, below)


def children_of(value: Any) -> list[tuple[Any, str, Any]] | None:
    """(key, its part of a path, child) for each child of a container; None for a leaf."""
    children, tree = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if tree.type is None:
        return None
    if isinstance(value, Mapping) and len(value) == len(children):
        return [(key, f"[{key!r}]", child) for key, child in zip(value, children, strict=True)]
    if pytree.is_namedtuple_instance(value):
        named = zip(value._fields, children, strict=True)
        return [(i, f".{name}", child) for i, (name, child) in enumerate(named)]
    return [(i, f"[{i}]", child) for i, child in enumerate(children)]


def _child_prefixes(prefix: Any, keys: list[Any], path: str) -> list[Any]:
    if prefix is DEFAULT or is_dim(prefix):
        return [prefix] * len(keys)
    if isinstance(prefix, Mapping) and set(prefix) <= set(keys):
        return [prefix.get(key, DEFAULT) for key in keys]
    if isinstance(prefix, tuple | list) and keys == list(range(len(prefix))):
        return list(prefix)
    raise _misfit(path, prefix)


def _misfit(path: str, prefix: Any) -> ConfigError:
    return ConfigError(
        f"batch_dims={prefix!r} does not fit the structure of this argument",
        where=path,
        remedy="use an int or None, or a container of the same keys",
    )


def rebuild(argument: Argument, leaves: Mapping[str, Any]) -> Any:
    """The argument's own container with the given leaves."""
    missing = [path for path in argument.paths if path not in leaves]
    if missing:
        raise InputError(
            "an input of the model is missing",
            where=", ".join(missing),
            remedy="pass the same arguments in every call",
        )
    return pytree.tree_unflatten([leaves[path] for path in argument.paths], argument.tree)


def _unusable(leaf: Any) -> tuple[str, str] | None:
    """Fault of a leaf that is no plain tensor or hides tensors, and its remedy; None: none."""
    if isinstance(leaf, Tensor):
        if leaf.is_nested or leaf.is_quantized:
            found = f"a {'nested' if leaf.is_nested else 'quantized'} tensor cannot be captured"
            return found, "pass a plain one: padded with a mask, or dequantized"
        if leaf.layout is not torch.strided:
            found = f"a tensor of layout {leaf.layout} cannot be split into microbatches"
            return found, "pass its values and indices as dense tensors and build it in forward"
        return None
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "ndim") and leaf.ndim > 0:
        found = f"a numpy array of shape {leaf.shape} cannot be split or differentiated"
        return found, "pass torch.from_numpy(array)"
    mapping = isinstance(leaf, Mapping)
    inside = list(leaf.values()) if mapping else []
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        inside += [getattr(leaf, one.name, None) for one in dataclasses.fields(leaf)]
    if not any(isinstance(part, Tensor) for part in inside):
        return None
    kind = type(leaf).__qualname__
    whole = "step(**batch) passes its entries by keyword; or " if mapping else ""
    way = "utils._pytree.register_pytree_node" if mapping else "export.register_dataclass"
    return (
        f"tensors are hidden inside an object of class {kind}",
        f"{whole}pass a plain dict or tuple, or register {kind} with torch.{way}",
    )


def is_dim(prefix: Any) -> bool:
    """True if an entry of batch_dims is a dimension, or None for no splitting."""
    return prefix is None or (isinstance(prefix, int) and not isinstance(prefix, bool))
