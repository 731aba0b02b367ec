"""One step of the model in plain PyTorch and one of the stages, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from pdcompile.batch import FlatCall, output_leaves
from pdcompile.eager.randomness import DrawScope
from pdcompile.errors import PdcompileError, VerifyError
from pdcompile.ir.graph import OpGraph, Ref, leaves
from pdcompile.passes.stages.chain import Chain
from pdcompile.passes.trace.facts import source_of_traceback
from pdcompile.passes.untouched import same_buffers, write_buffers
from pdcompile.passes.verify.watch import line_of_traceback
from pdcompile.plan import Plan

Values: TypeAlias = dict[str, torch.Tensor]
Loss: TypeAlias = torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that one step of one mode leaves behind, copied."""

    outputs: Values
    loss: Loss
    gradients: dict[str, torch.Tensor | None]
    buffers: Values


def outcome_of(
    model: nn.Module,
    graph: OpGraph,
    call: Callable[[], tuple[Values, Loss]],
    *,
    gradients: bool | None = None,
) -> Outcome:
    """Call from the state that the model is in now, and put its buffers back.

    With `gradients` (None: as the graph's mode has it) autograd records the call.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)

    def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().clone()

    with same_buffers(model):
        with torch.set_grad_enabled(graph.training if gradients is None else gradients):
            outputs, loss = call()
        outcome = Outcome(
            outputs={name: value.detach().clone() for name, value in outputs.items()},
            loss=copied(loss),
            # Nobody else holds them: the next step makes others.
            gradients={name: p.grad for name, p in model.named_parameters()},
            buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
        )
        model.zero_grad(set_to_none=True)
    write_buffers(model, buffers)
    return outcome


def eager(
    model: nn.Module,
    graph: OpGraph,
    flat: FlatCall,
    loss_fn: Callable[..., Any] | None,
    plan: Plan,
    minibatch: int = 0,
) -> tuple[Values, Loss]:
    """The model itself: outputs by value name and the loss, gradients left in ``.grad``.

    Raises VerifyError, with the user's line, when the model itself fails.
    """
    args, kwargs, target = flat.unflatten(copied_leaves(flat))
    with DrawScope(model, plan.training.seed, minibatch, 0) as scope:
        with autocast(plan), _told("the model itself", "run the model once without pdcompile"):
            output = model(*args, **kwargs)
        named = {
            place.name: leaf
            for place, leaf in zip(leaves(graph.output), output_leaves(output), strict=True)
            if isinstance(place, Ref)
        }
        loss = named.get(graph.loss or "")
        if loss_fn is not None:
            with scope.loss(), autocast(plan):
                loss = loss_fn(output, target)
        if graph.training and loss is not None and loss.requires_grad:
            try:
                scope.backward(loss)
            except RuntimeError as error:
                raise VerifyError(
                    f"the model's own backward fails without pdcompile: {error}",
                    where=f"{type(model).__module__}.{type(model).__qualname__}",
                    remedy="run loss.backward() on the model itself and mend it first",
                ) from error
    return named, loss


class ModelFails(VerifyError):
    """The model itself raises, without pdcompile."""


class _told:
    """Failures of the user's code as ModelFails with the user's line."""

    def __init__(self, what: str, remedy: str) -> None:
        self._what, self._remedy = what, remedy

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, PdcompileError):
            raise ModelFails(
                f"{self._what} fails on these inputs: {_said(error)}",
                where=source_of_traceback(error),
                remedy=self._remedy,
            ) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def needs_gradients(failed: ModelFails) -> ModelFails:
    """What it means that the model can be evaluated with autograd alone."""
    said = _said(failed.__cause__) if failed.__cause__ is not None else failed.message
    return ModelFails(
        f"evaluation runs under torch.no_grad(), where the model fails: {said}",
        where=failed.where,
        remedy="in forward, put torch.enable_grad() around what is differentiated, and "
        "requires_grad_() on what it is differentiated by",
    )


def stages(chain: Chain, flat: FlatCall, plan: Plan) -> tuple[Values, Loss]:
    """The same by the generated stages.  Raises VerifyError, naming the stage that fails."""
    try:
        with autocast(plan):
            outputs, loss = chain.forward(copied_leaves(flat))
        if chain.graph.training and loss is not None:
            chain.backward(loss)
    except PdcompileError:
        raise
    except Exception as error:
        mode = "training" if chain.graph.training else "evaluation"
        raise VerifyError(
            f"stage {chain.running} raises in {mode}, where the model does not: {_said(error)}",
            where=line_of_traceback(error) or f"stage_{chain.running}.py",
            remedy="undo the last edit of the stage's file"
            if f"stage_{chain.running}.py" in chain.edited
            else "please report this model: stages have to do what it does",
        ) from error
    return outputs, loss


def autocast(plan: Plan) -> AbstractContextManager[Any]:
    """The autocast region around model and loss that the plan asks for, if any."""
    if plan.training.autocast is None:
        return nullcontext()
    device, _, dtype = plan.training.autocast.rpartition(":")
    return torch.autocast(device or "cpu", getattr(torch, dtype))


def copied_leaves(flat: FlatCall) -> dict[str, Any]:
    """The leaves of a call, tensors copied: a model may write into its inputs."""
    return {
        path: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in flat.leaves.items()
    }
