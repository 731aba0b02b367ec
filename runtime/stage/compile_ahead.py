"""Compiling ahead: a stage's forward and backward on zeros, before the first minibatch.

A rank compiles its stages while the others compile theirs; in the first step each would wait for
the input that stages before it make once they are compiled.  The stage has Parameters of its own
meanwhile, on the same memory, and copies of its buffers: no gradient, no write and no hook of the
user's comes of it.  Neither a loss_fn nor an opaque module is run, which may do more than compute.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.ir.graph import size_at
from pdcompile.ir.stage_interface import Port
from pdcompile.ir.stage_run import Microbatch, StageRun
from pdcompile.ir.stage_wiring import Wiring
from pdcompile.warn import warn
from pdcompile.weights.source import registered, replaced


def compile_ahead(
    stage: int, run: StageRun, module: nn.Module, wiring: Wiring, size: int, device: torch.device
) -> None:
    """Compile a stage for microbatches of `size` samples; warns where zeros cannot be computed."""
    given = [_zeros(port, size, device) for port, _ in wiring.inputs]
    try:
        with _apart(module):
            call = Microbatch(0, 0, dict[str, Any]().__getitem__, loss=None)
            _, values = run.forward(module, wiring, given, call)
            roots = [one for one in values.values() if one.requires_grad]
            torch.autograd.backward(roots, [torch.zeros_like(one) for one in roots])
    except Exception as error:  # its first microbatch says it again
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        warn(f"stage {stage} is compiled at its first microbatch: on zeros it raises {said}")


def _zeros(port: Port, size: int, device: torch.device) -> Tensor:
    """A value like those of a port, laid out as they are."""
    shape = [size_at(one, size) for one in port.shape]
    order = port.stride_order or range(len(shape))
    dtype = getattr(torch, port.dtype)
    return torch.empty_permuted(shape, [*order], dtype=dtype, device=device).zero_()


def _apart(module: nn.Module) -> AbstractContextManager[None]:
    """Context in which a stage has Parameters of its own, and copies of its buffers."""
    held, own = [*registered(module)], dict[int, Tensor]()  # by id: one may have several names
    for one in held:
        if id(one.tensor) not in own:
            data, trained = one.tensor.detach(), one.tensor.requires_grad
            made = data.clone() if one.is_buffer else nn.Parameter(data, trained)
            own[id(one.tensor)] = made.requires_grad_(trained)
    return replaced((one, own[id(one.tensor)]) for one in held)
