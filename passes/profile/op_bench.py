"""Measures one op: forward and backward seconds on synthetic operands.

Everything runs on copies: the model's parameters, buffers, hooks and random state stay as they
are.  Seconds are those of events on a CUDA device, CPU time of one thread, else wall time: with
one thread an op's CPU time is what it would take on an idle machine, whatever else runs here;
with several threads only the wall tells.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.eager.autocast import autocast_region
from pdcompile.ir.execution import CPU, Lookup, bound
from pdcompile.passes.costs import CostedOp, Operand
from pdcompile.passes.costs.costed_op import laid_out
from pdcompile.passes.costs.live_storages import tensors_in
from pdcompile.passes.costs.timing import timed, typical
from pdcompile.passes.form.index_ranges import index_range
from pdcompile.passes.profile.entries import Entry


@dataclass(frozen=True)
class _Alone(Lookup):
    """Where one op finds its tensors, and its own module."""

    only: nn.Module | None = None

    def tensor(self, fqn: str) -> Tensor:
        return (self.constants or {})[fqn]

    def module(self, path: str) -> nn.Module:
        assert self.only is not None
        return self.only


@dataclass
class Bench:
    """One op, ready to run again and again; `prepare` makes a call of it with fresh arguments."""

    prepare: Callable[[], Callable[[], Any]]
    leaves: list[Tensor]  # what gradients are asked for, activations first
    weights: list[Tensor]  # the last of them, whose gradients accumulate


def measure(call: CostedOp, key: str, model: nn.Module | None, b: int, seconds: float) -> Entry:
    """Times one op for about `seconds` in all."""
    bench = _bench(call, model, b)
    with grad_mode(call):
        forward = typical(lambda: timed(bench.prepare(), CPU), seconds / 2)
        backward = _backward_seconds(bench, seconds / 2) if call.differentiated else 0.0
    return Entry(key, call.op.target, forward, backward)


@contextmanager
def grad_mode(call: CostedOp) -> Iterator[None]:
    """Grad mode and autocast as they were around the op."""
    with torch.set_grad_enabled(call.op.grad_enabled), autocast_region(call.op.autocast):
        yield


def _bench(call: CostedOp, model: nn.Module | None, b: int) -> Bench:
    op, index = call.op, call.index
    synthesis = Synthesis(call, CPU, torch.Generator(CPU).manual_seed(0))
    made: dict[str, Any] = {name: synthesis.value(name) for name in op.inputs}
    attributes: dict[str, Tensor] = {}
    for fqn in op.attributes:
        operand = index.attribute(fqn)
        assert operand is not None, f"{op.name} reads {fqn}, which the graph does not list"
        attributes[fqn] = synthesis.tensor(operand)
    module = None
    if op.kind in ("module", "opaque"):
        module = _copy_of(op.module_path, model, index.graph.training)
    lookup = _Alone(nn.Module(), b, CPU, attributes, module)

    def prepare() -> Callable[[], Any]:
        # A leaf that requires grad cannot be written: in-place ops get a copy of it each time.
        return bound(op, {n: v.clone() if n in op.mutates else v for n, v in made.items()}, lookup)

    own = [*(module.parameters() if module is not None else ()), *attributes.values()]
    weights = [tensor for tensor in own if tensor.requires_grad]
    values = [t for name in op.inputs for t in tensors_in(made[name])]
    return Bench(prepare, [t for t in (*values, *weights) if t.requires_grad], weights)


def _copy_of(path: str, model: nn.Module | None, training: bool) -> nn.Module:
    """A copy of one module without its hooks, with memory even if the model has none (meta)."""
    if model is None:
        raise LookupError(f"no model to take module {path!r} from")
    original = model.get_submodule(path)
    module = copy.deepcopy(original)
    for submodule in module.modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            getattr(submodule, hooks).clear()
    if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        module = module.to_empty(device=CPU)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.fill_(0.5 if tensor.is_floating_point() else 0)
    return module.train(training)


def _backward_seconds(bench: Bench, budget_seconds: float) -> float:
    """Seconds of one forward's backward, without the price of starting autograd.

    `autograd.grad` hands gradients of activations on as a stage's backward does, where
    `backward` would copy them into `.grad`; weights do accumulate, so that is added here.
    """
    results = [t for t in tensors_in(bench.prepare()()) if t.requires_grad]
    if not results or not bench.leaves:
        return 0.0
    gradients = [torch.ones_like(result) for result in results]
    sums = [torch.zeros_like(weight) for weight in bench.weights]

    def run() -> None:
        found = torch.autograd.grad(
            results, bench.leaves, gradients, retain_graph=True, allow_unused=True
        )
        for total, gradient in zip(reversed(sums), reversed(found), strict=False):
            if gradient is not None:
                total.add_(gradient)

    took = typical(lambda: timed(run, CPU), budget_seconds)
    return max(took - start_seconds(), 0.0)


@cache
def start_seconds() -> float:
    """Seconds of one call of autograd before it reaches the first op: paid once a stage."""
    leaf = torch.ones(1, requires_grad=True)
    result, gradient = leaf.view(1), torch.ones(1)
    times = []
    with torch.enable_grad():
        for _ in range(50):
            run = partial(torch.autograd.grad, [result], [leaf], [gradient], retain_graph=True)
            times.append(timed(run, leaf.device))
    return median(times)


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
        if self._is_offsets(operand):
            rows, count = int(self.call.first.shape[0]), int(operand.shape[0])
            ends = [rows * (i + 1) // count for i in range(count)]
            return torch.tensor(ends, dtype=dtype, device=self.device)
        index = self.call.index
        rows = index_range(index.graph, self.call.op, operand.name, index.b) or 1
        high = min(rows, torch.iinfo(dtype).max)
        made = torch.randint(high, shape, generator=self.generator, device=self.device)
        return made.to(dtype)

    def _is_offsets(self, operand: Operand) -> bool:
        """Whether it says where each group of rows ends: zeros would leave nothing to do."""
        offsets = self.call.tensor(2, "offs")
        return self.call.name == "groupedmm" and offsets is not None and operand == offsets
