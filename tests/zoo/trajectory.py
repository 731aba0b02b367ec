"""Traces of a training: followed on eager and on stages, compared to the last bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.zoo.case import Case

STEPS = 2
RATE = 0.05


@dataclass(slots=True)
class Trajectory:
    """Tensors by what they are; a name that is missing on one side is a difference too."""

    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    finite: bool = True

    def keep(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()
            if value.is_floating_point():
                self.finite &= bool(torch.isfinite(value).all())
        self.tensors[name] = value if value is None or isinstance(value, Tensor) else None


def follow(runner: Any, case: Case) -> Trajectory:
    """Two minibatches with an update by hand after each, then an evaluation.

    `runner` is a pipeline or the reference, without an optimizer.
    """
    found = Trajectory()
    for step in range(STEPS):
        args, kwargs = _call(case, step)
        result = runner.step_call(args, kwargs, case.target(step))
        found.keep(f"loss of step {step}", result.loss.wait())
        _keep_outputs(found, f"of step {step}", result.outputs)
        with torch.no_grad():
            for name, parameter in runner.named_parameters():
                found.keep(f"gradient {name} of step {step}", parameter.grad)
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=RATE)
        runner.zero_grad()
    args, kwargs = _call(case, STEPS)
    target = case.target(STEPS)
    result = runner.eval_step(*args, **({} if target is None else {"target": target}), **kwargs)
    found.keep("loss of evaluation", None if result.loss is None else result.loss.wait())
    _keep_outputs(found, "of evaluation", result.outputs)
    for name, value in runner.full_state_dict().items():
        found.keep(f"state {name}", value)
    for name, value in runner.to_model().named_buffers():
        found.keep(f"buffer {name}", value)
    return found


def differences(expected: Trajectory, found: Trajectory) -> list[str]:
    """Names of what differs in a bit, with the largest difference; NaN equals NaN."""
    lines = []
    for name in [*expected.tensors, *(n for n in found.tensors if n not in expected.tensors)]:
        if name not in expected.tensors or name not in found.tensors:
            lines.append(f"{name} is only in {'eager' if name in expected.tensors else 'stages'}")
            continue
        one, other = expected.tensors[name], found.tensors[name]
        if one is None or other is None:
            if one is not other:
                lines.append(f"{name} is None only in {'eager' if one is None else 'stages'}")
        elif one.shape != other.shape or one.dtype != other.dtype:
            lines.append(f"{name} is {tuple(one.shape)} {one.dtype} in eager, not {other.dtype}")
        elif not bool(torch.all((one == other) | ((one != one) & (other != other)))):
            gap = (one.to(torch.complex128) - other.to(torch.complex128)).abs().max()
            lines.append(f"{name} differs by up to {float(gap):.3g}")
    return lines


def _call(case: Case, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = case.inputs(step)
    return ((), inputs) if isinstance(inputs, dict) else (inputs, {})


def _keep_outputs(found: Trajectory, when: str, outputs: Any) -> None:
    for path, leaf in pytree.tree_flatten_with_path(outputs)[0]:
        name = f"output {pytree.keystr(path)} {when}"
        if leaf is None or isinstance(leaf, Tensor):
            found.keep(name, leaf)
        else:
            found.keep(f"{name} ({type(leaf).__name__})", None)
