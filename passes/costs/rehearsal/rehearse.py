"""Rehearses forward and backward of a stage on tensors without memory, storage by storage.

Rules for single ops cannot know in which order autograd frees and sums, nor what kernels are made
of.  So the ops of a stage run once on fake tensors, with torch's own autograd, as the runtime
runs them, and what is alive is counted.  Ops that do not run on these, and opaque modules, are
imitated by functions of a measured or estimated size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.eager.autocast import on_gpu, regions_of
from pdcompile.eager.randomness import preserved_rng
from pdcompile.ir.execution import CPU, materialise, run_op
from pdcompile.ir.graph import Op, size_at
from pdcompile.ir.opaque import tensors_among
from pdcompile.ir.stage_interface import Port
from pdcompile.ir.stage_run import Flight, Microbatch, StageRun
from pdcompile.ir.stage_streams import Streams
from pdcompile.ir.stage_wiring import Wiring
from pdcompile.parts.conversions import Alone, using
from pdcompile.passes.costs import cpu_kernels, tried_kernels
from pdcompile.passes.costs.costed_op import CostedOp, GraphIndex, Operand
from pdcompile.passes.costs.rehearsal.imitated_ops import (
    Footprint,
    empty,
    fused_attention,
    guessed,
    imitate,
)
from pdcompile.passes.costs.rehearsal.live_storages import LiveStorages
from pdcompile.passes.costs.stage_ports import Ports, Resident
from pdcompile.passes.costs.workspaces import HOST, Kernels
from pdcompile.passes.form.lifetimes import Step
from pdcompile.releases.known_results import known_result
from pdcompile.releases.torch_internals import FakeTensorMode, quiet_shape_errors

# Sums and means over a tensor of differences: the scalar keeps the storage of all of them.
_UNREDUCED = frozenset(("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"))


@dataclass
class Fakes:
    """The tensors of the model, as fakes, and leaf modules that hold them: a `Lookup`."""

    index: GraphIndex
    device: torch.device = CPU
    tensors: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def b(self) -> int:
        return self.index.b

    def tensor(self, fqn: str) -> Tensor:
        info = self.index.tensors[fqn]
        if info.fqn not in self.tensors:
            made = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
            if info.kind == "parameter":
                made = nn.Parameter(made, requires_grad=info.requires_grad)
            self.tensors[info.fqn] = made
        return self.tensors[info.fqn]

    def module(self, path: str) -> nn.Module:
        return self.modules[path]

    def build(self, op: Op) -> nn.Module:
        """The op's leaf module without tensors; to be called outside of the fake mode."""
        cls = getattr(nn, op.target.rpartition(".")[2])
        lookup: Any = self
        given = {name: materialise(value, {}, lookup) for name, value in op.constructor}
        given.pop("device", None)
        with torch.device("meta"):
            module: nn.Module = cls(**given)
        return module.train(self.index.graph.training)

    def fill(self) -> None:
        """Puts the tensors into the modules."""
        for at, module in self.modules.items():
            for path, part in module.named_modules():
                prefix = f"{at}.{path}." if path else f"{at}."
                for table in (part._parameters, part._buffers):
                    for name, tensor in list(table.items()):
                        if tensor is not None:
                            setattr(part, name, self.tensor(prefix + name))


def rehearse(
    index: GraphIndex,
    steps: Sequence[Step],
    ports: Ports,
    *,
    splits: bool = False,
    kernels: Kernels = HOST,
) -> Resident:
    """Runs the steps of a stage, forward and backward, at the index's microbatch size.

    `kernels`: those of the device.

    Nothing is computed and no random number drawn.  Raises whatever an op raises that neither
    runs on fake tensors nor can be imitated.
    """
    with quiet_shape_errors(), preserved_rng(), staged(index, steps, kernels) as stage:
        return stage.run(ports, splits=splits)


@contextmanager
def staged(index: GraphIndex, steps: Sequence[Step], kernels: Kernels = HOST) -> Iterator[Stage]:
    """The stage on fake tensors, in the fake mode in which it runs."""
    ops = [step.op for step in steps]
    fakes = Fakes(index)
    footprints: dict[str, Footprint] = {}
    for op in ops:
        call = CostedOp(op, index)
        if op.kind == "opaque" or op.target.endswith(".apply"):
            # Code of the user's, which may do more than compute, does not run here.
            footprints[op.name] = guessed(call)
        elif op.kind == "module":
            try:
                if op.module_path not in fakes.modules:
                    fakes.modules[op.module_path] = fakes.build(op)
            except Exception:  # of a user's constructor
                footprints[op.name] = guessed(call)
        elif kernels != HOST and (attention := fused_attention(call)) is not None:
            footprints[op.name] = attention
    beside = using(Alone(index.graph.parts))
    # Fake tensors are the CPU's: autograd's engine takes none of a GPU where there is none.
    region = next((one.autocast for one in ops if on_gpu(one.autocast)), None)
    with FakeTensorMode(), torch.enable_grad(), regions_of(region, CPU), beside:
        for op in ops:
            for fqn in op.used_tensors:
                fakes.tensor(fqn)
        fakes.fill()
        inside = partial(tried_kernels.inside, kernels.gpu) if kernels.gpu else lambda *_: 0
        if kernels.copies:
            inside = cpu_kernels.inside
        meter = _Meter([*fakes.tensors.values()], inside)
        yield Stage(index, steps, fakes, meter, footprints)


