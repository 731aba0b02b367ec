"""Layers that wait as long as they would compute: parameters, messages and gradients are real.

A waiting layer makes something simple of the shape that the real one makes, and real gradients of
that, of its input and of all its parameters.  Its forward takes as long as the real one, and so do
the two parts of its backward, each a node of autograd's graph of its own, so that whoever splits
a backward can.  What they compute themselves is part of that time, however long it takes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pdcompile.ir.graph import OpGraph
from pdcompile.passes.costs.timing import typical
from pdcompile.passes.profile import Entry, Profile, distinct_calls

TIMING_SECONDS = 0.5  # for each distinct layer
CACHE_BYTES = 64 << 20  # more than is near a core
_PR_SET_TIMERSLACK = 29
wait = time.sleep


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that a layer takes for one microbatch, forward and in both parts of its backward: the
    gradient of what comes in, and those of the parameters.

    `beside`: of each, what a waiting layer takes outside of its waits.
    """

    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    beside: tuple[float, float, float] = (0.0, 0.0, 0.0)
    real: bool = False  # it computes: nothing waits

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.input_seconds + self.weight_seconds

    @property
    def waits(self) -> tuple[float, float, float]:
        """Seconds of its three waits."""
        whole = self.forward_seconds, self.input_seconds, self.weight_seconds
        forward, inward, weights = (
            max(0.0, a - b) for a, b in zip(whole, self.beside, strict=True)
        )
        return forward, inward, weights


def sleep_precisely() -> None:
    """Have this process wake from its sleeps at once: Linux adds 50 microseconds otherwise."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """Context whose inside takes so long, at least."""
    end = time.perf_counter() + seconds
    yield
    wait(max(0.0, end - time.perf_counter()))


@contextmanager
def no_waits() -> Iterator[None]:
    """Layers take no longer than they have to, all through the `with` block."""
    with patch(f"{__name__}.wait"):
        yield


class Through(torch.autograd.Function):
    """The mean of what comes in, in another shape."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: tuple[int, ...], forward: float, backward: float
    ) -> Tensor:
        with lasting(forward):
            ctx.seconds, ctx.shape = backward, x.shape
            return x.float().mean().expand(x.shape[0], *shape).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        with lasting(ctx.seconds):
            each = gradients[0].sum() / ctx.shape.numel()
            return each.expand(ctx.shape).contiguous(), None, None, None


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
        self.forward_wait, self.input_wait, self.weight_wait = times.waits

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Through.apply(x, self.shape, self.forward_wait, self.input_wait)
        held = [getattr(self, name) for name in self.names]
        return y + Weights.apply(self.weight_wait, *held) if held else y


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
            parts = forward, backward * share, backward * (1 - share)
            known[key] = Times(*parts, _beside(layer, x))
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


def _beside(layer: nn.Module, y: Tensor) -> tuple[float, float, float]:
    """Seconds of adding a number to what a layer makes, of the sum of its gradient, and of adding
    a gradient to every parameter's; none of it is in a cache."""
    gradients = [torch.zeros_like(one) for one in layer.parameters()]
    if not gradients:
        return 0.0, 0.0, 0.0
    others = [torch.zeros_like(one) for one in gradients]
    elsewhere = torch.zeros(CACHE_BYTES, dtype=torch.uint8)

    def cold(run: Callable[[], object]) -> float:
        def once() -> float:
            elsewhere.add_(1)
            began = time.thread_time()
            run()
            return time.thread_time() - began

        return typical(once, TIMING_SECONDS / 5)

    def add() -> None:
        for one, other in zip(gradients, others, strict=True):
            one.add_(other)

    return cold(lambda: y + 1.0), cold(y.sum), cold(add)


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
