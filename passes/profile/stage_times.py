"""Measures planned stages: their generated source, forward and backward, each stage alone.

Sums of op times miss what ops do to each other: what stays in the caches, what one call of
autograd costs.  A stage runs here as a rank runs it, on the model's own tensors and on values
that the stages before it make of the example.  Afterwards the model is as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from pdcompile.eager.autocast import autocast_region
from pdcompile.eager.randomness import DrawScope, preserved_rng, reseed
from pdcompile.ir import opaque
from pdcompile.ir.graph import OpGraph
from pdcompile.ir.stage_interface import Signature, Sources, StageInterface
from pdcompile.passes.codegen.folder import set_draw, stage_classes
from pdcompile.passes.costs import costed_ops
from pdcompile.passes.profile import cache
from pdcompile.passes.profile.entries import Entry, structural_key
from pdcompile.passes.profile.op_bench import timed
from pdcompile.passes.stages.chain import build
from pdcompile.passes.untouched import untouched
from pdcompile.plan import Plan

MIN_RUNS, MAX_RUNS = 3, 30
BUDGET_SECONDS = 1.0
WARMUPS = 1

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one microbatch on one stage, medians over `runs`; none when `cached`."""

    forward_seconds: float
    backward_seconds: float
    runs: int = 1
    cached: bool = False

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


def measure_stages(
    graph: OpGraph,
    plan: Plan,
    sources: Sources,
    model: nn.Module,
    leaves: Mapping[str, Any],
    *,
    microbatch_size: int,
    budget_seconds: float = BUDGET_SECONDS,
    progress: Progress | None = None,
) -> tuple[StageTimes, ...]:
    """Time every stage of a plan; stages that do the same are measured once.

    What the cache knows is not measured again (see `cache`).

    Args:
        graph: the captured training graph.
        sources: what was generated from the plan.
        leaves: the call's leaves by path (`FlatCall.leaves`), of one microbatch.
        budget_seconds: for all stages together; each runs at least three times.
    """
    keys = [stage_key(graph, plan, k, microbatch_size) for k in range(len(plan.stages))]
    share = budget_seconds / len(set(keys))
    found: dict[str, StageTimes] = {}
    tensors: dict[str, torch.Tensor] = dict(sources.constants)
    tensors.update(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    gradient = {edge.value for edge in plan.edges if edge.gradient}
    device = next((one.device for one in tensors.values()), torch.device("cpu"))
    with preserved_rng(device), untouched(model, training=True):
        model.zero_grad(set_to_none=True)
        values: dict[str, Any] = {}
        classes = stage_classes(sources)
        for k, (cls, interface) in enumerate(zip(classes, sources.interfaces, strict=True)):
            if progress:
                progress(k, len(keys), f"stage {k}")
            bench = _Bench(
                cls, interface, tensors.__getitem__, model, gradient, leaves, device,
                partial(autocast_region, plan.training.autocast),
            )  # fmt: skip
            arguments = bench.arguments(values)
            key = keys[k]
            if key not in found:
                environment = _environment(graph, plan, k, device, microbatch_size)
                known = _cached(environment, key)
                found[key] = known or bench.measure(arguments, share)
                if environment is not None and known is None:
                    _save(environment, key, found[key])
                model.zero_grad(set_to_none=True)
            # Forward itself may take gradients, of which nothing is kept here.
            values |= {name: _detached(value) for name, value in bench.run(arguments).items()}
        if progress:
            progress(len(keys), len(keys), "")
    return tuple(found[key] for key in keys)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def stage_key(graph: OpGraph, plan: Plan, stage: int, microbatch_size: int) -> str:
    """A digest that is equal for stages that run equal ops in the same order."""
    mine = set(plan.stages[stage].ops)
    calls = costed_ops(graph, microbatch_size)
    keys = [structural_key(call) for call in calls if call.op.name in mine]
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:20]


def _environment(
    graph: OpGraph, plan: Plan, stage: int, device: torch.device, microbatch_size: int
) -> cache.Environment | None:
    """What the cache has to know of a stage's times; None for a stage that it does not keep."""
    mine = set(plan.stages[stage].ops)
    lasting = all(cache.lasting(op) for op in graph.ops if op.name in mine)
    return cache.Environment.here(str(device), microbatch_size) if lasting else None


