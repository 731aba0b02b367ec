"""`pdcompile.reference`: defines every schedule, in plain PyTorch and one process.

A pipeline is right when it computes the same as the reference.  Nothing here is captured, planned
or scheduled: microbatches run one after another through the model itself, and a schedule is only
the age of the weights that a minibatch is computed on (`versions`).

Conventions that decide the last bit: a microbatch's loss is multiplied by its weight before
backward; backwards run in ascending microbatch order (or in that of a written
schedule); the reported loss is the sum of the weighted
losses from left to right; the clip norm is the norm of the per-parameter norms in the order of
``model.named_parameters()``, tied weights once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from pdcompile.batch import example_call, resolve_batch
from pdcompile.errors import refuse_unknown
from pdcompile.options import Options
from pdcompile.options.of_plan import completed, refuse_others
from pdcompile.options.table import ROWS
from pdcompile.plan import Plan
from pdcompile.reference.reference_pipeline import Reference

__all__ = ["Reference", "reference"]


def reference(
    model: nn.Module, example_inputs: Any = None, *, example_target: Any = None, **options: Any
) -> Reference:
    """Trains `model` in this process exactly as `pdcompile.compile` with the same arguments does.

    Arguments for planning and placement (cluster, stages, recompute, memory, costs, …) are accepted
    and change nothing.  With ``plan=pipe.plan`` what is left out is the plan's, as in compile;
    without it ``microbatches`` has to be a number, and schedules whose weights are as old as the
    warm-up is deep (``stash``, ``vsync``) need it (vsync: or ``stages=``).

    Nothing is captured, so outputs of microbatches are joined along a dimension of their size, be
    it layers that are as many by chance; and short minibatches are cut into no fewer microbatches.

    Raises:
        ConfigError: an argument is not valid, or not for one process.
        InputError: example_inputs do not fit the model's forward.
    """
    refuse_unknown("reference has no option", options.keys() - ROWS.keys(), [*ROWS], {})
    chosen = Options.given(options)
    if chosen.plan is not None:
        plan = chosen.plan if isinstance(chosen.plan, Plan) else Plan.load(chosen.plan)
        refuse_others(chosen, plan)
        chosen = completed(replace(chosen, plan=plan), plan)
    made = Reference(model, chosen)
    if example_inputs is not None:
        resolve_batch(
            example_call(made.to_model(), example_inputs, example_target), chosen.batch_dims
        )
    return made
