"""A GPU's autocast region without a GPU: its casts on the CPU, and layers of cuDNN on fake tensors.

The two regions cast other ops (softmax, sums and norms are computed in float32 on a GPU alone).
What was recorded in the one does not run in the other: a cast that does nothing on a GPU is not
recorded, and the model may ask for the dtype of a result.  Torch lets every op be given another
kernel of the CPU's region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdcompile.cluster import GPU_KIND, HOST_KIND
from pdcompile.releases.torch_internals import (
    OpOverload,
    gpu_autocast_on_cpu,
    has_kernel,
    kernels_of_region,
    op_of,
    outside_autocast,
    pytree,
    region_kernels,
)

# Those that torch's documentation has in float16 on a GPU and not on the CPU, and those that take
# the widest dtype of their inputs; all others of a GPU's region are computed in float32.
# fmt: off
LOW = frozenset((
    "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "addmv", "addr", "chain_matmul", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "lstm_cell", "mv",
    "rnn_relu_cell", "rnn_tanh_cell",
))
WIDEST = frozenset((
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "tensordot", "vdot",
))
# fmt: on
# cuDNN computes them in float16 whatever the region's dtype is (_cudnn_rnn_cast_reflatten).
_CUDNN = ("gru", "lstm", "rnn_relu", "rnn_tanh")
_LAYERS = tuple(f"{name}.{way}" for name in _CUDNN for way in ("input", "data"))
# Float32 is what they are told, and not what their inputs are cast to.
_WITH_DTYPE: dict[str, Callable[..., Any]] = {
    "norm.Scalar": lambda x, p=2: torch.ops.aten.norm.ScalarOpt_dtype(x, p, dtype=torch.float32),
    "norm.ScalarOpt_dim": lambda x, p, dim, keepdim=False: torch.ops.aten.norm.ScalarOpt_dim_dtype(
        x, p, dim, keepdim, dtype=torch.float32
    ),
}

_open = False


@contextmanager
def gpu_casts_on_cpu() -> Iterator[None]:
    """Regions of GPUs are open on the CPU too, and cast there what they cast on a GPU."""
    global _open
    if _open:
        yield
        return
    there, here = kernels_of_region(GPU_KIND), kernels_of_region(HOST_KIND)
    other: dict[str, Callable[..., Any] | None] = {name: _kernel(name) for name in there - here}
    other |= {name: _kernel(name) for name in there & here if name.partition(".")[0] in WIDEST}
    other |= dict.fromkeys(here - there, None)
    other |= _layers(HOST_KIND)
    with region_kernels(other), gpu_autocast_on_cpu():
        _open = True
        try:
            yield
        finally:
            _open = False


@contextmanager
def layers_of_cudnn() -> Iterator[None]:
    """Recurrent layers run on fake tensors of a GPU, with or without one, and give its dtypes.

    cuDNN asks the driver, for fake tensors too; without cuDNN layers are made of fused cells, of
    which torch has no shape rule for GRU's.
    """
    cell = "_thnn_fused_gru_cell"
    rules = {} if has_kernel(f"aten::{cell}", "Meta") else {cell: _fused_gru_cell}
    before = torch.backends.cudnn.enabled
    with region_kernels(rules, "Meta"), region_kernels(_layers(GPU_KIND), "AutocastCUDA"):
        torch.backends.cudnn.enabled = False
        try:
            yield
        finally:
            torch.backends.cudnn.enabled = before


def _fused_gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(b, 3h), (b, 3h), (b, h) -> the next state (b, h), and what backward needs (b, 5h)."""
    (rows, width), dense = hx.shape, torch.contiguous_format
    return torch.empty_like(hx, memory_format=dense), hx.new_empty(rows, 5 * width)


def _layers(kind: str) -> dict[str, Callable[..., Any]]:
    """The kernels of recurrent layers in a region of GPUs, for tensors on this kind of device."""
    return {name: partial(_in_float16, op_of(name), kind) for name in _LAYERS}


def _in_float16(op: OpOverload, kind: str, *args: Any) -> Any:
    cast = partial(_to, dtype=torch.float16, kind=kind)
    with outside_autocast():
        return op(*pytree.tree_map_only(Tensor, cast, args))


def _kernel(name: str) -> Callable[..., Any]:
    op, base = op_of(name), name.partition(".")[0]
    narrow = _WITH_DTYPE.get(name)

    def cast(*args: Any, **kwargs: Any) -> Any:
        with outside_autocast():
            if narrow is not None:
                return narrow(*args, **kwargs) if _casts(args[0]) else op(*args, **kwargs)
            if base in LOW:
                dtype = torch.get_autocast_dtype(HOST_KIND)
            elif base in WIDEST:
                dtype = _widest((args, kwargs))
            elif any(argument.name == "dtype" for argument in op._schema.arguments):
                return _in_float32(op, args, kwargs)
            else:
                dtype = torch.float32
            args, kwargs = pytree.tree_map_only(Tensor, lambda t: _to(t, dtype), (args, kwargs))
            return op(*args, **kwargs)

    return cast


def _casts(value: Any, kind: str = HOST_KIND) -> bool:
    """True if a region for this kind of device casts it."""
    return (
        isinstance(value, Tensor)
        and value.device.type == kind
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _to(tensor: Tensor, dtype: torch.dtype, kind: str = HOST_KIND) -> Tensor:
    return tensor.to(dtype) if _casts(tensor, kind) else tensor


def _widest(arguments: Any) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in pytree.tree_leaves(arguments) if _casts(tensor)}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(HOST_KIND)


def _in_float32(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op in float32, unless it is told another dtype."""
    place = [argument.name for argument in op._schema.arguments].index("dtype")
    told = kwargs.get("dtype", args[place] if len(args) > place else None)
    if told is None and _casts(args[0]):
        return op(*args[:place], **kwargs | {"dtype": torch.float32})
    return op(*args, **kwargs)
