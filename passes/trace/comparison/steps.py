"""One step of the model in plain PyTorch.

Every draw has a stream of its own (`pdcompile.eager.randomness`), as stages have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pdcompile.batch import FlatCall, output_leaves
from pdcompile.batch.call import copied
from pdcompile.eager.autocast import autocast_region, region_dtype
from pdcompile.eager.randomness import DrawScope
from pdcompile.errors import PdcompileError, VerifyError
from pdcompile.ir.graph import LeftOut, OpGraph, Ref, leaves
from pdcompile.passes.trace.comparison.step_values import StepValues
from pdcompile.passes.trace.python_state import kept_buffers
from pdcompile.passes.trace.tape.observer import source_of_traceback
from pdcompile.plan import TiedParameter
from pdcompile.reference.tied_uses import TiedUses
from pdcompile.releases.torch_internals import run_backward

Outputs: TypeAlias = dict[str, Any]
Loss: TypeAlias = Tensor | None


class ModelFails(VerifyError):
    """The model itself raises, without pdcompile."""


def of_casts(error: VerifyError, region: str) -> VerifyError:
    """The error of a comparison on the CPU, with a GPU's casts, of stages for GPUs."""
    return VerifyError(
        f"on the CPU, with the casts of {region}, {error.message}",
        where=error.where,
        remedy="where forward asks for the device of a tensor, or opens a region of the CPU, it "
        "takes another way here than on a GPU: decide by an argument or an attribute, or give "
        "verify='off' here and run pdcompile verify there; elsewhere please report it",
    )


@dataclass(frozen=True)
class Step:
    """One step of one mode on one microbatch.

    `size` counts samples; `seed` and `minibatch` name the random streams.  With
    `outputs_backward` backward starts at the outputs where there is no loss.  Outputs that the
    graph leaves out of training are not compared.  The gradients of each stage's uses of a `tied`
    parameter are summed apart.
    """

    model: nn.Module
    graph: OpGraph
    call: FlatCall
    size: int
    loss_fn: Callable[..., Any] | None
    autocast: str | None
    seed: int = 0
    minibatch: int = 0
    outputs_backward: bool = False
    tied: tuple[TiedParameter, ...] = ()

    def values(
        self, run: Callable[[], tuple[Outputs, Loss]], *, gradients: bool | None = None
    ) -> StepValues:
        """The values that `run` leaves behind; the model's buffers are restored.

        With `gradients` (None: as the graph's mode has it) autograd records the run.
        """
        model = self.model
        model.zero_grad(set_to_none=True)
        before = dict(model.named_buffers())
        with kept_buffers(model):
            with torch.set_grad_enabled(self.graph.training if gradients is None else gradients):
                outputs, loss = run()
            found = StepValues(
                outputs={name: _copied(value) for name, value in outputs.items()},
                loss=_copied(loss),
                # Not copied: no other code refers to them, and the next step makes new ones.
                gradients={name: p.grad for name, p in model.named_parameters()},
                buffers={
                    name: buffer.clone()
                    for name, buffer in model.named_buffers()
                    # A longer table in its place is made anew by each call, as capture found.
                    if (old := before.get(name, buffer)) is buffer or old.shape == buffer.shape
                },
                cast_to=region_dtype(self.autocast),
            )
            model.zero_grad(set_to_none=True)
        return found

    def eager(self) -> tuple[Outputs, Loss]:
        """Runs the model itself: outputs by value name and the loss, gradients left in ``.grad``.

        Raises VerifyError, with the user's line, when the model itself fails.
        """
        uses = TiedUses(self.model, self.tied if self.graph.training else ())
        with uses.of_minibatch():
            return self._run(uses, DrawScope(self.model, self.seed, self.minibatch, 0))

    def _run(self, uses: TiedUses, scope: DrawScope) -> tuple[Outputs, Loss]:
        args, kwargs, target = self.call.unflatten(copied(self.call.leaves))
        with scope, uses.of_microbatch(scope):
            with autocast_region(self.autocast), _runs():
                output = self.model(*args, **kwargs)
            outputs = self._named(output_leaves(output))
            loss = outputs.get(self.graph.loss or "")
            if (loss_fn := self.loss_fn) is not None:
                with scope.loss(), autocast_region(self.autocast), _runs():
                    loss = loss_fn(output, target)
        try:
            self._backward(scope, outputs, loss)
        except RuntimeError as error:
            raise VerifyError(
                f"the model's own backward fails without pdcompile: {error}",
                where=f"{type(self.model).__module__}.{type(self.model).__qualname__}",
                remedy="run loss.backward() on the model itself and mend it first",
            ) from error
        return outputs, loss

    def _named(self, found: list[Any]) -> Outputs:
        """Leaves of the output by value name; those that no op makes by position."""
        places = enumerate(leaves(self.graph.output))
        return {
            place.name if isinstance(place, Ref) else f"output {i}": value
            for (i, place), value in zip(places, found, strict=True)
            if not isinstance(place, LeftOut)
        }

    def _backward(self, scope: DrawScope, outputs: Outputs, loss: Loss) -> None:
        roots: list[Any] = [loss]
        if loss is None and self.outputs_backward:
            roots = list(outputs.values())
        tensors = [root for root in roots if isinstance(root, Tensor) and root.requires_grad]
        if self.graph.training and tensors:
            (scope.backward if scope.draws else run_backward)([(one, None) for one in tensors])


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


@contextmanager
def _runs() -> Iterator[None]:
    """Raises failures of the user's code as ModelFails, with the user's line."""
    try:
        yield
    except PdcompileError:
        raise
    except Exception as error:
        raise ModelFails(
            f"the model itself fails on these inputs: {type(error).__name__}: {error}",
            where=source_of_traceback(error),
            remedy="run it once on a microbatch of them; batch_dims= says which inputs are cut",
        ) from error


def eager_values(step: Step) -> tuple[StepValues, ModelFails | None]:
    """Values that the model leaves behind; where it fails under no_grad, that failure and those of
    a run that autograd records, as a graph and stages record what forward differentiates.
    """
    try:
        return step.values(step.eager), None
    except ModelFails as failed:
        if (found := recorded(step)) is None:
            raise
        return found, failed


class AsksForGradients(VerifyError):
    """Forward goes another way in evaluation because autograd does not record there."""

    def __init__(self, what: str, where: str | None) -> None:
        super().__init__(
            "under torch.no_grad(), in which evaluation runs, forward computes something else than "
            "where autograd records, as it does while the model is captured: "
            f"{what} differs",
            where=where,
            remedy="decide in forward by self.training or by an argument, not by requires_grad or "
            "torch.is_grad_enabled()",
        )


def recorded(step: Step) -> StepValues | None:
    """Evaluation of the model while autograd records; None in training, or where that fails."""
    if step.graph.training:
        return None
    try:
        return step.values(step.eager, gradients=True)
    except VerifyError:  # the error that is told is the first one
        return None
