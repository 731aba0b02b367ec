"""Shapes of results for which fake tensors have no rule: the op runs on real, made-up numbers.

Some ops have no shape rule, or one that is stricter than the kernel (a rule for bfloat16 alone
where the kernel takes float32).  Where the shape might depend on values, several fillings have to
agree on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdcompile.hardware import devices
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.trace.tape.observer import storage_key
from pdcompile.releases.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    NoTorchFunction,
    UnsupportedOperatorException,
    no_dispatch_modes,
    pytree,
)

MAX_BYTES = 1 << 30  # of real tensors that are made for one result

_BY_VALUE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
Fill = Callable[[Tensor], Any]
_FILLS: tuple[tuple[Fill, bool], ...] = (  # whether the call has to succeed on it
    (lambda tensor: tensor.zero_(), True),
    (lambda tensor: tensor.fill_(1), True),
    (lambda tensor: tensor.copy_(_counted(tensor, 2)), True),
    (lambda tensor: tensor.copy_(_counted(tensor, 101)), False),
)


def _counted(tensor: Tensor, period: int) -> Tensor:
    return (torch.arange(tensor.numel()) % period).view(tensor.shape)


def run(call: Callable[..., Any], args: Any, kwargs: Any, *, closed: bool = True) -> Any:
    """``call(*args, **kwargs)`` on fake tensors, or fakes of its result on real ones.

    Args:
        closed: whether the call reads no other tensors than its arguments.

    The error of the run on fakes is raised where the real run fails too, writes its arguments,
    draws random numbers, returns a part of its arguments or no tensor, or has shapes that depend
    on values.  Without the GPU of the fakes the real run is on the host, which refuses other calls
    than a GPU does: an error that is not for want of values is then raised as it is.
    """
    try:
        return call(*args, **kwargs)
    except Exception as error:
        by_value = isinstance(error, _BY_VALUE)
        if by_value and call is F.ctc_loss:
            return _ctc_loss(args[0], kwargs.get("reduction"))
        found = _really(call, args, kwargs, by_value=by_value) if closed else None
        if found is None:
            raise
        return found


def _ctc_loss(logs: Tensor, reduction: str | None) -> Tensor:
    """A fake of this loss, which on made-up lengths would read beyond its labels."""
    shape = logs.shape[1:-1] if reduction == "none" else ()
    made = logs.detach().new_empty(shape, dtype=torch.promote_types(logs.dtype, torch.float32))
    needed = torch.is_grad_enabled() and logs.requires_grad
    return made.requires_grad_().clone() if needed else made


def _really(call: Callable[..., Any], args: Any, kwargs: Any, *, by_value: bool) -> Any:
    fakes = {id(t): t for t in tensors_among((args, kwargs))}
    size = sum(t.numel() * t.element_size() for t in fakes.values())
    if not fakes or size > MAX_BYTES:
        return None
    if not by_value and any(devices.with_memory(t.device) != t.device for t in fakes.values()):
        return None
    found: Any = None
    with no_dispatch_modes(), NoTorchFunction():
        for fill, needed in _FILLS if by_value else _FILLS[:1]:
            outcome = _outcome(call, args, kwargs, fakes, fill)
            if outcome is None and not needed:
                continue
            if outcome is None or (found is not None and _form(outcome) != _form(found)):
                return None
            found = outcome
    with NoTorchFunction():
        return rebuilt(found, next(iter(fakes.values())).device)


def _outcome(
    call: Callable[..., Any], args: Any, kwargs: Any, fakes: dict[int, Tensor], fill: Fill
) -> Any:
    """The result on tensors filled so; None where its shape cannot be relied on."""
    reals = {key: _real(fake, fill) for key, fake in fakes.items()}
    versions = [t._version for t in reals.values()]
    state = torch.default_generator.get_state()
    try:
        result = called(call, args, kwargs, reals)
    except Exception:
        return None  # the error of the run on fakes is raised
    finally:
        drew = not torch.equal(state, torch.default_generator.get_state())
        torch.default_generator.set_state(state)
    written = versions != [t._version for t in reals.values()]
    given = {storage_key(t) for t in reals.values()}
    made = tensors_among(result)
    shared = any(storage_key(t) in given for t in made)
    shared = shared or len({storage_key(t) for t in made}) < len(made)
    return None if drew or written or shared or not made or _form(result) is None else result


def _real(fake: Tensor, fill: Fill) -> Tensor:
    device = devices.with_memory(fake.device)
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)
    if 0 in made.stride():
        made = torch.empty(fake.shape, dtype=fake.dtype, device=device)
    fill(made)
    return made.requires_grad_(fake.requires_grad)


def called(call: Callable[..., Any], args: Any, kwargs: Any, reals: dict[int, Tensor]) -> Any:
    """The result of a call with the real tensors of fakes, by identity."""
    given = pytree.tree_map_only(Tensor, lambda fake: reals[id(fake)], (args, kwargs))
    return call(*given[0], **given[1])


def _form(result: Any) -> Any:
    """Shapes and dtypes; None for a result that holds anything but tensors."""
    if isinstance(result, Tensor):
        return tuple(result.shape), result.stride(), result.dtype, result.requires_grad
    if type(result) in (tuple, list):
        forms = [_form(item) for item in result]
        return None if None in forms else (type(result), *forms)
    return None


def rebuilt(result: Any, device: torch.device) -> Any:
    """The same result on fake tensors; to be called in the fake mode."""

    def fake(real: Tensor) -> Tensor:
        made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        # An op's result is not a leaf: the model may write into it.
        return made.requires_grad_().clone() if real.requires_grad else made

    return pytree.tree_map_only(Tensor, fake, result)
