"""Packed sequences: recurrent layers on samples of different lengths.

`pack_padded_sequence` is Python around one operator, whose results have sizes that depend on the
lengths (`selections` makes them up).  A recurrent layer on them is recorded as the operator that
torch calls with its weights.  Torch has no shape rules on fake tensors for this operator and for
the one that pads again, so they are here, and so is the one of `ctc_loss`, another loss of samples
of different lengths.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pdcompile.hardware import devices

_STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
_MEMBERS = 9  # arguments of such a call with batch sizes, all positional
_LENGTHS = 4  # of ctc_loss: the lengths of labels are the last positional argument


def takes_packed(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a recurrent layer is called with a packed sequence."""
    given = args[0] if args else kwargs.get("input")
    return isinstance(module, nn.RNNBase) and isinstance(given, PackedSequence)


class Packed:
    """The packed sequences of one recording."""

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}  # id of batch sizes -> samples that were packed
        self._kept: list[Tensor] = []

    def made(self, func: Any, args: Any, result: Any) -> None:
        """Remembers, after a call of the model, how many samples it packed."""
        if getattr(func, "__name__", "") == "_pack_padded_sequence" and len(args) == 3:
            self._kept.append(result[1])
            self._samples[id(result[1])] = args[0].shape[0 if args[2] else 1]

    def result(self, func: Any, args: Any, kwargs: Any, module: nn.Module | None) -> Any:
        """The result on fakes of a call on packed sequences; None for other calls.

        `module` is the running one.
        """
        name = getattr(func, "__name__", "")
        if func is F.ctc_loss and len(args) == _LENGTHS and isinstance(args[3], Tensor):
            logs = args[0]
            shape = logs.shape[1:-1] if kwargs.get("reduction") == "none" else ()
            return _like(logs, shape, [logs], torch.promote_types(logs.dtype, torch.float32))
        # The form without batch sizes has as many arguments, but a bool (biases) as the fourth.
        if name in _STATES and len(args) == _MEMBERS and not isinstance(args[3], bool):
            return _recurrent(name, args)
        if name == "_pad_packed_sequence" and id(args[1]) in self._samples:
            return self._padded(args)
        if name == "__getitem__" and isinstance(module, nn.RNNBase) and args[1:] == (0,):
            # Batch size of the first step: all samples, because no length is zero.
            return self._samples.get(id(args[0]))
        return None

    def _padded(self, args: Any) -> tuple[Tensor, Tensor]:
        data, batch_sizes, batch_first, _, longest = args
        samples = self._samples[id(batch_sizes)]
        dims = (samples, longest) if batch_first else (longest, samples)
        return _like(data, (*dims, *data.shape[1:]), [data]), batch_sizes.new_empty((samples,))


def _recurrent(name: str, args: Any) -> tuple[Tensor, ...]:
    data, _, states, weights, *_, both_ways = args
    states = list(states) if isinstance(states, tuple | list) else [states]
    sources = [data, *states, *weights]
    width, dtype = states[0].shape[-1] * (2 if both_ways else 1), _dtype(name, data)
    return (
        _like(data, (data.shape[0], width), sources, dtype),
        *(_like(state, state.shape, sources, dtype) for state in states[: _STATES[name]]),
    )


def _dtype(name: str, data: Tensor) -> torch.dtype:
    """The dtype of what a recurrent layer makes of these numbers, where an autocast region may be
    open: cuDNN has its own, and on the CPU the plain cells alone are cast."""
    kind = data.device.type
    if not torch.is_autocast_enabled(kind) or data.dtype == torch.float64:
        return data.dtype
    if not devices.is_host(data.device):
        return torch.float16
    return torch.get_autocast_dtype(kind) if name.startswith("rnn") else data.dtype


def _like(
    tensor: Tensor, shape: Any, sources: list[Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    made = tensor.detach().new_empty(tuple(shape), dtype=dtype)
    needed = torch.is_grad_enabled() and any(source.requires_grad for source in sources)
    # A result is not a leaf: the model may write into it.
    return made.requires_grad_().clone() if needed else made
