"""ModuleTable: the model's modules and tensors by name, and constructors of leaf modules."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import chain, count
from typing import Any

import torch
from torch import nn

from pdcompile.eager.randomness import is_leaf
from pdcompile.errors import TraceError
from pdcompile.ir.graph import Argument, TensorInfo
from pdcompile.ir.targets import dtype_name
from pdcompile.passes.trace.preconditions import has_backward_hook
from pdcompile.passes.trace.tape.arguments import to_argument
from pdcompile.passes.trace.tape.observer import source_of_class
from pdcompile.releases.torch_internals import NoTorchFunction, no_dispatch_modes

# Constructor arguments that are not attributes of the same name, found on the instance.
_DERIVED: dict[str, Any] = {
    "bias": lambda m: m.bias if isinstance(m.bias, bool) else m.bias is not None,
    "add_bias_kv": lambda m: m.bias_k is not None,
    "kdim": lambda m: None if m.kdim == m.embed_dim else m.kdim,
    "vdim": lambda m: None if m.vdim == m.embed_dim else m.vdim,
}
_NEVER = ("device", "dtype", "_weight", "_freeze", "args", "kwargs", "size_average", "reduce")


class ModuleTable:
    """Names of all modules and tensors of a model; built once, before the model runs."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.names = {id(module): path for path, module in self.modules.items()}
        self.classes = {
            path: (qualified_name(type(module)), source_of_class(type(module)))
            for path, module in self.modules.items()
        }
        self.tensors: dict[str, TensorInfo] = {}
        self.fqns: dict[int, str] = {}  # id of parameter or buffer -> canonical FQN
        self.objects: dict[str, torch.Tensor] = {}
        self._fresh: list[torch.Tensor] = []
        for fqn, parameter in model.named_parameters(remove_duplicate=False):
            self._add(fqn, parameter, "parameter", True)
        for fqn, buffer in model.named_buffers(remove_duplicate=False):
            owner, _, name = fqn.rpartition(".")
            hidden = model.get_submodule(owner)._non_persistent_buffers_set
            self._add(fqn, buffer, "buffer", name not in hidden)
        self._constructors = {
            path: constructor_of(module)
            for path, module in self.modules.items()
            if path and is_leaf(module) and module.training == model.training
            if not _hooked(module) and "forward" not in vars(module)
        }
        self._attributes = {path: _attributes(self.modules[path]) for path in self._constructors}

    def _add(self, fqn: str, tensor: torch.Tensor, kind: Any, persistent: bool) -> None:
        if id(tensor) in self.fqns:
            first = self.tensors[self.fqns[id(tensor)]]
            self.tensors[first.fqn] = replace(first, aliases=(*first.aliases, fqn))
            return
        self.fqns[id(tensor)] = fqn
        self.objects[fqn] = tensor
        self.tensors[fqn] = TensorInfo(
            fqn=fqn,
            kind=kind,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            requires_grad=tensor.requires_grad,
            persistent=persistent,
        )

    def constant(self, tensor: torch.Tensor, name: str) -> str:
        """Enters an unregistered tensor that forward uses; returns its FQN."""
        numbered = chain((name,), (f"{name}_{n}" for n in count(1)))
        fqn = next(one for one in numbered if one not in self.tensors)
        self._add(fqn, tensor, "constant", False)
        return fqn

    def fresh(self, tensor: torch.Tensor) -> None:
        """Enters a tensor that forward made of an array; an equal earlier one has the same FQN."""
        self._fresh.append(tensor)  # kept alive, so that its id stays unique
        with no_dispatch_modes(), NoTorchFunction():
            like = (tensor.dtype, tensor.stride())
            alike = (one for one in self._fresh if (one.dtype, one.stride()) == like)
            first = next(one for one in alike if one is tensor or torch.equal(one, tensor))
        if first is tensor:
            self.constant(tensor, "constant")
        self.fqns[id(tensor)] = self.fqns[id(first)]

    def constructor(self, path: str, training: bool) -> tuple[tuple[str, Argument], ...] | None:
        """Arguments that rebuild the leaf at `path`; None when it has to be captured inside.

        That is so for a leaf that forward switched to another mode than the model's, or gave other
        attributes (``self.drop.p = …``).
        """
        if path not in self._constructors:
            return None
        module = self.modules[path]
        if module.training != training or _hooked(module):
            return None
        # As below torch.func.functional_call, which puts others in.
        if any(id(t) not in self.fqns for t in (*module.parameters(), *module.buffers())):
            return None
        as_made = _attributes(module) == self._attributes[path]
        return self._constructors[path] if as_made else None

    def shares_memory(self, fqn: str) -> str | None:
        """Another tensor of the model in the storage of this one."""
        storage = self.objects[fqn].untyped_storage()
        if storage.device.type == "meta":
            return None
        for other, tensor in self.objects.items():
            shared = tensor.untyped_storage().data_ptr() == storage.data_ptr() != 0
            if shared and other != fqn and self.tensors[other].kind != "constant":
                return other
        return None

    def tensors_of(self, path: str) -> list[str]:
        """Canonical FQNs of the parameters and buffers in a module."""
        module = self.modules[path]
        return [self.fqns[id(tensor)] for tensor in (*module.parameters(), *module.buffers())]


