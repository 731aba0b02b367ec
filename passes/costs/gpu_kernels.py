"""Workspace of convolutions of the GPU that is here, found by running them once.

cuDNN chooses an algorithm by shapes, and with it a workspace, which can be as large as what is
convolved.  Nothing else tells how much that is.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdcompile.hardware import devices
from pdcompile.releases.torch_internals import no_dispatch_modes, pytree

CONVOLUTIONS = frozenset(
    (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
)
_LOG = logging.getLogger(__name__)
_KNOWN: dict[Any, int] = {}  # by device and modes, op, and forms of its arguments


def inside(gpu: str, func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that a convolution takes beside operands and results; 0 for anything else.

    Args:
        gpu: its name and modes (`devices.name_and_modes`): it is the present one.
        args: on tensors of these forms, fake ones or others, which are not touched.
    """
    if func not in CONVOLUTIONS:
        return 0
    key = gpu, func, str(pytree.tree_map(_form, args))
    if key not in _KNOWN:
        _KNOWN[key] = _tried(func, args)
    return _KNOWN[key]


def _tried(func: Any, args: tuple[Any, ...]) -> int:
    device = devices.of_kind(devices.GPU)
    with no_dispatch_modes(), torch.no_grad():
        try:
            own = pytree.tree_map(partial(_like, device), args)
            func(*own)  # which chooses the algorithm
            return devices.passing_bytes(device, lambda: func(*own))
        except RuntimeError as error:  # out of memory, or a form that this GPU does not take
            _LOG.info("the workspace of %s is not known: %s", func, error)
            return 0


def _form(one: Any) -> Any:
    return (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, Tensor) else one


def _like(device: torch.device, one: Any) -> Any:
    if not isinstance(one, Tensor):
        return one
    made = torch.empty_strided(tuple(one.shape), one.stride(), dtype=one.dtype, device=device)
    return made.zero_()
