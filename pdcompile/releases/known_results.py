"""Results of ATen ops on fake tensors that look like those of an earlier call in this process.

A model's layers are alike: most of its ops run on tensors of shapes that the same op has seen, and
then the form of the result is known.  Fake tensors remember it too, but find it again in more time
than all else takes of recording a model, or of rehearsing a stage.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
    has_kernel,
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
)
_DEVICE = torch.ops.prim.device.default  # half of all dispatched ops
_BY_STORAGE = frozenset((_ATEN.as_strided.default, _ATEN.lift.default, _ATEN.lift_fresh.default))


class _Unlike(Exception):
    """An argument of which more than the form may matter."""


@dataclass(frozen=True, slots=True)
class _Form:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    views: bool  # whether the tensor shares the storage of the first argument


# By op and forms of its arguments: the class of a tuple or list of results, and their forms, ()
# where the op writes its first argument and returns it; None: one to ask for.
_KNOWN: dict[Any, tuple[Any, tuple[_Form, ...]] | None] = {}


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
        kind, forms = known
        made = [_made(form, args) for form in forms]
        return kind(made) if kind is not None else made[0] if made else args[0]
    result = func(*args, **kwargs)
    if key not in _KNOWN:
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        _KNOWN[key] = _known(func, args, kwargs, result)
    return result


@functools.lru_cache(maxsize=4096)
def _by_form(func: Any) -> bool:
    """True if the forms of the results, all tensors, follow from the forms of the arguments."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    schema = func._schema
    if func in _BY_STORAGE or any(tag in func.tags for tag in _TAGS):
        return False
    if not {str(each.type) for each in schema.returns} <= {"Tensor", "List[Tensor]"}:
        return False
    if schema.is_mutable:
        return schema.name.endswith("_") and not schema.name.startswith("aten::_")
    if all(each.alias_info is None for each in schema.returns):
        return bool(schema.returns)
    # An op made of others for autograd too may return its argument, a view of it or a copy.
    name = func.name()  # type: ignore[no-untyped-call]
    return func.is_view and not has_kernel(name, "CompositeImplicitAutograd")


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
            found += (value.shape, value.stride(), rest, value.constant is None)
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
        fake.layout is torch.strided
        and not fake.is_nested
        and not fake.dtype.is_complex
        and not fake.is_neg()
    )


def _known(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any, tuple[_Form, ...]] | None:
    """The forms of a result; None where one made of them would not be the same."""
    given, made = tensors_among((args, kwargs)), tensors_among(result)
    if all(type(each) is FakeTensor and each.constant is not None for each in given):
        return None  # what is computed of constants is one
    if func._schema.is_mutable:
        return (None, ()) if result is args[0] and result.constant is None else None
    forms = tuple(form for each in made if (form := _form_of(each, given, args)) is not None)
    kind = None if isinstance(result, torch.Tensor) else type(result)
    own = sum(not form.views for form in forms)
    storages = {each.untyped_storage()._cdata for each in (*given[:1], *made)}
    apart = len(storages) == own + 1 and not (own and func.is_view)
    complete = len(forms) == (1 if kind is None else len(result))
    return (kind, forms) if apart and complete else None


def _form_of(result: Any, given: Sequence[torch.Tensor], args: tuple[Any, ...]) -> _Form | None:
    """The form of a tensor; None where one made of it would not be the same."""
    plain = type(result) is FakeTensor and _is_plain(result) and result.constant is None
    if not plain or result.requires_grad:
        return None
    storage = result.untyped_storage()._cdata
    shares = any(each.untyped_storage()._cdata == storage for each in given)
    # A view is one of the first argument, and `_unsafe_view` gives one without saying so.
    if shares and not (len(given) == 1 and given[0] is args[0]):
        return None
    form = _Form(
        tuple(result.shape), result.stride(), int(result.storage_offset()), result.dtype,
        result.fake_device, shares,
    )  # fmt: skip
    made = _made(form, args)
    alike = dispatch_keys(made) == dispatch_keys(result)
    alike &= made.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    return form if alike else None


def _made(form: _Form, args: tuple[Any, ...]) -> FakeTensor:
    first = _first(args)
    # Without modes for functions too, which a transform does not close around its own operators:
    # they would be asked for the device of what is made here.
    with NoTorchFunction(), NoTorchDispatch():
        if form.views:
            bare = torch.empty(0, dtype=form.dtype, device="meta")
            bare.set_(first.untyped_storage(), form.offset, form.shape, form.stride)
        else:
            bare = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
    with NoTorchFunction():
        return FakeTensor(first.fake_mode, bare, form.device)
