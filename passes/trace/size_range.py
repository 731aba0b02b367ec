"""The range of microbatch sizes that a capture holds for: both ends are tried.

A capture is made at a few sizes near the one that will run; later minibatches may be shorter or
longer.  Python in a forward that asks for the number of samples almost always compares it with a
limit (`if len(x) > 16`, `min(len(x), 16)`, a table of 512 positions, `squeeze()` at one sample).
A computation that is the same at the sizes of the capture and at both ends is then the same
between them, unless it depends on more than limits (`len(x) % 7`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdcompile.batch import BatchLayout, FlatCall
from pdcompile.errors import TraceError
from pdcompile.ir.graph import Capture, SizeRange
from pdcompile.passes.trace.batch_sizes import DiffersBySize, SizeMerge
from pdcompile.passes.trace.tape.run import Recording
from pdcompile.warn import warn

_FACTORS = (16, 4, 2)  # of the microbatch size, for the upper end: the largest that fits


def few_sizes(microbatch_size: int) -> tuple[int, ...]:
    """Three sizes for a model that takes long to record.

    One is a multiple of 2, 3, 4, 5 and 6, so that a forward which asks whether the number of
    samples divides by one of them differs there; one is the end of the range, 16 times the first
    plus one.
    """
    return microbatch_size, 60 if microbatch_size != 60 else 120, 16 * microbatch_size + 1


def size_range(
    record: Callable[[int], Recording], recordings: Sequence[Recording], sizes: tuple[int, ...]
) -> SizeRange:
    """The range of sizes around `sizes`, where `recordings` were made.

    Args:
        record: makes a further recording, at a size that has not been tried.
    """
    smallest, below = 1, ""
    if 1 not in sizes:
        below = _misfit(record, recordings, sizes, 1)
        smallest = min(sizes) if below else 1
    above = ""
    for factor in _FACTORS:
        largest = factor * sizes[0] + 1
        if largest <= max(sizes):
            break
        reason = _misfit(record, recordings, sizes, largest)
        if not reason:
            return SizeRange(smallest, largest, below, above)
        above = reason
    return SizeRange(smallest, max(sizes), below, above)


def fails_at(size: int, error: TraceError) -> DiffersBySize:
    """The error of a model that runs with some number of samples and raises with `size`."""
    return DiffersBySize(
        f"with {counted(size)} {error.message}",
        where=error.where,
        remedy="take the number of samples from the inputs (x.shape[0]) where forward needs it",
    )


class OnlyWhole(TraceError):
    """A model runs on the minibatch, and raises on a microbatch of it."""


def fails_as_microbatch(
    size: int, flat: FlatCall, layout: BatchLayout, error: TraceError
) -> OnlyWhole:
    """The error of a model that runs on the minibatch and raises on a microbatch of it."""
    split = {path: dim for path, dim in layout.dims.items() if dim is not None}
    shapes = {path: tuple(flat.leaves[path].shape) for path in split}
    elsewhere = {
        path: d
        for path, shape in shapes.items()
        for d, n in enumerate(shape)
        if n == layout.size and d != split[path]
    }
    path, dim = next(iter(elsewhere.items()), (list(split)[-1], None))
    told = (
        f"where dimension {split[path]} of {path} {shapes[path]} does not count samples, say so: "
        f"batch_dims={{{flat.root(path)!r}: {dim}}}"
    )
    others = (
        "microbatches=1, or a number of microbatches that leaves the samples that it needs; or let "
        "forward take the number of samples from its inputs (x.shape[0])"
    )
    return OnlyWhole(
        f"with the {counted(size)} of a microbatch {error.message}; with the minibatch's "
        f"{layout.size} it does not",
        where=error.where,
        remedy=f"{told}; or {others}" if elsewhere else f"{others}; or, {told}",
    )


def counted(samples: int) -> str:
    return f"{samples} samples" if samples > 1 else "one sample"


def alone(size: int, error: TraceError) -> SizeRange:
    """The range of a model that is another computation at every other size.

    It loops through its samples, or depends on their number by more than limits; or
    `x.expand(len(x), -1)` is skipped for one sample, and large models run with one.
    """
    return SizeRange(size, size, below=_with_place(error), above=_with_place(error))


def warn_of_one_size(found: Capture) -> None:
    """Warns where every microbatch has to have the size of the first one."""
    graph = next((g for g in (found.train, found.eval) if g.sizes.is_one), None)
    if graph is not None:
        size = graph.batch_size
        larger = "; with fewer, larger microbatches that may not be so" if size == 1 else ""
        warn(
            f"every microbatch has to be of {counted(size)}, and minibatches of another size are "
            f"refused{larger}: {graph.sizes.above}"
        )


def _misfit(
    record: Callable[[int], Recording],
    recordings: Sequence[Recording],
    sizes: tuple[int, ...],
    size: int,
) -> str:
    """The first difference of the model at this size; "" when it is the same computation."""
    merge = SizeMerge((*sizes, size))
    try:
        further = [*recordings, record(size)]
        merge.ops([recording.ops for recording in further])
        merge.any([recording.output for recording in further], "the model's output")
        # Strides and storages are left out: a dimension of one sample is contiguous either way.
        shapes = [tuple(value.shape for value in one.values.values()) for one in further]
        merge.any(shapes, "the shape of a result")
    except TraceError as error:
        return _with_place(error)
    return ""


def _with_place(error: TraceError) -> str:
    return f"{error.message} ({error.where})" if error.where else error.message