class _Meter(LiveStorages):  # type: ignore[no-untyped-call]
    """Measures also the peak that there is when gradients of parameters are new."""

    def __init__(self, given: Sequence[Tensor], inside: Callable[..., int]) -> None:
        super().__init__(given, inside)
        self.gradient_bytes = 0
        self.first_peak_bytes = 0
        self.out_peaks = [0, 0]  # the later and the first, if results are held by autograd alone
        self._counted: set[int] = set()
        self._results: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return known_result(func, args, kwargs)

    def size_of(self, storage: torch.UntypedStorage, func: Any, args: tuple[Any, ...]) -> int:
        size = super().size_of(storage, func, args)
        if func._opname in _UNREDUCED and size == args[0].element_size():
            return size * int(args[0].numel())
        return size

    @property
    def dead_bytes(self) -> int:
        """Bytes of the results that have died since they were let go."""
        return sum(size for one, size in self._results if one() is None)

    def sample(self) -> None:
        held = self.now_bytes + self.dead_bytes
        self.peak_bytes = max(self.peak_bytes, held)
        self.first_peak_bytes = max(self.first_peak_bytes, held + self.gradient_bytes)
        first = self.now_bytes + self.gradient_bytes
        self.out_peaks = [*map(max, self.out_peaks, (self.now_bytes, first))]

    def let_go(self, results: dict[str, Any]) -> int:
        """The caller drops the results: what of them dies, here or later, counts for the peaks of
        one who holds them until the end.  Returns the bytes that have died at once."""
        before, storages = self.now_bytes, storages_in([*results.values()])
        sizes = {one._cdata: one for one in storages if one._cdata in self._alive}
        self._results = [(weakref.ref(one), one.nbytes()) for one in sizes.values()]
        results.clear()
        storages.clear()
        sizes.clear()
        loose = before - self.now_bytes
        self.out_peaks = [self.now_bytes] * 2
        return loose

    def accumulated(self, parameter: Tensor) -> None:
        """Notes that autograd has added to the gradient of a parameter."""
        if id(parameter) not in self._counted:
            self._counted.add(id(parameter))
            self.gradient_bytes += parameter.numel() * parameter.element_size()


class _Interpreted(nn.Module):
    """Forward and loss of a stage, op by op."""

    def __init__(self, stage: Stage, wiring: Wiring) -> None:
        super().__init__()
        self._stage, self._wiring = stage, wiring

    def forward(self, *given: Tensor) -> tuple[Any, ...]:
        """Runs the ops of the model."""
        env = self._run("forward", [port for port, _ in self._wiring.inputs], given)
        return tuple(env[port.value] for port, _ in self._wiring.outputs)

    def loss(self, *given: Tensor) -> Any:
        """Runs the ops of the loss."""
        signature = self._wiring.signature
        return self._run("loss", signature.loss_inputs, given)[signature.loss or ""]

    def _run(self, region: str, ports: Sequence[Port], given: Sequence[Any]) -> dict[str, Any]:
        """Values die where those of generated source do."""
        env = {port.value: one for port, one in zip(ports, given, strict=True)}
        for step in self._stage.steps:
            if step.op.region == region:
                env[step.op.name] = self._stage.checked(step.op, self._stage.result(step.op, env))
                for name in step.ends:
                    env.pop(name, None)
        return env


