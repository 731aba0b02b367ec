"""Costs of an optimizer, in memory and in time, found by asking the optimizer itself.

Steps on small parameters show which state tensors are kept (SGD 0, momentum 1, Adam 2 times the
parameters' bytes), and what a step needs for a moment.  An optimizer that goes through its
parameters one by one needs that for one of them, and often still holds some of the one before; one
that takes all at once (`foreach`) needs it for their sum; a fused one needs nothing.

A step takes as long as memory needs for what its kernels read and write.

Of several optimizers, each of parameters of its own, the one that takes most counts: matrices and
vectors are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdcompile.eager.optimizers import Optimizers, make_optimizer
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.costs.rehearsal.live_storages import LiveStorages

PROBE_SHAPE = (32, 32)
_VECTOR = (1024,)
SCALAR_BYTES = 64  # at most this much is a count or a coefficient, which do not grow


@dataclass(frozen=True, slots=True)
class OptimizerCosts:
    """Bytes of state per byte of parameters, what a step needs for a moment, and what it moves.

    `step`: per byte of the parameter whose turn it is, of the one before it, and of all.
    `moved`: bytes that the step's kernels read and write, per byte of parameters; `calls`: of
    kernels, for each parameter.
    """

    factor: float = 0.0
    step: tuple[float, float, float] = (0.0, 0.0, 0.0)
    moved: float = 0.0
    calls: int = 0


ADAM = OptimizerCosts(2.0, (2.0, 1.0, 0.0), 21.0, 10)  # one parameter after the other


def optimizer_costs(
    build: Callable[..., Any] | None, *, on_gpu: bool = False
) -> tuple[OptimizerCosts, str | None]:
    """Costs of the optimizer, and a note when it had to be assumed.

    `on_gpu`: where torch's optimizers take all parameters at once unless they are told otherwise.

    A callable that picks parameters by name may have no use for the probe's; then Adam's
    numbers are assumed and the note says so.
    """
    if build is None:
        return OptimizerCosts(), None
    try:
        probe = torch.nn.Parameter(torch.zeros(PROBE_SHAPE))
        several = isinstance(make_optimizer(build, [("probe0.weight", probe)]), Optimizers)
        names = {"weight": PROBE_SHAPE, **({"bias": _VECTOR} if several else {})}
        found = [_costs(build, name, shape, on_gpu) for name, shape in names.items()]
    except Exception as error:  # a user's callable: whatever it raises, only the estimate suffers
        return ADAM, (
            f"optimizer state assumed {ADAM.factor:g} bytes per parameter byte, and temporaries of "
            "its step as those of Adam: the optimizer callable could not be probed "
            f"({type(error).__name__}: {error})"
        )
    factors, steps, moved, calls = zip(*found, strict=True)
    of_one, of_previous, of_all = map(max, *steps) if several else steps[0]
    step = of_one, of_previous, of_all
    return OptimizerCosts(max(factors), step, max(moved), max(calls)), None


def _costs(
    build: Callable[..., Any], name: str, shape: tuple[int, ...], on_gpu: bool
) -> tuple[float, tuple[float, float, float], float, int]:
    """The fields of `OptimizerCosts`, for parameters of this name and shape."""
    found = [_probe(build, name, shape, count, on_gpu) for count in (1, 2, 3)]
    (factor, one, moved, few), (_, two, _, more), (_, three, *_) = found
    of_all = max(0.0, three - two)
    temporaries = max(0.0, one - of_all), max(0.0, two - one - of_all), of_all
    return factor, temporaries, moved, more - few


def _probe(
    build: Callable[..., Any], name: str, shape: tuple[int, ...], count: int, on_gpu: bool
) -> tuple[float, float, float, int]:
    """State of a parameter, temporaries of a step and what it moves, per byte of one parameter,
    and the step's calls of kernels."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(count)]
    optimizer = make_optimizer(build, [(f"probe{n}.{name}", p) for n, p in enumerate(parameters)])
    assert optimizer is not None
    for group in optimizer.param_groups if on_gpu else ():
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    _set_gradients(parameters)
    optimizer.step()  # makes the state
    state = [_tensors(optimizer.state.get(p, {})) for p in parameters]
    _set_gradients(parameters)
    given = [t for p in parameters for t in (p, p.grad) if t is not None]
    with _Step([*given, *(tensor for one in state for tensor in one)]) as live:
        optimizer.step()
    size = parameters[0].untyped_storage().nbytes()
    held = sum(t.numel() * t.element_size() for t in state[0] if t.numel() > 1)
    return held / size, live.peak_bytes / size, live.moved_bytes / size, live.calls


def _set_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros(parameter.shape)


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


class _Step(LiveStorages):  # type: ignore[no-untyped-call]
    """Live storages without scalars; calls of kernels, and bytes that these read and write."""

    calls = moved_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        read = tensors_among(args)
        written = [
            tensor
            for argument, one in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_among(one)
        ]
        made = [one for one in tensors_among(result) if all(one is not other for other in read)]
        if not func.is_view:
            self.calls += 1
            sizes = (one.numel() * one.element_size() for one in (*read, *written, *made))
            self.moved_bytes += sum(size for size in sizes if size > SCALAR_BYTES)
        return result

    def size_of(self, storage: torch.UntypedStorage, func: Any, args: tuple[Any, ...]) -> int:
        size = super().size_of(storage, func, args)
        return size if size > SCALAR_BYTES else 0
