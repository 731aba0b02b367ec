"""Results of ATen ops on fake tensors that look like those of an earlier call in this process.

A model's layers are alike: most of its ops run on tensors of shapes that the same op has seen, and
then the form of the result is known.  Fake tensors remember it too, but find it again in more time
than all else takes of recording a model, or of rehearsing a stage.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch

from pdcompile.ir.opaque import tensors_among
from pdcompile.releases.torch_internals import (
    FakeTensor,
    NoTorchDispatch,
    NoTorchFunction,
    OpOverload,
    dispatch_keys,
    is_composite,
)

MOST = 100_000  # forms
_ATEN = torch.ops.aten
_PLAIN = frozenset(
    (NoneType, bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
#: whose results depend on more than the form of their arguments
_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
)
_DEVICE = torch.ops.prim.device.default  # half of all dispatched ops
_BY_STORAGE = frozenset((_ATEN.as_strided.default, _ATEN.lift.default, _ATEN.lift_fresh.default))


class _Unlike(Exception):
    """An argument of which more than the form may matter."""


@dataclass(frozen=True, slots=True)
class _Known:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    views: bool  # whether the result shares the storage of the first argument


_KNOWN: dict[Any, _Known | None] = {}  # by op and forms of its arguments; None: one to ask for


def known_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, to be called below autograd and above the fake mode."""
    if func is _DEVICE and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    if not _by_form(func) or type(_first(args)) is not FakeTensor:
        return func(*args, **kwargs)
    try:
        form = _forms(args), _forms(tuple(kwargs.items())) if kwargs else ()
    except _Unlike:
        return func(*args, **kwargs)
    key = func, form, torch.get_default_dtype(), torch.is_inference_mode_enabled()
    if (known := _KNOWN.get(key)) is not None:
        return _made(known, args)
    result = func(*args, **kwargs)
    if key not in _KNOWN:
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        _KNOWN[key] = _form_of(func, args, result)
    return result


@functools.lru_cache(maxsize=4096)
def _by_form(func: Any) -> bool:
    """True if the form of the result, one tensor, follows from the forms of the arguments."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    schema = func._schema
    if schema.is_mutable or func in _BY_STORAGE or any(tag in func.tags for tag in _TAGS):
        return False
    if [str(each.type) for each in schema.returns] != ["Tensor"]:
        return False
    if schema.returns[0].alias_info is None:
        return True
    # A composite op may return its argument, a view of it or a copy.
    return func.is_view and not is_composite(func)


def _first(args: Any) -> Any:
    """The first argument; of a list of tensors, the first of these."""
    while type(args) in (tuple, list) and args:
        args = args[0]
    return args


def _forms(values: Any) -> tuple[Any, ...]:
    """The forms of several arguments.  Raises _Unlike."""
    found: list[Any] = [type(values)]
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if not _is_plain(value):
                raise _Unlike
            rest = value.storage_offset(), value.dtype, value.fake_device, value.requires_grad
            found += (value.shape, value.stride(), rest)
        elif kind in _PLAIN:  # 1, 1.0 and True are equal, and their results are not
            found += (kind, value)
        elif kind is list or kind is tuple:
            found.append(_forms(value))
        else:
            raise _Unlike
    return tuple(found)


def _is_plain(fake: FakeTensor) -> bool:
    """True if nothing but shape, strides, offset, dtype and device tells of its results."""
    return (
        fake.constant is None
        and fake.layout is torch.strided
        and not fake.is_nested
        and not fake.dtype.is_complex
        and not fake.is_neg()
    )


def _form_of(func: Any, args: tuple[Any, ...], result: Any) -> _Known | None:
    """The form of a result; None where one made of it would not be the same."""
    given = tensors_among(args)
    if type(result) is not FakeTensor or not _is_plain(result) or result.requires_grad:
        return None
    storage = result.untyped_storage()._cdata
    shares = any(each.untyped_storage()._cdata == storage for each in given)
    # A view is one of the first argument, and `_unsafe_view` gives one without saying so.
    if (func.is_view and not shares) or (shares and not (len(given) == 1 and given[0] is args[0])):
        return None
    known = _Known(
        tuple(result.shape), result.stride(), int(result.storage_offset()), result.dtype,
        result.fake_device, shares,
    )  # fmt: skip
    made = _made(known, args)
    alike = dispatch_keys(made) == dispatch_keys(result)
    alike &= made.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    return known if alike else None


def _made(known: _Known, args: tuple[Any, ...]) -> FakeTensor:
    first = _first(args)
    # Without modes for functions too, which a transform does not close around its own operators:
    # they would be asked for the device of what is made here.
    with NoTorchFunction(), NoTorchDispatch():
        if known.views:
            bare = torch.empty(0, dtype=known.dtype, device="meta")
            storage = first.untyped_storage()
            bare.set_(storage, known.offset, known.shape, known.stride)
        else:
            bare = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
    with NoTorchFunction():
        return FakeTensor(first.fake_mode, bare, known.device)