def _cached(environment: cache.Environment | None, key: str) -> StageTimes | None:
    known = environment and cache.load(environment, (f"stage {key}",))
    if not known or not known.profile.entries:
        return None
    (entry,) = known.profile.entries
    return StageTimes(entry.forward_seconds, entry.backward_seconds, 0, cached=True)


def _save(environment: cache.Environment, key: str, times: StageTimes) -> None:
    entry = Entry(f"stage {key}", "stage", times.forward_seconds, times.backward_seconds)
    cache.save(environment, (entry.key,), (entry,))


@dataclass
class _Bench:
    """One stage on the model's tensors, ready to run again and again."""

    cls: type[nn.Module]
    interface: StageInterface
    tensor: Callable[[str], torch.Tensor]
    model: nn.Module
    gradient: set[str]  # values whose gradient goes back over an edge
    leaves: Mapping[str, Any]
    device: torch.device
    region: Callable[[], AbstractContextManager[Any]]  # of autocast
    scope: DrawScope | None = None
    module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.module = build(self.cls, self.interface, self.tensor, self.model).train()
        set_draw(self.cls, lambda where, index: reseed(0))
        for path in self.signature.draws:
            hooked = self.module.get_submodule(path)
            hooked.register_forward_pre_hook(lambda module, args: reseed(0))
        opaque.announce(self.module, self.interface, self._scope)

    @property
    def signature(self) -> Signature:
        return self.interface.train

    def _scope(self) -> DrawScope:
        assert self.scope is not None
        return self.scope

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What comes in, by port; values of earlier stages, or leaves of the call."""
        return {
            port.value: values[port.value] if port.path is None else self.leaves[port.path]
            for port in self.signature.inputs
        }

    def run(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One forward without its loss: its outputs by value name."""
        if self.interface.kept_whole:
            self.scope = DrawScope(self.module, 0, 0, 0)
        given = []
        for port in self.signature.inputs:
            value = arguments[port.value]
            given.append(value.clone() if port.mutated else value)
        with self.region():
            results = self.module(*given)
        return {p.value: one for p, one in zip(self.signature.outputs, results, strict=True)}

    def measure(self, arguments: Mapping[str, Any], seconds: float) -> StageTimes:
        """Forward and backward again and again for about `seconds`."""
        forward: list[float] = []
        backward: list[float] = []
        spent = 0.0
        while len(forward) < WARMUPS + MIN_RUNS or (
            spent < seconds and len(forward) < WARMUPS + MAX_RUNS
        ):
            took, roots = timed(partial(self._forward, arguments), self.device)
            # As large as the values themselves: what a later stage sends is neither 0 nor 1.
            tensors = [root for root, _ in roots]
            gradients = [None if last else root.detach() for root, last in roots]
            forward.append(took)
            backward.append(timed(partial(self._backward, tensors, gradients), self.device)[0])
            spent += forward[-1] + backward[-1]
            del roots, tensors, gradients
        kept = slice(WARMUPS, None)
        return StageTimes(median(forward[kept]), median(backward[kept]), len(forward[kept]))

    def _forward(self, arguments: Mapping[str, Any]) -> list[tuple[torch.Tensor, bool]]:
        """What backward starts from, each with whether it is the loss."""
        entered = {
            name: _entering(value) if name in self.gradient else value
            for name, value in arguments.items()
        }
        outputs = self.run(entered)
        roots = [
            (value, False)
            for name, value in outputs.items()
            if name in self.gradient and name not in arguments and value.requires_grad
        ]
        signature, loss = self.signature, None
        if signature.loss_inputs:
            ports = signature.loss_inputs
            given = [
                outputs[p.value] if p.value in outputs else self.leaves[p.path or ""] for p in ports
            ]
            with self.region():
                loss = self.module.loss(*given)  # type: ignore[operator]
        elif signature.loss is not None:
            loss = outputs[signature.loss]
        if loss is not None and loss.requires_grad:
            roots.append((loss, True))
        return roots

    def _backward(self, roots: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
        if roots:
            scope = self.scope
            run = scope.backward_of if scope and scope.draws else torch.autograd.backward
            run(roots, gradients)


def _entering(value: torch.Tensor) -> torch.Tensor:
    """A received value under autograd: a view, since a leaf could not be written."""
    leaf = value.detach().requires_grad_()
    return leaf.view_as(leaf)
