"""Layers that wait as long as they would compute: parameters, messages and gradients are real.

A waiting layer makes something simple of the shape that the real one makes, and real gradients of
that, of its input and of all its parameters.  Its forward takes as long as the real one, and so do
the two parts of its backward, each a node of autograd's graph of its own, so that whoever splits
a backward can.  What they compute themselves is part of that time, however long it takes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs.timing import typical
from pdcompile.passes.profile import Entry, Profile, distinct_calls

TIMING_SECONDS = 0.5  # for each distinct layer
CACHE_BYTES = 64 << 20  # more than is near a core
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, slots=True)
class Times:
    """What a layer takes for one microbatch."""

    forward_seconds: float
    input_seconds: float  # of its backward: the gradient of what comes in
    weight_seconds: float  # and the gradients of its parameters
    adding_seconds: float = 0.0  # of that: adding them to those that are there, which is not waited
    real: bool = False  # it computes: nothing waits

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.input_seconds + self.weight_seconds


def sleep_precisely() -> None:
    """Have this process wake from its sleeps at once: Linux adds 50 microseconds otherwise."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """What is done inside takes so long, at least."""
    end = time.perf_counter() + seconds
    yield
    time.sleep(max(0.0, end - time.perf_counter()))


class Through(torch.autograd.Function):
    """The mean of what comes in, plus a number, in another shape; all gradients but weights'."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plus: Tensor | None, shape: tuple[int, ...], forward: float,
        backward: float,
    ) -> Tensor:  # fmt: skip
        with lasting(forward):
            ctx.seconds, ctx.shape = backward, x.shape
            mean = x.float().mean()
            return (mean if plus is None else mean + plus).expand(x.shape[0], *shape).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        with lasting(ctx.seconds if wanted[0] else 0.0):
            total = gradients[0].sum()
            each = (total / ctx.shape.numel()).expand(ctx.shape).contiguous()
            return each if wanted[0] else None, total if wanted[1] else None, None, None, None


class Weights(torch.autograd.Function):
    """A number that stands for the parameters; a gradient for each of them."""

    @staticmethod
    def forward(ctx: Any, seconds: float, *parameters: Tensor) -> Tensor:
        ctx.seconds, ctx.shapes = seconds, [one.shape for one in parameters]
        return parameters[0].flatten()[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with lasting(ctx.seconds):
            return None, *(gradients[0].expand(shape).contiguous() for shape in ctx.shapes)


class Waiting(nn.Module):
    """A layer with the parameters of a real one, (b, …) -> (b, *shape)."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], times: Times) -> None:
        super().__init__()
        self.names = ["of_" + name.replace(".", "_") for name, _ in layer.named_parameters()]
        for name, parameter in zip(self.names, layer.parameters(), strict=True):
            self.register_parameter(name, parameter)
        self.shape = shape
        self.forward_wait, self.input_wait = times.forward_seconds, times.input_seconds
        self.weight_wait = max(0.0, times.weight_seconds - times.adding_seconds)

    def forward(self, x: Tensor) -> Tensor:
        held = [getattr(self, name) for name in self.names]
        plus = Weights.apply(self.weight_wait, *held) if held else None
        y: Tensor = Through.apply(x, plus, self.shape, self.forward_wait, self.input_wait)
        return y


def waiting(chain: nn.Module, inputs: Tensor, times: Sequence[Times]) -> nn.Sequential:
    """The chain with waiting layers, but for `real` ones; `inputs` say what shapes pass."""
    layers, x = [], inputs[:1]
    for layer, one in zip(chain, times, strict=True):  # type: ignore[call-overload]
        with torch.no_grad():
            x = layer(x)
        layers.append(layer if one.real else Waiting(layer, tuple(x.shape[1:]), one))
    return nn.Sequential(*layers)


def timed_layers(chain: nn.Module, inputs: Tensor) -> list[Times]:
    """Every layer of a chain for one microbatch; equal layers are timed once.

    CPU seconds of this thread: other programs on the machine disturb them little.
    """
    found: list[Times] = []
    known: dict[str, Times] = {}
    x = inputs
    for layer in chain:  # type: ignore[attr-defined]
        key = f"{layer} {tuple(x.shape)} {x.is_floating_point() and bool(found)}"
        given = x.detach().requires_grad_(x.is_floating_point() and bool(found))
        with torch.no_grad():
            x = layer(x)
        if key not in known:
            forward, backward = _timed(layer, given)
            weights = any(True for _ in layer.parameters())
            share = (given.requires_grad or not weights) / (1 + (weights and given.requires_grad))
            known[key] = Times(forward, backward * share, backward * (1 - share), _adding(layer))
        found.append(known[key])
    return found


def _timed(layer: nn.Module, x: Tensor) -> tuple[float, float]:
    """Seconds of a layer's forward, and of its backward into gradients that are there already."""
    forwards: list[float] = []

    def once() -> float:
        began = time.thread_time()
        y = layer(x)
        forwards.append(time.thread_time() - began)
        if not y.requires_grad:
            return 0.0
        gradient = torch.ones_like(y)
        began = time.thread_time()
        y.backward(gradient)
        return time.thread_time() - began

    backward = typical(once, TIMING_SECONDS)
    layer.zero_grad()
    return median(forwards), backward


def _adding(layer: nn.Module) -> float:
    """Seconds of adding a gradient to every parameter's, none of which is in a cache."""
    gradients = [torch.zeros_like(one) for one in layer.parameters()]
    others = [torch.zeros_like(one) for one in gradients]
    elsewhere = torch.zeros(CACHE_BYTES, dtype=torch.uint8)

    def once() -> float:
        elsewhere.add_(1)
        began = time.thread_time()
        for one, other in zip(gradients, others, strict=True):
            one.add_(other)
        return time.thread_time() - began

    return typical(once, TIMING_SECONDS / 5) if gradients else 0.0


def profile_of(graph: OpGraph, microbatch_size: int, times: Sequence[Times]) -> Profile:
    """The costs of a chain of waiting layers: what its layers are to take in all.

    Of a real layer the op that has its weights takes all.
    """
    entries = []
    for key, call in distinct_calls(graph, microbatch_size).items():
        place = call.op.module_path.split(".")[0]
        if not place.isdecimal():
            continue
        layer, target = times[int(place)], call.op.target
        if layer.real and call.op.parameters:
            backward = layer.input_seconds + layer.weight_seconds
            entries.append(Entry(key, target, layer.forward_seconds, backward))
        elif target.endswith("Weights.apply"):
            entries.append(Entry(key, target, 0.0, layer.weight_seconds))
        elif target.endswith("Through.apply"):
            backward = layer.input_seconds if call.requires_grad else 0.0
            entries.append(Entry(key, target, layer.forward_seconds, backward))
    return Profile(torch.__version__, "cpu", microbatch_size, tuple(entries))
