"""Values of optimizers and schedulers as strict JSON; their tensors go to a safetensors file.

Plain text, whole and finite numbers, truth values, None and lists are themselves.  Everything else
is an object with one key that says what it is: ``{"tuple": [0.9, 0.999]}``.  Numbers of numpy
become Python's, of the same value; a tensor that is there twice stays one.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pdcompile.checkpoint.manifest import ANOTHER
from pdcompile.eager.digest import flat_bytes
from pdcompile.errors import CheckpointError
from pdcompile.ir.targets import dtype_name

_DEPTH = 16  # JSON is read to 64 levels, and a level of values makes two or three
_LARGEST = 2**63
_BITS = 1024  # of a whole number


class Encoder:
    """Makes JSON of values; `tensors` collects those that were met, by the names that they got.

    `inline`: tensors are small, and go into the JSON.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._inline = inline
        self._met: dict[int, tuple[Tensor, str]] = {}  # by id: held, so that no other gets it

    def encode(self, value: Any, name: str, depth: int = 0) -> Any:
        """JSON of a value, called `name` in errors; tensors in it are named after that.

        Raises:
            CheckpointError: a value is of a type that no file without code can hold.
        """
        if depth > _DEPTH:
            raise _cannot(value, name, f"is nested deeper than {_DEPTH} levels")
        value = value.item() if isinstance(value, np.bool_ | np.number) else value
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            if value.bit_length() > _BITS:
                raise _cannot(value.bit_length(), name, "is a whole number of more bits than 1024")
            return value if abs(value) < _LARGEST else {"int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if kind is complex:
            return {"complex": str(value)}
        if kind is torch.dtype:
            return {"dtype": dtype_name(value)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        tag = _TAGS.get(kind)
        if kind is defaultdict:  # its factory may have no hash
            tag = next((t for one, t in _DEFAULTS.items() if one is value.default_factory), None)
        if tag in _MAPPINGS:
            return {
                tag: [
                    [self.encode(k, name, depth + 1), self.encode(v, f"{name}/{k}", depth + 1)]
                    for k, v in value.items()
                ]
            }
        if tag in _LISTS:
            made = [self.encode(v, f"{name}/{i}", depth + 1) for i, v in enumerate(value)]
            limit = getattr(value, "maxlen", None)
            if limit is not None:
                return {"bounded": [limit, made]}
            return made if tag == "list" else {tag: made}
        raise _cannot(value, name, f"is of type {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, value: Tensor, name: str) -> dict[str, Any]:
        if value.layout != torch.strided:
            raise _cannot(value, name, "is a sparse tensor")
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            raise _cannot(value, name, f"is a tensor of type {type(value).__name__}")
        if self._inline:
            flat = flat_bytes(value.detach().cpu())
            text = base64.b64encode(flat.numpy().tobytes()).decode()
            return {"values": [dtype_name(value.dtype), list(value.shape), text]}
        if id(value) in self._met:
            return {"tensor": self._met[id(value)][1]}
        numbered = chain((name,), (f"{name}#{n}" for n in count(2)))
        taken = next(one for one in numbered if one not in self.tensors)
        self.tensors[taken] = value.detach()
        self._met[id(value)] = value, taken
        return {"tensor": taken}


def decode(data: Any, where: str, tensor: Callable[[str], Tensor] | None = None) -> Any:
    """The value that `Encoder.encode` made JSON of; `tensor` reads one by its name.

    Raises:
        CheckpointError: it is none of a value, or names a tensor where there are no files of any.
    """
    if data is None or isinstance(data, bool | str | int | float):
        return data
    if isinstance(data, list):
        return [decode(part, where, tensor) for part in data]
    if isinstance(data, dict) and len(data) == 1:
        ((tag, part),) = data.items()
        if tag == "tensor" and isinstance(part, str):
            if tensor is None:
                raise CheckpointError(f"{part} is in no file", where=where, remedy=ANOTHER)
            return tensor(part)
        pairs = isinstance(part, list) and all(isinstance(p, list) and len(p) == 2 for p in part)
        try:  # keys and members of sets may have no hash
            if tag in _LISTS and isinstance(part, list):
                return _LISTS[tag]([decode(one, where, tensor) for one in part])
            if tag == "bounded":
                limit, listed = part
                return deque([decode(one, where, tensor) for one in listed], _count(limit))
            if tag in _MAPPINGS and pairs:
                found = [(decode(k, where, tensor), decode(v, where, tensor)) for k, v in part]
                if all(isinstance(key, int | float | str | tuple | None) for key, _ in found):
                    return _MAPPINGS[tag](dict(found))
            return _NUMBERS[tag](part)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
            pass
    raise CheckpointError(
        f"{str(data)[:60]!r} is no value of a checkpoint", where=where, remedy=ANOTHER
    )


def _values(parts: Any) -> Tensor:
    dtype, shape, text = parts
    data = bytearray(base64.b64decode(text, validate=True))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(_DTYPES[dtype]).reshape(shape).clone()


def _count(given: Any) -> int:
    if type(given) is not int:
        raise ValueError(given)
    return given


def _int(text: Any) -> int:
    found = int(text)
    if found.bit_length() > _BITS:
        raise ValueError(text)
    return found


# A table: torch imports some of its modules where they are asked for by name.
_DTYPES = {dtype_name(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "deque": deque}
_DEFAULTS: dict[Any, str] = {  # of defaultdicts, by their factories
    dict: "defaultdict", list: "defaultdict of list", set: "defaultdict of set",
    int: "defaultdict of int", float: "defaultdict of float", None: "defaultdict of None",
}  # fmt: skip
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_TAGS = {kind: tag for tag, kind in (_LISTS | _MAPPINGS).items()}
_MAPPINGS |= {tag: partial(defaultdict, factory) for factory, tag in _DEFAULTS.items()}
_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "int": _int,
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.__getitem__,
    "complex": complex,
    "dtype": lambda name: _DTYPES[name],
    "bytes": partial(base64.b64decode, validate=True),
    "values": _values,
}


def _cannot(value: Any, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"a value {why}, and a checkpoint holds tensors, numbers, text, bytes, lists and dicts: "
        f"{str(value)[:60]!r}",
        where=name,
        remedy="keep another form of it in the state, or save that part yourself",
    )
