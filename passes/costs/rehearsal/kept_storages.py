"""Finds what autograd keeps of a whole graph: which storages, because of which op.

The whole graph runs forward once on tensors without memory, with torch's own autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pdcompile.ir.graph import OpGraph, fingerprint
from pdcompile.passes.costs.costed_op import GraphIndex
from pdcompile.passes.costs.rehearsal.live_storages import saved_storages
from pdcompile.passes.costs.rehearsal.rehearse import from_outside, staged, storages_in
from pdcompile.passes.costs.workspaces import HOST, Kernels
from pdcompile.passes.form.lifetimes import Step
from pdcompile.releases.torch_internals import quiet_shape_errors

Storages = Mapping[int, int]  # a number for each storage -> its bytes


KeptStorages = Mapping[str, Storages]  # by op: those that its backward needs


def new_of(kept: KeptStorages) -> dict[str, int]:
    """The bytes that are kept because of each op and of no earlier one."""
    sizes: dict[int, int] = {}
    found = {}
    for name, storages in kept.items():
        found[name] = sum(size for key, size in storages.items() if key not in sizes)
        sizes |= storages
    return found


_CACHED_GRAPHS = 8
#: by microbatch size, graph and kernels
_cache: dict[tuple[int, str, Kernels, bool], KeptStorages] = {}


def new_bytes(graph: OpGraph, b: int, kernels: Kernels = HOST) -> dict[str, int]:
    """The bytes that autograd keeps because of each op and of no earlier one, on a line between
    two other sizes where the graph was run at these: they are affine in the microbatch size."""
    key = _key(graph, b, kernels)
    others = [one for one in _cache if one[1:] == key[1:]]
    if key in _cache or len(others) < 2:
        return new_of(kept_storages(graph, b, kernels))
    first, last = min(others), max(others)
    share, low = (b - first[0]) / (last[0] - first[0]), new_of(_cache[first])
    high = new_of(_cache[last])
    return {name: max(0, round(low[name] + share * (high[name] - low[name]))) for name in low}


def _key(graph: OpGraph, b: int, kernels: Kernels) -> tuple[int, str, Kernels, bool]:
    return b, fingerprint(graph), kernels, bool(torch.backends.mkldnn.enabled)  # kernels differ


def kept_storages(graph: OpGraph, b: int, kernels: Kernels = HOST) -> KeptStorages:
    """Finds what autograd keeps of one microbatch of size b, by op.

    Parameters, the caller's inputs and views of these are not counted.  An op that cannot run keeps
    what `guessed` says.
    """
    key = _key(graph, b, kernels)
    if key not in _cache:
        if len(_cache) >= _CACHED_GRAPHS:
            del _cache[next(iter(_cache))]
        with quiet_shape_errors():
            _cache[key] = _kept(graph, GraphIndex.of(graph, b), kernels)
    return _cache[key]


def _kept(graph: OpGraph, index: GraphIndex, kernels: Kernels) -> KeptStorages:
    with staged(index, [Step(op) for op in graph.ops], kernels) as stage:
        written = {graph.values[name].storage for op in graph.ops for name in op.mutates}
        env: dict[str, Any] = {}
        made = {op.name for op in graph.ops}
        for name in dict.fromkeys(n for op in graph.ops for n in op.inputs if n not in made):
            given = from_outside(index, name)
            env[name] = given.clone() if graph.values[name].storage in written else given
        storages = storages_in([*env.values(), *stage.fakes.tensors.values()])
        not_counted = {one._cdata for one in storages}
        held: list[Any] = [storages]  # or an address might come again

        def counted(storages: Iterable[torch.UntypedStorage]) -> Storages:
            found = [one for one in storages if one._cdata not in not_counted]
            held.append(found)
            return {one._cdata: one.nbytes() for one in found}

        by_op: dict[str, Storages] = {}
        for op in graph.ops:
            with stage.meter, saved_storages() as saved:
                try:
                    env[op.name] = stage.checked(op, stage.result(op, env))
                except Exception:  # of a user's op
                    env[op.name] = stage.imitated(op, env)
            by_op[op.name] = counted(saved.values())
    return by_op
