"""Casts of a GPU's autocast region in a rehearsal, whose fake tensors are the CPU's.

Autograd's engine takes no fake tensors of a GPU where there is none, and the CPU's region casts
other ops.  But the graph, which was recorded in the GPU's region, says which dtype each op gives:
an op that gives another one in the CPU's region is run outside of it, on inputs that were cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdcompile.eager.autocast import OFF, on_gpu
from pdcompile.hardware import devices
from pdcompile.ir.graph import Op
from pdcompile.passes.costs.costed_op import CostedOp, structural_key

#: runs an op on values by name
Run = Callable[[Op, Mapping[str, Any]], Any]

MOST = 100_000  # ops


class _Way(Enum):
    REGION = "the CPU's region casts as the GPU's does"
    INPUTS = "inputs are cast to the dtype of the result"
    RESULT = "the result is cast"


_KNOWN: dict[str, _Way] = {}  # by structural key


def with_casts(call: CostedOp, run: Run, make: Callable[[str], Tensor]) -> Run:
    """`run` for the op of `call`, with the casts of the region that it is in.

    To be called in the fake mode; `make` gives a fake tensor of a value that the op reads.
    """
    if not on_gpu(call.op.autocast):
        return run
    dtype = (call.op.autocast or "").rpartition(":")[2]
    value = call.index.graph.values[call.op.name]
    ways = {
        way: partial(_run, run, way, f"{devices.HOST.type}:{dtype}", value.dtype) for way in _Way
    }
    values = call.index.graph.values
    if dtype == OFF or not all(values[name].is_tensor for name in (*call.op.inputs, value.name)):
        return ways[_Way.REGION]
    key = structural_key(call)
    if key not in _KNOWN:
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        given = {name: make(name) for name in call.op.inputs}
        wanted = getattr(torch, value.dtype)
        tried = (_Way.REGION, _Way.INPUTS)
        found = (way for way in tried if _dtype(ways[way], call.op, given) == wanted)
        _KNOWN[key] = next(found, _Way.RESULT)
    return ways[_KNOWN[key]]


def _run(run: Run, way: _Way, region: str, dtype: str, op: Op, env: Mapping[str, Any]) -> Any:
    if way is _Way.REGION:
        return run(replace(op, autocast=region), env)
    if way is _Way.RESULT:
        return run(replace(op, autocast=region), env).to(getattr(torch, dtype))
    off = replace(op, autocast=f"{devices.HOST.type}:{OFF}")
    return run(off, {name: _cast(env[name], dtype) for name in op.inputs})


def _cast(value: Any, dtype: str) -> Any:
    return value.to(getattr(torch, dtype)) if value.is_floating_point() else value


def _dtype(run: Run, op: Op, given: Mapping[str, Tensor]) -> torch.dtype | None:
    """What an op gives; None where it does not run so."""
    try:
        found: torch.dtype = run(op, given).dtype
    except Exception:
        return None
    return found
