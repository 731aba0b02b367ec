"""Stages through torch.compile.

Compiled code stops before each op that draws, for the generator to be seeded, so that masks are
eager's; and around opaque modules, dropout and conversions between parts, which run as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

import torch
from torch import nn

from pdcompile.parts import conversions

Backend = str | Callable[..., Any]
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


@functools.cache
def _apart(opaque: Any) -> type[nn.Module]:
    """The class, called as it is: one for all versions of weights, which share code by it."""
    return type(opaque.__name__, (opaque,), {"__call__": uncompiled(opaque.__call__)})
