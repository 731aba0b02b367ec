"""Workspaces that nothing but a run tells: of cuDNN's convolutions, and of oneDNN's LSTM.

cuDNN chooses an algorithm by shapes, and with it a workspace, which can be as large as what is
convolved.  oneDNN's LSTM keeps one for backward, in a layout of its own, of which fake tensors have
no byte.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdcompile.hardware import devices
from pdcompile.releases.torch_internals import no_dispatch_modes, pytree

_ATEN = torch.ops.aten
CONVOLUTIONS = frozenset((_ATEN.convolution.default, _ATEN.convolution_backward.default))
LSTM, LSTM_BACKWARD = _ATEN.mkldnn_rnn_layer.default, _ATEN.mkldnn_rnn_layer_backward.default
REAL_BYTES = 1 << 28  # of one run of an LSTM; larger ones are extrapolated
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
    device = devices.of_kind(devices.GPU)

    def passing(call: Callable[[], Any]) -> int:
        call()  # which chooses the algorithm
        return devices.passing_bytes(device, call)

    return _tried(gpu, device, func, args, passing)


def completed(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The result of an op with the tensors of oneDNN's LSTM that its fake one has not: what is kept
    for backward, and the second of two equal gradients of biases."""
    if func is LSTM and not result[3].numel():
        return (*result[:3], result[3].new_empty(_kept_by_lstm(args)))
    if func is LSTM_BACKWARD:
        return (*result[:4], torch.empty_like(result[4]), *result[5:])
    return result


def _kept_by_lstm(args: tuple[Any, ...]) -> int:
    """Bytes that are kept for backward: affine in the samples, but for what is rounded up to
    pages."""
    given, *weights, hidden, cell = args[:7]

    def kept(samples: int) -> int:
        part, *states = (one[..., :samples, :] for one in (given, hidden, cell))
        own = (part, *weights, *states, *args[7:])
        return _tried("oneDNN", devices.HOST, LSTM, own, lambda call: int(call()[3].nbytes))

    b = int(given.shape[1])
    high = min(b, max(3, b * REAL_BYTES // int(given.nbytes)))
    if high == b:
        return kept(b)
    low = max(2, high // 2)  # kernels of a single sample may be others
    return kept(high) + (kept(high) - kept(low)) * (b - high) // (high - low)


def _tried(
    where: str,
    device: torch.device,
    func: Any,
    args: tuple[Any, ...],
    measure: Callable[[Callable[[], Any]], int],
) -> int:
    """Number that `measure` finds for the op on zeros of these forms, once for each; 0 where it
    does not run."""
    key = where, func, str(pytree.tree_map(_form, args))
    if key not in _KNOWN:
        with no_dispatch_modes(), torch.enable_grad():  # without it nothing is kept
            try:
                own = pytree.tree_map(partial(_like, device), args)
                _KNOWN[key] = measure(partial(func, *own))
            except RuntimeError as error:  # out of memory, or a form that the device does not take
                _LOG.info("the workspace of %s is not known: %s", func, error)
                _KNOWN[key] = 0
    return _KNOWN[key]


def _form(one: Any) -> Any:
    return (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, Tensor) else one


def _like(device: torch.device, one: Any) -> Any:
    if not isinstance(one, Tensor):
        return one
    made = torch.empty_strided(tuple(one.shape), one.stride(), dtype=one.dtype, device=device)
    return made.zero_()
