"""Measures planned stages: their generated source, forward and backward, each stage alone.

Sums of op times miss what ops do to each other: what stays in the caches, what one call of
autograd costs.  A stage runs here as a rank runs it, on the model's own tensors, or on copies of
them on another device, and on values that the stages before it make of the example.  Afterwards
the model is as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.eager.autocast import autocast_region, regions_of
from pdcompile.eager.randomness import preserved_rng
from pdcompile.eager.stage_compiler import Backend
from pdcompile.hardware import devices
from pdcompile.ir.graph import OpGraph
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.codegen.folder import stage_classes
from pdcompile.passes.costs import costed_ops, structural_key
from pdcompile.passes.costs.machines import INSTRUCTION
from pdcompile.passes.costs.rehearsal.live_storages import saved_storages
from pdcompile.passes.costs.rehearsal.rehearse import storages_in
from pdcompile.passes.costs.timing import MIN_RUNS, took
from pdcompile.passes.profile import cache
from pdcompile.passes.profile.entries import Entry
from pdcompile.passes.stages.boundaries import making_of_nothing, stage_of_ops
from pdcompile.passes.stages.chain import LocalStage, build, tensors_by_name
from pdcompile.passes.trace.python_state import preserved_state
from pdcompile.plan import Plan
from pdcompile.releases.torch_internals import pytree

BUDGET_SECONDS = 1.0
LEAST_RUNS = 1 + MIN_RUNS  # of each stage, the first of which warms up

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one microbatch on one stage, medians of several runs; none ran when `cached`.

    `saved_bytes`: of a compiled stage, what is alive when the forward has returned, results among
    it, without parameters, what was received and the caller's inputs.  `host_seconds`: of the
    instructions that run it, beside both.
    """

    forward_seconds: float
    backward_seconds: float
    cached: bool = False
    saved_bytes: int = 0
    host_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward, and what the host does for them."""
        return self.forward_seconds + self.backward_seconds + self.host_seconds


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
    backend: Backend | None = None,
    call_seconds: float = 0.0,
) -> tuple[StageTimes, ...]:
    """Times every stage of a plan; stages that do the same are measured once.

    What the cache knows is not measured again (see `cache`).

    Args:
        graph: the captured training graph.
        sources: what was generated from the plan.
        leaves: the call's leaves by path (`FlatCall.leaves`), of one microbatch.
        budget_seconds: for all stages together; each runs at least three times.
        backend: of torch.compile, by which they run.
        call_seconds: of the smallest call, where Python counts.
    """
    stage_of = stage_of_ops(graph, plan)
    ops: list[list[str]] = [[f"compiled by {backend}"] if backend else [] for _ in plan.stages]
    for call in costed_ops(graph, microbatch_size):
        ops[stage_of[call.op.name]].append(structural_key(call))
    keys = [hashlib.sha256("\n".join(each).encode()).hexdigest()[:20] for each in ops]
    share = budget_seconds / len(set(keys))
    found: dict[str, StageTimes] = {}
    tensors = tensors_by_name(model, sources)
    device = _device(plan, tensors)
    leaves = pytree.tree_map(lambda leaf: _on(device, leaf), dict(leaves))
    environment = cache.Environment.here(device, microbatch_size)
    making = making_of_nothing(graph, stage_of)
    regions = regions_of(plan.training.autocast, device)
    with preserved_rng(device), preserved_state(model, training=True), regions:
        model.zero_grad(set_to_none=True)
        values: dict[str, torch.Tensor] = {}
        for k, cls in enumerate(stage_classes(sources)):
            if progress:
                progress(k, len(keys), f"stage {k}")
            interface, key = sources.interfaces[k], keys[k]
            held = (*interface.parameters, *interface.buffers, *interface.constants)
            own = {name: _on(device, tensors[name]) for name in held}
            stage = LocalStage(
                build(cls, interface, own, model).train(), interface, len(keys), plan.edges,
                backend=backend,
            )  # fmt: skip

            there = devices.making(device) if k in making else nullcontext()

            def forward(stage: LocalStage = stage, there: Any = there) -> None:
                with there, autocast_region(plan.training.autocast):
                    stage.forward(values, leaves)

            if key not in found:
                lasting = not callable(backend) and all(
                    cache.lasting(op) for op in graph.ops if op.name in plan.stages[k].ops
                )
                measure = partial(_measure, stage, forward, share, device)
                if backend is not None:
                    given = [*own.values(), *values.values(), *pytree.tree_leaves(leaves)]
                    measure = partial(_measure_compiled, measure, stage, forward, given)
                found[key] = _cached(environment, key, measure) if lasting else measure()
                model.zero_grad(set_to_none=True)
            forward()
            values.update({name: value.detach() for name, value in stage.left.items()})
        if progress:
            progress(len(keys), len(keys), "")
    far = plan.edges if call_seconds and not plan.machines.in_process else ()
    ends = [s for edge in far for to in edge.targets for s in (edge.source, to)]
    once = 2 * INSTRUCTION * call_seconds  # forward and backward; twice at each end of a message
    host = [once * (1 + 2 * ends.count(s)) for s in range(len(keys))]
    return tuple(replace(found[key], host_seconds=one) for key, one in zip(keys, host, strict=True))


def _device(plan: Plan, tensors: Mapping[str, Tensor]) -> torch.device:
    """The device of the stages: the GPU of a plan for GPUs, else wherever the model is."""
    here = devices.of_kind(plan.machines.devices[0].kind) if plan.cluster else devices.HOST
    if not devices.is_host(here):
        return here
    return next((one.device for one in tensors.values()), here)


def _on(device: torch.device, one: Any) -> Any:
    """A tensor on the device, itself where it is there; anything else as it is."""
    if not isinstance(one, Tensor) or one.device == device:
        return one
    copy = one.detach().to(device)
    if isinstance(one, nn.Parameter):
        return nn.Parameter(copy, requires_grad=one.requires_grad)
    return copy.requires_grad_(one.requires_grad)


def _measure(
    stage: LocalStage, forward: Callable[[], None], seconds: float, device: torch.device
) -> StageTimes:
    """Runs forward and backward again and again for about `seconds`.

    The host and a GPU work side by side: what counts is which of the two takes longer for both.
    """

    def backward() -> Callable[[], object]:
        forward()
        # As large as the values themselves: what a later stage sends is neither 0 nor 1.
        gradients = {
            edge: stage.left[port.value].detach()
            for port, edge in stage.wiring.outputs
            if edge in stage.wiring.differentiable
        }
        return partial(stage.backward, gradients)

    forth = took(lambda: forward, device, seconds / 2, most_queued=1)
    back = took(backward, device, seconds / 2, most_queued=1)
    sides = (forth.seconds, back.seconds), (forth.dispatch_seconds, back.dispatch_seconds)
    return StageTimes(*max(sides, key=sum))


def _measure_compiled(
    measure: Callable[[], StageTimes], stage: LocalStage, forward: Callable[[], None],
    given: Sequence[Any],
) -> StageTimes:  # fmt: skip
    """Adds to the times the bytes that autograd keeps of a forward, beside what is given."""
    times = measure()
    with saved_storages() as found:
        forward()
    found.update((one._cdata, one) for one in storages_in([*stage.left.values()]))
    before = {one._cdata for one in storages_in(given)}
    saved = sum(one.nbytes() for key, one in found.items() if key not in before)
    return replace(times, saved_bytes=saved)


def _cached(
    environment: cache.Environment, key: str, measure: Callable[[], StageTimes]
) -> StageTimes:
    """Times of a stage that the cache knows, else measured now and kept there."""
    name = f"stage {key}"
    known = cache.load(environment, (name,))
    if known and known.entries:
        (entry,) = known.entries
        return StageTimes(entry.forward_seconds, entry.backward_seconds, True, entry.saved_bytes)
    times = measure()
    seconds = times.forward_seconds, times.backward_seconds
    entry = Entry(name, "stage", *seconds, saved_bytes=times.saved_bytes)
    cache.save(environment, (name,), (entry,))
    return times
