"""Description: what a capture depends on besides files and the values of tensors, as one digest.

Two processes that describe a model alike run the same Python in its forward: the code of all that
it can call, the globals and class attributes that this code names, closures, configuration, hooks
and modes.  Code is described as it is in memory, so that a function that was replaced counts.  The
walk begins at the model and follows names: a method counts once some code mentions its name, or a
library as large as transformers would be described whole.
"""

from __future__ import annotations

import hashlib
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property, partial
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from pdcompile.eager.digest import digest
from pdcompile.eager.snapshot import is_array
from pdcompile.passes.trace.calls.outside import slots_of

MOST = 1_000_000  # objects
_SCALARS = (
    bool, int, float, complex, str, bytes, bytearray, range, type(None), type(...), PurePath,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_DRAWN = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # a UUID
_SETTINGS = (bool, int, float, str, torch.dtype)
_NAMED = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
# Objects of these modules are of the process (logs, locks, streams, the environment), and no
# result of forward depends on them unless it reads them, which a capture notices.
_OF_PROCESS = frozenset((
    "_abc", "_contextvars", "_io", "_thread", "_weakref", "abc", "asyncio", "concurrent",
    "contextvars", "io", "logging", "multiprocessing", "os", "threading", "warnings", "weakref",
))  # fmt: skip
_NOT_OF_CLASSES = frozenset((
    "__annotations__", "__dict__", "__doc__", "__module__", "__weakref__", "__slots__",
    "__static_attributes__", "__firstlineno__", "__abstractmethods__", "_abc_impl",
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__orig_bases__",
    "__parameters__", "__annotate__", "__annotations_cache__", "__annotate_func__",
))  # fmt: skip
_BUILDING = ("__init__", "__new__", "__post_init__")
# Not called by what forward does with an object that is there.
_SELDOM = frozenset((
    *_BUILDING, "__init_subclass__", "__repr__", "__str__", "__hash__", "__del__", "__reduce__",
    "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
    "__class_getitem__",
))  # fmt: skip
_ENTRY = ("forward", "training", "_call_impl", "_wrapped_call_impl")


class Undescribed(Exception):
    """Raised for an object whose state cannot be told from outside."""


def described(*roots: Any) -> str:
    """Hex digest of everything that the code of these objects can come across.

    Raises:
        Undescribed: some object has a state that cannot be read; the text names it.
    """
    walk = _Walk(_packages(roots))
    facts = [walk.text(root) for root in roots]
    facts += [str(torch.get_default_dtype()), str(torch.are_deterministic_algorithms_enabled())]
    facts += sorted(walk.facts())
    return _hash("\n".join(facts))


class _Walk:
    """Everything that some objects lead to: texts of what they hold, by value where that is known,
    the code of their classes, and what that mentions."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages
        self._texts: dict[int, str] = {}  # of objects that were met, by id
        self._alive: list[Any] = []  # so that an id means one object
        self._tensors = 0
        self._names: dict[str, None] = {}  # that some code mentions, in order of appearance
        self._hidden: dict[str, list[Any]] = {}  # objects that have a private attribute
        self._facts: set[str] = set()
        self._classes: dict[type, None] = {}
        self._having: dict[str, list[type]] = {}  # classes that have an attribute of this name
        self._built: set[tuple[type, str]] = set()  # by which objects of a class are made
        self._functions: deque[FunctionType] = deque()
        self._modules: set[tuple[int, str]] = set()  # of which an attribute was looked at

    def text(self, value: Any) -> str:
        """A short text of an object: equal for objects that mean the same."""
        kind = type(value)
        if kind in _SCALARS or isinstance(value, torch.Size | PurePath):
            written = repr(value)
            if kind is str and _DRAWN.fullmatch(value):
                return "an identifier that was drawn for this process"
            return f"{kind.__name__} {written if len(written) < 200 else _hash(written)}"
        known = self._texts.get(id(value))
        if known is not None:
            return known
        if len(self._alive) >= MOST:
            raise Undescribed(f"more than {MOST:,} objects can be reached from forward")
        self._alive.append(value)
        self._texts[id(value)] = f"again {kind.__qualname__}"  # for what contains itself
        try:
            found = "\n".join(self._parts(value))
        except RecursionError:
            raise Undescribed(f"a {kind.__qualname__} is nested too deep") from None
        self._texts[id(value)] = found if len(found) < 200 else _hash(found)
        return self._texts[id(value)]

    def _parts(self, value: Any) -> Iterator[str]:
        if isinstance(value, torch.Tensor):
            yield from self._tensor(value)
        elif isinstance(value, nn.Module):
            yield from self._module(value)
        elif isinstance(value, type):
            self._mention_in(value, _BUILDING)  # code that has a class may make objects of it
            yield self._class(value)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, _NAMED):
            owner = getattr(value, "__self__", None)
            yield f"builtin {getattr(owner, '__name__', type(owner).__name__)} {value.__qualname__}"
            if not isinstance(owner, ModuleType | type | None):
                yield self.text(owner)
        elif isinstance(value, ModuleType):
            yield f"module {value.__name__}"
        elif isinstance(value, Enum):
            yield f"enum {self._class(type(value))} {value.name}"
        elif isinstance(value, re.Pattern):
            yield f"pattern {value.pattern!r} {value.flags}"
        elif is_array(value):
            yield f"array {value.shape} {value.dtype} {_hash(value.tobytes())}"
        elif type(value).__module__ in ("typing", "types") and not hasattr(value, "__dict__"):
            yield repr(value)
        else:
            yield from self._instance(value)

    def _items(self, values: Iterable[Any]) -> Iterator[str]:
        return map(self.text, values)

    def _tensor(self, tensor: torch.Tensor) -> Iterator[str]:
        self._tensors += 1
        yield f"tensor {self._class(type(tensor))} {self._tensors}"  # which tells tied ones
        yield f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type} {tensor.layout}"
        yield f"{tensor.requires_grad} {tensor.is_leaf}"
        if tensor.layout is torch.strided:
            yield str(tensor.stride())
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            yield from self._items((getattr(tensor, name, None) or {}).values())

    def _module(self, module: nn.Module) -> Iterator[str]:
        yield f"nn.Module {self._class(type(module))}"
        for name, value in vars(module).items():
            if name.endswith("_hooks") or name.startswith("_forward_hooks"):
                # The keys count all hooks that this process ever registered.
                value = list(value.values()) if isinstance(value, dict) else value
            yield f"{name} = {self.text(value)}"

    def _instance(self, value: Any) -> Iterator[str]:
        kind = type(value)
        home = kind.__module__.partition(".")[0]
        yield self._class(kind)
        if isinstance(value, staticmethod | classmethod | MethodType):
            yield self.text(value.__func__)
            yield self.text(getattr(value, "__self__", None))
        elif isinstance(value, property):
            yield from self._items((value.fget, value.fset))
        elif isinstance(value, cached_property):
            yield self.text(value.func)
        elif isinstance(value, partial):
            yield from self._items((value.func, value.args, value.keywords))
        elif home in _OF_PROCESS or kind is torch.utils.hooks.RemovableHandle:
            return
        else:
            yield from self._content(value, home)

    def _content(self, value: Any, home: str) -> Iterator[str]:
        """Items, attributes and slots of an object."""
        known = isinstance(value, dict | list | tuple | set | frozenset | deque)
        if isinstance(value, dict):
            for key, one in list(dict.items(value)):
                yield f"{self.text(key)}: {self.text(one)}"
        elif isinstance(value, set | frozenset):
            # In an order that hashes do not decide, for what each comes across first.
            yield from sorted(self._items(sorted(value, key=_rank)))
        elif known:
            yield from self._items(value)
        slots = slots_of(value)
        for name, one in slots.items():
            yield f"{name} = {self.text(one)}"
        own = getattr(value, "__dict__", None)
        if isinstance(own, Mapping):
            for name, one in list(own.items()):
                if not name.startswith("_") or name in self._names:
                    yield f"{name} = {self.text(one)}"
                else:  # such as the hash of an object, which differs by process
                    self._hidden.setdefault(name, []).append(value)
        kind = type(value)
        standard = _is_standard(kind.__module__) or home == "pybind11_builtins"
        if not (known or slots or own is not None or standard):
            raise Undescribed(f"an object of class {kind.__module__}.{kind.__qualname__}")

    def _as_installed(self, module: str) -> bool:
        """Whether a module is as its installed files say, which are compared themselves: of the
        packages that the model is not from, and with which it shares no state."""
        home = module.partition(".")[0]
        if home in self._packages:
            return False
        file = str(getattr(sys.modules.get(module), "__file__", None) or "")
        return _is_standard(module) or "-packages" in file

    def facts(self) -> set[str]:
        """All facts that follow from the objects that were met."""
        self._mention(_ENTRY)
        while self._functions:
            self._globals_of(self._functions.popleft())
        return self._facts

    def _class(self, cls: type) -> str:
        """The name of a class, whose attributes are facts once some code mentions them."""
        name = f"class {cls.__module__}.{cls.__qualname__}"
        if cls in self._classes:
            return name
        if self._as_installed(cls.__module__) and not issubclass(cls, nn.Module):
            return name
        self._classes[cls] = None
        self._facts.add(f"{name}({', '.join(self._class(base) for base in cls.__bases__)})")
        for attribute in list(vars(cls)):
            self._having.setdefault(attribute, []).append(cls)
            special = attribute.startswith("__") and attribute not in _SELDOM
            if attribute in self._names or special or (cls, attribute) in self._built:
                self._attribute(cls, attribute)
        return name

    def _attribute(self, cls: type, name: str) -> None:
        if name in _NOT_OF_CLASSES or name not in vars(cls):
            return
        value = vars(cls)[name]
        if self._as_installed(cls.__module__):
            if not self._is_foreign(value):
                return
        elif name.startswith("__") and not isinstance(_inner(value), FunctionType):
            return
        self._facts.add(f"{cls.__module__}.{cls.__qualname__}.{name} = {self.text(value)}")

    def _function(self, function: FunctionType) -> Iterator[str]:
        code = function.__code__
        yield f"function {function.__module__}.{function.__qualname__} {_code(code)}"
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield f"{variable} = {self.text(cell.cell_contents)}"
            except ValueError:  # not filled yet
                yield f"{variable} is empty"
        yield self.text(function.__defaults__)
        yield self.text(function.__kwdefaults__)
        for name, one in vars(function).items():
            if not name.startswith("_torchdynamo"):  # among them the address of an object
                yield f"{name} = {self.text(one)}"
        if not self._as_installed(function.__globals__.get("__name__", "")):
            self._functions.append(function)

    def _globals_of(self, function: FunctionType) -> None:
        names = _mentioned(function.__code__)
        self._mention(names)
        home = function.__globals__
        for name in names:
            if name in home:
                value = home[name]
                self._facts.add(f"{function.__module__}:{name} = {self.text(value)}")
                if isinstance(value, ModuleType):
                    self._attributes_of(value, names)

    def _attributes_of(self, module: ModuleType, names: Iterable[str]) -> None:
        """Facts of what code that mentions these names takes from a module."""
        for name in names:
            key = (id(module), name)
            if key in self._modules or name not in vars(module):
                continue
            self._modules.add(key)
            value = vars(module)[name]
            if isinstance(value, ModuleType):
                self._attributes_of(value, names)
            elif not self._as_installed(module.__name__) or self._is_foreign(value):
                self._facts.add(f"{module.__name__}.{name} = {self.text(value)}")

    def _is_foreign(self, value: Any) -> bool:
        """Whether a value in a module or class as it is installed was put there by others, or is
        a setting."""
        inner = _inner(value)
        if isinstance(inner, FunctionType | type):
            return not self._as_installed(inner.__module__ or "")
        return isinstance(value, _SETTINGS)

    def _mention_in(self, cls: type, names: Iterable[str]) -> None:
        """Facts of these attributes of one class and its bases."""
        for base in cls.__mro__:
            for name in names:
                if (base, name) not in self._built:
                    self._built.add((base, name))
                    if base in self._classes:
                        self._attribute(base, name)

    def _mention(self, names: Iterable[str]) -> None:
        new = [name for name in names if name not in self._names]
        self._names.update(dict.fromkeys(new))
        for name in new:
            for cls in list(self._having.get(name, ())):
                self._attribute(cls, name)
            for owner in () if name.endswith("_hash") else self._hidden.pop(name, ()):
                kind = type(owner).__qualname__
                self._facts.add(f"{name} of a {kind} = {self.text(vars(owner)[name])}")


def _packages(roots: Iterable[Any]) -> frozenset[str]:
    """The packages that the classes of a model and of its loss are from."""
    modules = [module for one in roots if isinstance(one, nn.Module) for module in one.modules()]
    classes = [base for one in (*modules, *roots) for base in type(one).__mro__]
    found = {cls.__module__.partition(".")[0] for cls in classes}
    return frozenset(name for name in found if not _is_standard(name))


def _is_standard(module: str) -> bool:
    """Whether a module is as the versions of Python, torch and pdcompile say."""
    home = module.partition(".")[0]
    return home in sys.stdlib_module_names or home in ("builtins", "torch", "pdcompile")


def _rank(value: Any) -> tuple[str, str]:
    """A place among the items of a set, the same in every process where it can be."""
    named = getattr(value, "__qualname__", None)
    if named:
        return type(value).__qualname__, f"{value.__module__}.{named}"
    return type(value).__qualname__, repr(value) if type(value) in _SCALARS else ""


def _inner(value: Any) -> Any:
    """The function in a method of a class."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def _hash(text: str | bytes) -> str:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()


def _code(code: CodeType) -> str:
    """Digest of code with its constants and its lines, which the sources of ops are."""
    parts = [
        repr((
            code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags,
            code.co_filename, code.co_firstlineno, code.co_linetable, code.co_exceptiontable,
        ))
    ]  # fmt: skip
    for constant in code.co_consts:
        parts.append(_code(constant) if isinstance(constant, CodeType) else _constant(constant))
    return _hash("\n".join(parts))


def _constant(value: Any) -> str:
    """The text of a constant of code; of a set in an order that no hash decides."""
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(repr, value))}"
    return f"{type(value).__name__} {value!r}"


def _mentioned(code: CodeType) -> tuple[str, ...]:
    """Names that code mentions, and strings in it that may be names (getattr)."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(dict.fromkeys(_mentioned(constant)))
        elif isinstance(constant, str) and constant.isidentifier():
            found[constant] = None
    return tuple(found)


def digest_of_values(tensor: torch.Tensor) -> str:
    """Shape, dtype and a hash of all values."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {digest(tensor):016x}"
