"""Measures one op: forward and backward seconds on synthetic operands.

Everything runs on copies: the model's parameters, buffers, hooks and random state stay as they
are.  Seconds are those of events on a GPU, CPU time of one thread, else wall time: with one
thread an op's CPU time is what it would take on an idle machine, whatever else runs here; with
several threads only the wall tells.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.eager.autocast import autocast_region, regions_of
from pdcompile.hardware import devices
from pdcompile.ir.execution import Lookup, bound
from pdcompile.ir.opaque import tensors_among
from pdcompile.parts.conversions import Alone, using
from pdcompile.passes.costs import CostedOp, GraphIndex, Operand
from pdcompile.passes.costs.costed_op import laid_out
from pdcompile.passes.costs.timing import Took, timed, took
from pdcompile.passes.form.index_ranges import index_range
from pdcompile.passes.profile.entries import Entry

START_SECONDS = 0.05  # on a GPU, to find out what it takes to start autograd


@dataclass
class Bench:
    """One op, ready to run again and again; `prepare` makes a call of it with fresh arguments."""

    prepare: Callable[[], Callable[[], Any]]
    leaves: list[Tensor]  # what gradients are asked for, activations first
    weights: list[Tensor]  # the last of them, whose gradients accumulate
    device: torch.device


def measure(
    call: CostedOp,
    key: str,
    model: nn.Module | None,
    b: int,
    seconds: float,
    device: torch.device = devices.HOST,
) -> Entry:
    """Times one op on a device for about `seconds` in all."""
    bench, op = _bench(call, model, b, device), call.op
    with (
        regions_of(op.autocast, device),
        torch.set_grad_enabled(op.grad_enabled),
        autocast_region(op.autocast),
        devices.making(device),
        using(Alone(call.index.graph.parts)),
    ):
        forward = took(bench.prepare, device, seconds / 2)
        backward = _backward(bench, seconds / 2) if call.differentiated else Took(0.0)
    return Entry(
        key, op.target, forward.seconds, backward.seconds,
        forward.dispatch_seconds, backward.dispatch_seconds,
    )  # fmt: skip


def _bench(call: CostedOp, model: nn.Module | None, b: int, device: torch.device) -> Bench:
    op, index = call.op, call.index
    synthesis = Synthesis(call, device, torch.Generator(device).manual_seed(0))
    made: dict[str, Any] = {name: synthesis.value(name) for name in op.inputs}
    attributes = {fqn: synthesis.tensor(index.attribute(fqn)) for fqn in op.attributes}
    module = None
    if op.kind in ("module", "opaque"):
        module = _copy_of(op.module_path, model, index, device)
    only: Any = SimpleNamespace(get_submodule=lambda _: module)
    lookup = Lookup(only, b, device, attributes)

    def prepare() -> Callable[[], Any]:
        # A leaf that requires grad cannot be written: in-place ops get a copy of it each time.
        return bound(op, {n: v.clone() if n in op.mutates else v for n, v in made.items()}, lookup)

    own = [*(module.parameters() if module is not None else ()), *attributes.values()]
    weights = [tensor for tensor in own if tensor.requires_grad]
    values = [t for name in op.inputs for t in tensors_among(made[name])]
    return Bench(prepare, [t for t in (*values, *weights) if t.requires_grad], weights, device)


def _copy_of(
    path: str, model: nn.Module | None, index: GraphIndex, device: torch.device
) -> nn.Module:
    """A copy of one module on a device, without its hooks, even if the model has no memory; its
    tensors have the shapes of the graph, in which a part may have slices of them."""
    if model is None:
        raise LookupError(f"no model to take module {path!r} from")
    original = model.get_submodule(path)
    module = copy.deepcopy(original)
    for submodule in module.modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            getattr(submodule, hooks).clear()
    if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        module = module.to_empty(device=device)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.fill_(0.5 if tensor.is_floating_point() else 0)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if (info := index.tensors.get(f"{path}.{name}")) and info.shape != tuple(tensor.shape):
            tensor.data = tensor.data[tuple(map(slice, info.shape))].clone()
    return module.to(device).train(index.graph.training)


def _backward(bench: Bench, budget_seconds: float) -> Took:
    """Seconds of one forward's backward, without the price of starting autograd.

    `autograd.grad` hands gradients of activations on as a stage's backward does, where
    `backward` would copy them into `.grad`; weights do accumulate, so that is added here.
    """
    results = [t for t in tensors_among(bench.prepare()()) if t.requires_grad]
    if not results or not bench.leaves:
        return Took(0.0)
    gradients = [torch.ones_like(result) for result in results]
    sums = [torch.zeros_like(weight) for weight in bench.weights]

    def run() -> None:
        found = torch.autograd.grad(
            results, bench.leaves, gradients, retain_graph=True, allow_unused=True
        )
        for total, gradient in zip(reversed(sums), reversed(found), strict=False):
            if gradient is not None:
                total.add_(gradient)

    whole, start = took(lambda: run, bench.device, budget_seconds), starting(bench.device)
    return Took(
        max(whole.seconds - start.seconds, 0.0),
        max(whole.dispatch_seconds - start.dispatch_seconds, 0.0),
    )


@cache
def starting(device: torch.device) -> Took:
    """One call of autograd before it reaches the first op: paid once a stage.  On a GPU that is
    time of the host, which hands the call to the thread of that device."""
    leaf = torch.ones(1, requires_grad=True, device=device)
    with torch.enable_grad():
        result, gradient = leaf.view(1), torch.ones(1, device=device)
        run = partial(torch.autograd.grad, [result], [leaf], [gradient], retain_graph=True)
        if not devices.is_host(device):
            return took(lambda: run, device, START_SECONDS)
        return Took(median([timed(run, device) for _ in range(50)]))


@dataclass
class Synthesis:
    """Makes the operands of one op.  Draws from its own generator, never from the default one."""

    call: CostedOp
    device: torch.device
    generator: torch.Generator

    def value(self, name: str) -> Any:
        """A synthetic value: a tensor, or the items of a container in order."""
        value = self.call.index.graph.values[name]
        if not value.is_tensor:
            return tuple(self.tensor(leaf) for leaf in self.call.index.leaves(name))
        return self.tensor(self.call.index.value(value))

    def tensor(self, operand: Operand) -> torch.Tensor:
        """Floating-point values lie in (0.1, 1), where every function is defined and normal."""
        dtype = getattr(torch, operand.dtype)
        made = laid_out(
            operand.shape, operand.stride_order, lambda s: self._filled(operand, s, dtype)
        )
        if operand.requires_grad and (dtype.is_floating_point or dtype.is_complex):
            made.requires_grad_()
        return made

    def _filled(self, operand: Operand, shape: list[int], dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            real = torch.empty(shape, dtype=torch.float32, device=self.device)
            return real.uniform_(0.1, 1.0, generator=self.generator).to(dtype)
        if dtype == torch.bool:
            return torch.ones(shape, dtype=dtype, device=self.device)
        if self.call.name == "groupedmm" and operand == self.call.tensor(2, "offs"):
            # It says where each group of rows ends: zeros would leave nothing to do.
            rows, count = int(self.call.first.shape[0]), int(operand.shape[0])
            ends = [rows * (i + 1) // count for i in range(count)]
            return torch.tensor(ends, dtype=dtype, device=self.device)
        index = self.call.index
        rows = index_range(index.graph, self.call.op, operand.name, index.b) or 1
        high = min(rows, torch.iinfo(dtype).max)
        made = torch.randint(high, shape, generator=self.generator, device=self.device)
        return made.to(dtype)
