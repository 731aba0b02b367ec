"""The call of a model as named leaves, and a minibatch as microbatches.

`flatten_call` turns ``model(*args, **kwargs)`` and the target into leaves named by path, so that
the graph, the stages and the transport can speak of ``x``, ``batch['ids']`` or ``target[0]``.
`resolve_batch` finds the batch dimension of each leaf, `split` and `weights` say what the
microbatches are and how much each counts: eager reference and pipeline use the same.
"""

from pdcompile.batch.call import (
    Argument,
    CallSpec,
    FlatCall,
    as_one_argument,
    check_example,
    example_call,
    flatten_call,
)
from pdcompile.batch.layout import (
    BatchLayout,
    check_batch_dims,
    follow_batch,
    lone_row_error,
    lone_rows,
    resolve_batch,
)
from pdcompile.batch.memory_order import memory_order
from pdcompile.batch.microbatches import concatenate, microbatch_sizes, resize, split, weights
from pdcompile.batch.structure import (
    flatten_output,
    map_tensors,
    output_leaves,
    unflatten_output,
)

__all__ = [
    "Argument",
    "BatchLayout",
    "CallSpec",
    "FlatCall",
    "as_one_argument",
    "check_batch_dims",
    "check_example",
    "concatenate",
    "example_call",
    "flatten_call",
    "flatten_output",
    "follow_batch",
    "lone_row_error",
    "lone_rows",
    "map_tensors",
    "memory_order",
    "microbatch_sizes",
    "output_leaves",
    "resize",
    "resolve_batch",
    "split",
    "unflatten_output",
    "weights",
]
