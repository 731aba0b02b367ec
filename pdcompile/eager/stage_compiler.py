"""Stages through torch.compile.

Compiled code stops before each op that draws, for the generator to be seeded, so that masks are
eager's; and around opaque modules, dropout and conversions between parts, which run as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.parts import conversions

Backend = str | Callable[..., Any]
Places = Sequence[Mapping[int, bool]]  # in evaluation, in training
_CONVERSIONS = conversions.__name__


def name_of(backend: Backend | None) -> str:
    """The backend in words, "" for none."""
    return backend if isinstance(backend, str) else getattr(backend, "__name__", "")


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as a place where compiled code stops and goes on behind it."""
    found: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


def compile_in_place(
    stage: nn.Module, names: dict[str, Any], backend: Backend, apart: Collection[nn.Module]
) -> None:
    """Makes calls of a stage run through torch.compile, all but the modules that are `apart`.

    Code is compiled at the first call for each size, and shared by weight versions.  `names`:
    the globals of the stage's source.
    """
    every = vars(conversions).values()
    own = {id(f) for f in every if isinstance(f, FunctionType) and f.__module__ == _CONVERSIONS}
    names |= {name: uncompiled(one) for name, one in names.items() if id(one) in own}
    for module in apart:
        own_class: Any = type(module)
        module.__class__ = _apart(own_class)
    # Other random numbers than eager's would come from inductor's own generator.
    options = {"fallback_random": True} if backend == "inductor" else None
    stage.compile(backend=backend, dynamic=False, options=options)


def pass_images(stage: type[nn.Module], came: Places, left: Places) -> None:
    """Makes stages of a class take and give images with channels last, as inductor has them within.

    `came`: arguments, by place, that are images, with False if they are to lie as in eager within.
    `left`: results, with True for images; others leave as in eager.
    """
    inner: Any = stage.forward
    laid: Any = _Laid.apply
    if inner.__module__ == __name__ or not (any(came) or any(True in x.values() for x in left)):
        return

    def forward(self: nn.Module, *given: Any) -> Any:
        come, leave = came[self.training], left[self.training]
        made = inner(self, *[laid(x, come[n]) if n in come else x for n, x in enumerate(given)])
        if not isinstance(made, tuple):  # an edited stage may give anything
            return made
        return tuple([laid(x, leave[n]) if n in leave else x for n, x in enumerate(made)])

    # Code of its own: torch limits how often one is compiled.
    stage.forward = FunctionType(forward.__code__.replace(), globals(), closure=forward.__closure__)


class _Laid(torch.autograd.Function):
    """A value with channels last, or as in eager; its gradient goes back with channels last."""

    @staticmethod
    def forward(_: Any, value: Any, last: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not last or value.dim() != 4:
            return value.contiguous()
        if not torch.compiler.is_compiling():
            return value.contiguous(memory_format=torch.channels_last)
        # Inductor's kernel writes it so at once, where `contiguous` is a copy of what it wrote.
        _, c, h, w = value.shape
        return torch.ops.prims.inductor_force_stride_order(value, [c * h * w, 1, c * w, c])

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Any:
        return _Laid.forward(None, gradients[0], True), None


@functools.cache
def _apart(opaque: Any) -> type[nn.Module]:
    """The class, called as it is: one for all versions of weights, which share code by it."""
    return type(opaque.__name__, (opaque,), {"__call__": uncompiled(opaque.__call__)})
