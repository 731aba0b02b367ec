"""Integers of the inputs of one recorded call, from the example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.ir.graph import CHECK, GraphInput, OpGraph
from pdcompile.ir.value_checks import needed_ops
from pdcompile.releases.torch_internals import no_dispatch_modes

MAX_WRITTEN = 2_048  # numbers of one input that a source file repeats
MAX_SAMPLES = 64  # of the example, on each of which a value must be the same


def example_calls(
    flat: FlatCall, layout: BatchLayout, inputs: tuple[GraphInput, ...], call: FlatCall
) -> Iterator[Mapping[str, Tensor]]:
    """Integers and bools of the inputs in the shapes of one recorded call, by name.

    First those of the call itself, then every sample repeated to its size, then the minibatch in
    pieces of its size.

    Args:
        flat: the example minibatch.
        layout: which dims of it count samples.
        inputs: the graph's inputs.
        call: the recorded call, the example resized.
    """
    known: dict[str, tuple[Tensor, Tensor, int | None]] = {
        entry.name: (call.leaves[entry.path], flat.leaves[entry.path], entry.batch_dim)
        for entry in inputs
        if not (call.leaves[entry.path].is_meta or _continuous(call.leaves[entry.path]))
    }
    yield {name: leaf for name, (leaf, _, _) in known.items()}
    rows = {leaf.shape[dim] for leaf, _, dim in known.values() if dim is not None}
    total = layout.size
    if len(rows) != 1 or not layout.splits:
        return
    size = rows.pop()
    pieces = [[i] * size for i in range(total)][:MAX_SAMPLES]
    starts = range(0, total, size)
    pieces += [[min(s + i, total - 1) for i in range(size)] for s in starts][:MAX_SAMPLES]
    for piece in pieces:
        with no_dispatch_modes():
            index = torch.tensor(piece)
            given = {
                name: leaf if dim is None else whole.index_select(dim, index.to(whole.device))
                for name, (leaf, whole, dim) in known.items()
            }
        yield given


def _continuous(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def demanded(graph: OpGraph, call: FlatCall) -> dict[str, Any]:
    """Integers of the example, by path, as nested lists: of inputs whose values may make the model
    fail, because they are checked or are lengths."""
    wanted: set[str] = set()
    for i, op in enumerate(graph.ops):
        lengths = op.inputs[1:2] if op.target.endswith("_pack_padded_sequence") else ()
        read = op.inputs if op.target == CHECK else lengths
        if read:
            wanted |= needed_ops(graph.ops[:i], read, lambda name: graph.values[name].storage)[1]
    found = {}
    for entry in graph.inputs:
        leaf = call.leaves[entry.path]
        small = leaf.numel() <= MAX_WRITTEN and not leaf.is_meta
        if entry.name in wanted and small and not _continuous(leaf):
            found[entry.path] = leaf.tolist()
    return found


def shuffled(leaf: Tensor) -> Tensor:
    """The same numbers in another order."""
    order = torch.randperm(leaf.numel(), generator=torch.Generator().manual_seed(0))
    return leaf.reshape(-1)[order.to(leaf.device)].reshape(leaf.shape)