@dataclass
class Stage:
    """Ops of a stage that can run on fake tensors, and the meter of what they hold."""

    index: GraphIndex
    steps: Sequence[Step]
    fakes: Fakes
    meter: _Meter
    footprints: Mapping[str, Footprint]

    def run(self, ports: Ports, *, splits: bool = False) -> Resident:
        """Runs forward and backward as a rank does (`StageRun`)."""
        wiring, meter, run = ports.wiring, self.meter, StageRun(0, Streams(0))
        weights = [one for one in self.fakes.tensors.values() if one.requires_grad]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
            meter.give([weight.grad])
        given = [from_outside(self.index, port.value) for port, _ in wiring.inputs]
        leaves = {one.path: from_outside(self.index, one.name) for one in self.index.graph.inputs}
        meter.give([*given, *leaves.values()])
        call = Microbatch(0, 0, leaves.__getitem__)
        with meter:
            flight, results = run.forward(_Interpreted(self, wiring), wiring, given, call)
        for port, edge in wiring.outputs if not ports.keeps_outputs else ():
            if edge is None:
                del results[port.value]
        resident = meter.now_bytes
        forward = meter.peak_bytes - resident
        came = {edge: torch.empty_like(one) for edge, one in _sent_on(flight, wiring, results)}
        meter.give(came.values())
        backward = partial(run.backward, flight, wiring, came.get)
        if splits and not any(step.op.kind == "opaque" for step in self.steps):
            with meter:
                backward(first=[self.fakes.tensor(fqn) for fqn in ports.copies])
            found = self._second_part(run, flight, results, came, resident)
            return replace(found, forward_workspace_bytes=forward)
        loose = meter.let_go(results)
        for weight in weights:
            hook: Any = weight.register_post_accumulate_grad_hook
            hook(meter.accumulated)
        with meter:
            backward()
        peaks = meter.peak_bytes, meter.first_peak_bytes
        freed = min(max(0, a - b) for a, b in zip(peaks, meter.out_peaks, strict=True))
        return Resident(
            resident, max(0, peaks[0] - resident), peaks[1], True, loose_bytes=loose,
            freed_bytes=freed, forward_workspace_bytes=forward,
        )  # fmt: skip

    def _second_part(
        self, run: StageRun, flight: Flight, results: dict[str, Tensor],
        came: Mapping[int, Tensor], resident: int,
    ) -> Resident:  # fmt: skip
        """Returns what is alive after a backward's first part, and how far both exceed what was."""
        meter, ahead = self.meter, self.meter.peak_bytes - resident
        for one in flight.entered.values():
            one.take()  # and send it
        rest = Flight(rest=flight.rest)
        flight.entered.clear()
        flight.left.clear()
        flight.loss = None
        freed, dead = meter.let_go(results), meter.dead_bytes
        kept = {one.untyped_storage()._cdata: one for one in rest.rest.gradients}
        given = {one.untyped_storage()._cdata for one in came.values()}
        received = sum(one.untyped_storage().nbytes() for at, one in kept.items() if at in given)
        kept.clear()
        alive = meter.now_bytes + received  # which is no receive slot any more
        meter.now_bytes = alive
        meter.reset_peak()
        with meter:
            rest.rest.run()
        behind = meter.peak_bytes - alive - dead  # of which those that die later are held for sends
        first = max(0, ahead)
        return Resident(resident, first, None, True, alive, max(0, behind), freed, first)

    def checked(self, op: Op, result: Any) -> Any:
        """Raises ValueError where the op gives something else than the graph says."""
        value = self.index.graph.values[op.name]
        shape = tuple(size_at(size, self.index.b) for size in value.shape)
        if value.is_tensor and tuple(result.shape) != shape:
            raise ValueError(f"{op.name} gives {tuple(result.shape)} instead of {shape}")
        return result

    def result(self, op: Op, env: Mapping[str, Any]) -> Any:
        lookup: Any = self.fakes
        if op.name not in self.footprints:
            try:
                return run_op(op, env, lookup)
            except Exception:
                if op.mutates or op.buffers_written:
                    raise  # what plays an op writes nothing
        return self.imitated(op, env)

    def imitated(self, op: Op, env: Mapping[str, Any]) -> Any:
        call = CostedOp(op, self.index)
        tensors = [self._operand(one, env) for one in call.inputs]
        with torch.set_grad_enabled(op.grad_enabled):
            return imitate(call, self.footprints.get(op.name) or guessed(call), tensors)

    def _operand(self, one: Operand, env: Mapping[str, Any]) -> Tensor:
        if one.of_model:
            return self.fakes.tensor(one.name)
        # A part of a container may be taken out of it later.
        known = env.get(one.name)
        return from_outside(self.index, one.name) if known is None else known


def _sent_on(
    flight: Flight, wiring: Wiring, results: Mapping[str, Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Edges along which a gradient comes, each with the value that it is of."""
    for edge, one in flight.entered.items():
        if edge in wiring.chained:
            yield edge, one.value
    for port, leaving in wiring.outputs:
        if leaving is not None and leaving in flight.left:
            yield leaving, results[port.value]


def storages_in(value: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tensors_among(value) if t.layout == torch.strided]


def from_outside(index: GraphIndex, name: str) -> Tensor:
    """A fake of a value that comes from outside, in its layout."""
    value = index.graph.values[name]
    return empty(index.value(value)).requires_grad_(value.requires_grad and value.producer is None)
