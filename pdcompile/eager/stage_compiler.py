"""Stages through torch.compile.

Compiled code stops before each op that draws, for the generator to be seeded, so that masks are
eager's; and around the model's own opaque modules and the conversions between parts, which run as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

import torch
from torch import nn

from pdcompile.parts import conversions

Backend = str | Callable[..., Any]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as a place where compiled code stops and goes on behind it."""
    found: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


def compile_in_place(
    stage: nn.Module, names: dict[str, Any], backend: Backend, opaque: Collection[nn.Module]
) -> None:
    """Makes calls of a stage run through torch.compile, all but its opaque modules.

    Code is compiled at the first microbatch of each size, and shared by weight versions.  `names`:
    the globals of the stage's source.
    """
    for name, one in names.items():
        if isinstance(one, FunctionType) and one.__module__ == conversions.__name__:
            names[name] = uncompiled(one)
    for module in opaque:
        own: Any = type(module)
        call = uncompiled(own.__call__)
        module.__class__ = type(own.__name__, (own,), {"__call__": call})
    # Other random numbers than eager's would come from inductor's own generator.
    options = {"fallback_random": True} if backend == "inductor" else None
    stage.compile(backend=backend, dynamic=False, options=options)
