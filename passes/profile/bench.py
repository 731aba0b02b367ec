"""Measuring one op: forward and backward seconds on synthetic operands.

Everything runs on copies: the model's parameters, buffers, hooks and random state stay as they
are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.eager.autocast import autocast_region
from pdcompile.ir.graph_module import Lookup, materialise
from pdcompile.ir.targets import resolve
from pdcompile.passes.costs import Call
from pdcompile.passes.profile.clock import timed
from pdcompile.passes.profile.store import Entry
from pdcompile.passes.profile.synthetic import Synthesis

MIN_RUNS, MAX_RUNS = 3, 50


@dataclass
class Bench:
    """One op, ready to run again and again.

    `prepare` returns fresh arguments (in-place ops use theirs up), `run` calls the op on them.
    """

    run: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    prepare: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    leaves: list[Tensor]  # what gradients are asked for, activations first
    weights: list[Tensor]  # the last of them, whose gradients accumulate
    inputs: list[Tensor | None]  # in the order of call.inputs, as storages to recognise
    device: torch.device


def measure(
    call: Call, key: str, model: nn.Module | None, b: int, seconds: float, *, keeps: bool
) -> Entry:
    """Time one op for about `seconds` in all; `keeps`: also see what autograd keeps."""
    bench = _bench(call, model, b)
    with grad_mode(call):
        forward = _typical(bench, seconds / 2)
        backward = _backward_seconds(bench, seconds / 2) if call.differentiated else 0.0
        extra, kept = _kept(bench) if keeps and call.requires_grad else (None, ())
    return Entry(key, call.op.target, forward, backward, extra, kept)


@contextmanager
def grad_mode(call: Call) -> Iterator[None]:
    """Grad mode and autocast as they were around the op."""
    with torch.set_grad_enabled(call.op.grad_enabled), autocast_region(call.op.autocast):
        yield


def _bench(call: Call, model: nn.Module | None, b: int) -> Bench:
    op, index = call.op, call.index
    device = torch.device("cpu")
    generator = torch.Generator(device).manual_seed(0)
    synthesis = Synthesis(call, device, generator)
    made: dict[str, Any] = {name: synthesis.value(name) for name in op.inputs}
    attributes: dict[str, Tensor] = {}
    for fqn in op.attributes:
        operand = index.attribute(fqn)
        assert operand is not None, f"{op.name} reads {fqn}, which the graph does not list"
        attributes[fqn] = synthesis.tensor(operand)
    lookup = Lookup(nn.Module(), b, device, attributes)
    mutated = {name for name in op.mutates if name in made}

    def prepare() -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A leaf that requires grad cannot be written: in-place ops get a copy of it each time.
        fresh = {name: (v.clone() if name in mutated else v) for name, v in made.items()}
        args = tuple(materialise(argument, fresh, lookup) for argument in op.args)
        return args, {key: materialise(argument, fresh, lookup) for key, argument in op.kwargs}

    function: Callable[..., Any]
    weights: list[Tensor] = []
    if op.kind in ("module", "opaque"):
        module = _copy_of(op.module_path, model, index.graph.training, device)
        weights = [p for p in module.parameters() if p.requires_grad]
        held = {f"{op.module_path}.{n}": t for n, t in module.named_parameters()}
        function = module
    elif op.kind == "getattr":
        function, held = (lambda tensor: getattr(tensor, op.target)), {}
    elif op.kind == "method":
        function, held = getattr(torch.Tensor, op.target), {}
    else:
        function, held = resolve(op.target), {}
    weights += [tensor for tensor in attributes.values() if tensor.requires_grad]
    values = [t for name in op.inputs for t in _tensors(made[name])]
    return Bench(
        run=lambda args, kwargs: function(*args, **kwargs),
        prepare=prepare,
        leaves=[t for t in (*values, *weights) if t.requires_grad],
        weights=weights,
        inputs=[*values, *attributes.values(), *held.values()],
        device=device,
    )


def _copy_of(path: str, model: nn.Module | None, training: bool, device: torch.device) -> nn.Module:
    """A copy of one module without its hooks, with memory even if the model has none (meta)."""
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
    return module.train(training)


def _typical(bench: Bench, seconds: float, *, warmups: int = 1) -> float:
    """Median of several runs after a warm-up; as many as fit, at least three."""
    times: list[float] = []
    end = perf_counter() + seconds
    for run in range(warmups + MAX_RUNS):
        args, kwargs = bench.prepare()
        took, result = timed(partial(bench.run, args, kwargs), bench.device)
        del result
        if run >= warmups:
            times.append(took)
        elif took > seconds:
            return took  # one run already takes more than the budget
        if len(times) >= MIN_RUNS and perf_counter() > end:
            break
    return median(times)


def _backward_seconds(bench: Bench, seconds: float) -> float:
    """Median of several backwards of one forward, without the price of starting autograd.

    `autograd.grad` hands gradients of activations on as a stage's backward does, where
    `backward` would copy them into `.grad`; weights do accumulate, so that is added here.
    """
    args, kwargs = bench.prepare()
    results = [t for t in _tensors(bench.run(args, kwargs)) if t.requires_grad]
    if not results or not bench.leaves:
        return 0.0
    gradients = [torch.ones_like(result) for result in results]
    sums = [torch.zeros_like(weight) for weight in bench.weights]
    times: list[float] = []
    end = perf_counter() + seconds

    def run() -> None:
        found = torch.autograd.grad(
            results, bench.leaves, gradients, retain_graph=True, allow_unused=True
        )
        for total, gradient in zip(reversed(sums), reversed(found), strict=False):
            if gradient is not None:
                total.add_(gradient)

    while len(times) < MIN_RUNS + 1 or (perf_counter() < end and len(times) < MAX_RUNS):
        times.append(timed(run, bench.device)[0])
        if len(times) == 1 and times[0] > seconds:
            return max(times[0] - start_seconds(), 0.0)
    return max(median(times[1:]) - start_seconds(), 0.0)


@cache
def start_seconds() -> float:
    """What one call of autograd costs before it reaches the first op: paid once a stage."""
    leaf = torch.ones(1, requires_grad=True)
    result, gradient = leaf.view(1), torch.ones(1)
    times = []
    with torch.enable_grad():
        for _ in range(50):
            run = partial(torch.autograd.grad, [result], [leaf], [gradient], retain_graph=True)
            times.append(timed(run, leaf.device)[0])
    return median(times)


def _kept(bench: Bench) -> tuple[int, tuple[int, ...]]:
    """Bytes of storages kept for backward that are no operand, and which operands are kept."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    args, kwargs = bench.prepare()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = bench.run(args, kwargs)
    operands = [None if t is None else t.untyped_storage()._cdata for t in bench.inputs]
    extra = sum(size for storage, size in kept.items() if storage not in operands)
    del result
    return extra, tuple(i for i, storage in enumerate(operands) if storage in kept)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    return []
