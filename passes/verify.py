"""Do the stages, chained, compute what the model computes?  Bit for bit, on one microbatch.

Eager and stages run on the model's own tensors with the same random streams: outputs, the loss,
the gradient of every parameter and all buffers are compared, in training and in evaluation.
Between stages values are cut off from autograd and gradients handed back as the plan says, so
that a wrong edge is noticed too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from pdcompile.batch import BatchLayout, FlatCall, output_leaves, resize
from pdcompile.errors import PdcompileError, VerifyError
from pdcompile.graph import Capture, OpGraph, Ref, leaves
from pdcompile.passes.boundaries import edges, place_eval, stage_of_ops
from pdcompile.passes.chain import Chain
from pdcompile.passes.meta import unverifiable
from pdcompile.passes.untouched import same_buffers, untouched, write_buffers
from pdcompile.plan import Plan
from pdcompile.randomness import DrawScope, preserved_rng
from pdcompile.stage import Sources

Values: TypeAlias = dict[str, torch.Tensor]
Loss: TypeAlias = torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that the stages make otherwise than the model."""

    mode: str  # train | eval
    what: str  # output | loss | gradient | buffer
    name: str
    stage: int
    largest: float  # absolute difference; infinite where shape or dtype differ

    def __str__(self) -> str:
        return (
            f"{self.what} {self.name!r} of stage {self.stage} in {self.mode} mode differs by "
            f"up to {self.largest:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared and what differs; nothing does for sources that nobody edited."""

    microbatch_size: int
    outputs: int
    gradients: int
    buffers: int
    exact: bool  # compared bit for bit; otherwise within rounding (not on a CPU)
    edited: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    unverified: str = ""  # why nothing was compared

    def __str__(self) -> str:
        if self.unverified:
            return f"not verified: {self.unverified}"
        what = (
            f"{self.outputs} outputs and losses, {self.gradients} gradients, {self.buffers} "
            f"buffers, training and evaluation, microbatch of {self.microbatch_size}"
        )
        edited = f"edited ({', '.join(self.edited)}): " if self.edited else ""
        if not self.differences:
            how = "bit for bit" if self.exact else "up to rounding"
            return f"{edited}the stages equal eager {how} ({what})"
        lines = [f"{edited}the stages differ from eager in {len(self.differences)} places ({what})"]
        lines += [f"  {difference}" for difference in self.differences[:10]]
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


@dataclass(frozen=True, slots=True)
class _Outcome:
    outputs: dict[str, torch.Tensor]
    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def verify(
    capture: Capture,
    plan: Plan,
    sources: Sources,
    model: nn.Module,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None = None,
) -> Verification:
    """Run the model and the stages on one microbatch and compare everything.

    Args:
        flat, layout: a minibatch; its first rows are the microbatch.
        loss_fn: the loss that was captured with the model.

    Modes, gradients, buffers and random state of the model are as before afterwards.

    Raises:
        VerifyError: something differs in sources that nobody edited, or a stage raises.
        SourceError: a source cannot be loaded.
    """
    if reason := unverifiable(model):
        return Verification(0, 0, 0, 0, True, sources.edited, (), reason)
    small = resize(flat, layout, capture.train.batch_size)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    exact = device.type == "cpu"
    found: list[Difference] = []
    outcomes: list[_Outcome] = []
    train_of = stage_of_ops(capture.train, plan)
    for graph in (capture.train, capture.eval):
        placed = train_of if graph.training else place_eval(capture, train_of)
        crossing = edges(graph, placed, len(plan.stages), graph.batch_size)
        chain = Chain(graph, crossing, plan.tied, sources, model, plan.training.seed)
        eager = partial(_eager, model, graph, small, loss_fn, plan)
        with preserved_rng(device), untouched(model, graph.training):
            expected, got = (
                _run(model, graph, call) for call in (eager, partial(_stages, chain, small, plan))
            )
        outcomes.append(expected)
        found += _differences(graph, sources, expected, got, exact=exact)
    report = Verification(
        microbatch_size=capture.train.batch_size,
        outputs=sum(len(one.outputs) + (one.loss is not None) for one in outcomes),
        gradients=sum(g is not None for one in outcomes for g in one.gradients.values()),
        buffers=sum(len(one.buffers) for one in outcomes),
        exact=exact,
        edited=sources.edited,
        differences=tuple(found),
    )
    if found and not sources.edited:
        raise VerifyError(
            f"the generated stages differ from the model: {found[0]}",
            where=f"stage_{found[0].stage}.py",
            remedy="please report this model; verify='off' runs it all the same",
        )
    return report


def _run(model: nn.Module, graph: OpGraph, call: Callable[[], tuple[Values, Loss]]) -> _Outcome:
    """Call from the state that the model is in now, and put its buffers back."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)

    def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().clone()

    with same_buffers(model):
        with torch.set_grad_enabled(graph.training):
            outputs, loss = call()
        outcome = _Outcome(
            outputs={name: value.detach().clone() for name, value in outputs.items()},
            loss=copied(loss),
            gradients={name: copied(p.grad) for name, p in model.named_parameters()},
            buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
        )
    write_buffers(model, buffers)
    return outcome


def _eager(
    model: nn.Module,
    graph: OpGraph,
    flat: FlatCall,
    loss_fn: Callable[..., Any] | None,
    plan: Plan,
) -> tuple[Values, Loss]:
    args, kwargs, target = flat.unflatten(copied_leaves(flat))
    with DrawScope(model, plan.training.seed, 0, 0) as scope:
        with autocast(plan):
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


def _stages(chain: Chain, flat: FlatCall, plan: Plan) -> tuple[Values, Loss]:
    try:
        with autocast(plan):
            outputs, loss = chain.forward(copied_leaves(flat))
        if chain.graph.training and loss is not None:
            chain.backward(loss)
    except PdcompileError:
        raise
    except Exception as error:
        raise VerifyError(
            f"stage {chain.running} raises {type(error).__name__}: {error}",
            where=f"stage_{chain.running}.py",
            remedy="see the traceback above; undo the last edit if there was one",
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


def _differences(
    graph: OpGraph, sources: Sources, expected: _Outcome, got: _Outcome, *, exact: bool
) -> list[Difference]:
    mode = "train" if graph.training else "eval"
    last = len(sources.interfaces) - 1
    home = {
        fqn: interface.index
        for interface in reversed(sources.interfaces)
        for fqn in (*interface.parameters, *interface.buffers)
    }
    rows: list[tuple[str, str, int, torch.Tensor | None, torch.Tensor | None]] = [
        ("output", name, last, value, got.outputs.get(name))
        for name, value in expected.outputs.items()
    ]
    rows.append(("loss", graph.loss or "loss", last, expected.loss, got.loss))
    rows += [
        ("gradient", name, home.get(name, 0), value, got.gradients[name])
        for name, value in expected.gradients.items()
    ]
    rows += [
        ("buffer", name, home.get(name, 0), value, got.buffers[name])
        for name, value in expected.buffers.items()
    ]
    found = []
    for what, name, stage, one, other in rows:
        largest = _distance(one, other, exact)
        if largest is not None:
            found.append(Difference(mode, what, name, stage, largest))
    return found


def _distance(one: torch.Tensor | None, other: torch.Tensor | None, exact: bool) -> float | None:
    """The largest absolute difference; None where there is none that counts."""
    if one is None or other is None:
        # A parameter that got no gradient and one that got zeros update alike in most optimizers,
        # but not in all: it is a difference.
        return None if one is other else float("inf")
    one, other = (t.to_dense() if t.layout != torch.strided else t for t in (one, other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.numel() == 0 or torch.equal(one, other):
        return None
    if not (one.is_floating_point() or one.is_complex()):
        return float((one.to(torch.float64) - other.to(torch.float64)).abs().max())
    equal = (one == other) | ((one != one) & (other != other))
    if bool(equal.all()) or (not exact and torch.allclose(one, other, equal_nan=True)):
        return None
    gap = (one - other).abs()
    return float(gap.max()) if bool(torch.isfinite(gap).all()) else float("inf")