def qualified_name(cls: type) -> str:
    """``torch.nn.Linear`` for a public torch class, else module and qualified name."""
    if getattr(nn, cls.__name__, None) is cls:
        return f"torch.nn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def constructor_of(module: nn.Module) -> tuple[tuple[str, Argument], ...] | None:
    """Explicit ``__init__`` arguments that build an equal module, checked by building one.

    None when there are none: an attribute was changed after construction, parameters were
    replaced by others of another shape, dtypes are mixed.
    """
    wanted = _arguments(module)
    if wanted is None:
        return None
    tensors = (*module.parameters(), *module.buffers())
    dtypes = {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    extra: dict[str, Any] = {}
    if len(dtypes) > 1:
        return None
    if dtypes and dtypes != {torch.float32}:
        extra["dtype"] = dtypes.pop()
    for arguments in ({**_scalars(module, wanted), **extra}, {**wanted, **extra}):
        if _builds(module, arguments):
            try:
                return tuple((name, to_argument(v)) for name, v in arguments.items())
            except TraceError:
                return None
    return None


def _builds(module: nn.Module, arguments: dict[str, Any]) -> bool:
    try:
        with torch.device("meta"):
            twin = type(module)(**arguments)
    except (TypeError, ValueError, RuntimeError):
        return False
    return _equal(module, twin)


def _scalars(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with ``3`` for ``(3, 3)``, without defaults."""
    parameters = inspect.signature(type(module).__init__).parameters
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, tuple) and len(set(value)) == 1 and type(value[0]) is int:
            value = value[0]
            default = parameters[name].default if name in parameters else None
            if type(default) is int and value == default:
                continue
        found[name] = value
    return found


def _arguments(module: nn.Module) -> dict[str, Any] | None:
    """Constructor arguments by name, without those that have their default."""
    recurrent = isinstance(module, nn.RNNBase)  # whose classes take (*args, **kwargs)
    signature = inspect.signature((nn.RNNBase if recurrent else type(module)).__init__)
    defaults = {name: p.default for name, p in signature.parameters.items() if name != "self"}
    if recurrent:
        del defaults["mode"]
        defaults["nonlinearity"] = "tanh"
    found: dict[str, Any] = {}
    for name, default in defaults.items():
        if name in _NEVER:
            continue
        if name in _DERIVED and hasattr(module, {"add_bias_kv": "bias_k"}.get(name, name)):
            value = _DERIVED[name](module)
        elif hasattr(module, name):
            value = getattr(module, name)
        elif default is inspect.Parameter.empty:
            return None
        else:
            continue
        if isinstance(value, torch.Tensor):
            continue  # a weight given as an argument (losses): built without, then loaded
        if type(value) is type(default) and value == default:
            continue
        found[name] = value
    return found


def _equal(module: nn.Module, twin: nn.Module) -> bool:
    try:
        alike = repr(module) == repr(twin)
    except AttributeError:  # a weight was removed, which forward sets
        return False
    if not alike or list(module._buffers) != list(twin._buffers):
        return False
    if _tensors(module) != _tensors(twin):
        return False
    return all(
        name in vars(twin) and repr(value) == repr(vars(twin)[name])
        for name, value in _attributes(module).items()
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes, as the constructor sets them from its arguments."""
    return {
        name: value[:] if isinstance(value, list) else value
        for name, value in vars(module).items()
        if name != "training" and not name.startswith("_") and _plain(value)
    }


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str | None)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return [(name, tensor.shape, tensor.dtype) for name, tensor in (*parameters, *buffers)]


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or has_backward_hook(module))
