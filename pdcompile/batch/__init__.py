"""The call of a model as named leaves, and a minibatch as microbatches.

`flatten_call` turns ``model(*args, **kwargs)`` and the target into leaves named by path, such as
``x``, ``batch['ids']`` or ``target[0]`` in graph, stages and transport.  `resolve_batch` finds the
batch dimension of each leaf; `split` and `weights` give the microbatches and the weights of their
losses, for the eager reference and the pipeline alike.
"""

from pdcompile.batch.call import EVALUATION as EVALUATION
from pdcompile.batch.call import FlatCall as FlatCall
from pdcompile.batch.call import Whole as Whole
from pdcompile.batch.call import as_one_argument as as_one_argument
from pdcompile.batch.call import check_example as check_example
from pdcompile.batch.call import empty_call as empty_call
from pdcompile.batch.call import example_call as example_call
from pdcompile.batch.call import flatten_call as flatten_call
from pdcompile.batch.layout import BatchLayout as BatchLayout
from pdcompile.batch.layout import check_batch_dims as check_batch_dims
from pdcompile.batch.layout import check_splits as check_splits
from pdcompile.batch.layout import follow_batch as follow_batch
from pdcompile.batch.layout import lone_row_error as lone_row_error
from pdcompile.batch.layout import lone_rows as lone_rows
from pdcompile.batch.layout import memory_order as memory_order
from pdcompile.batch.layout import resolve_batch as resolve_batch
from pdcompile.batch.microbatches import concatenate as concatenate
from pdcompile.batch.microbatches import microbatch_sizes as microbatch_sizes
from pdcompile.batch.microbatches import resize as resize
from pdcompile.batch.microbatches import split as split
from pdcompile.batch.microbatches import weights as weights
from pdcompile.batch.omitted_output import OmittedOutput as OmittedOutput
from pdcompile.batch.structure import flatten_output as flatten_output
from pdcompile.batch.structure import map_tensors as map_tensors
from pdcompile.batch.structure import output_leaves as output_leaves
from pdcompile.batch.structure import unflatten_output as unflatten_output
