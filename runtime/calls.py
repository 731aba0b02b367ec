"""One call of the user's: checked against what was captured, and cut into microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pdcompile.batch import FlatCall, follow_batch, microbatch_sizes, split, weights
from pdcompile.errors import ConfigError, InputError
from pdcompile.graph import OpGraph, size_at
from pdcompile.options import Options
from pdcompile.runtime.prepared import Prepared


@dataclass(frozen=True, slots=True)
class Call:
    """A minibatch.  `size` is None on a rank that holds none of its inputs."""

    flat: FlatCall
    size: int | None


def read_call(prepared: Prepared, graph: OpGraph, flat: FlatCall, needed: frozenset[str]) -> Call:
    """Check a call before anything is sent.

    `needed` are the paths that this rank reads; others may be None.  Raises InputError for a
    missing input, another shape or dtype, or another constant than the captured one.
    """
    constants = dict(graph.constants)
    for path, text in constants.items():
        if path in flat.leaves and repr(flat.leaves[path]) != text:
            raise InputError(
                f"this input is {flat.leaves[path]!r} now, and was {text} when the model was "
                "captured; its value is part of the plan",
                where=path,
                remedy="make another pipeline for the other value, or pass it as a tensor",
            )
    for path in needed:
        if flat.leaves.get(path) is None:
            target = path == "target" or path.startswith(("target[", "target."))
            raise InputError(
                "the target is missing" if target else "an input is missing",
                where=path,
                remedy="pass target=... to step: loss_fn needs it" if target else
                "pass it: a stage on this rank reads it (pipe.needs lists what this rank needs)",
            )  # fmt: skip
    tensors = {p: leaf for p, leaf in flat.leaves.items() if isinstance(leaf, Tensor)}
    known = {item.path: item for item in graph.inputs}
    present = FlatCall(
        {p: leaf if p in tensors else None for p, leaf in flat.leaves.items()}, flat.spec
    )
    splits = prepared.layout.splits
    layout = follow_batch(present, prepared.layout) if splits else prepared.layout
    for path, leaf in tensors.items():
        if path in known:
            _check_leaf(graph, known[path].name, path, leaf, known[path].batch_dim)
    told = not splits or any(layout.dims[path] is not None for path in tensors)
    return Call(flat, layout.size if told else None)


def _check_leaf(graph: OpGraph, name: str, path: str, leaf: Tensor, batch_dim: int | None) -> None:
    value = graph.values[name]
    dtype = str(leaf.dtype).removeprefix("torch.")
    expected = [size_at(size, graph.batch_size) for size in value.shape]
    same = len(expected) == leaf.dim() and all(
        dim == batch_dim or size == leaf.shape[dim] for dim, size in enumerate(expected)
    )
    if same and dtype == value.dtype:
        return
    text = ", ".join("b" if d == batch_dim else str(size) for d, size in enumerate(expected))
    raise InputError(
        f"this input is {dtype} {tuple(leaf.shape)}, captured was {value.dtype} ({text})",
        where=path,
        remedy="pad or convert it to the captured shape and dtype, or make another pipeline",
    )


def microbatches(
    prepared: Prepared, flat: FlatCall, size: int, paths: tuple[str, ...]
) -> tuple[list[dict[str, Any]], list[int]]:
    """The leaves of each microbatch, only the given paths, and the samples of each."""
    layout = replace(prepared.layout, size=size)
    count = prepared.plan.training.num_microbatches
    chosen = {path: flat.leaves[path] for path in paths}
    sizes = microbatch_sizes(size, count) if layout.splits else [size]
    return split(chosen, layout, count), sizes


def loss_weights(prepared: Prepared, options: Options, flat: FlatCall, size: int) -> list[float]:
    """What each microbatch's loss counts."""
    layout = replace(prepared.layout, size=size)
    count = prepared.plan.training.num_microbatches
    return weights(options.loss_reduction, flat, layout, count)


def refuse_target(options: Options, target: Any) -> None:
    """Raise ConfigError for a target that nothing would use."""
    if target is not None and options.loss_fn is None:
        raise ConfigError(
            "a target was given, but there is no loss_fn to use it",
            remedy="give loss_fn=, or pass it to the model under its own name "
            "(step_call(args, kwargs) for an argument called target)",
        )
