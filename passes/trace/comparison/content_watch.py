"""Watch: records the tensors that torch functions take and make, by content and source line.

Tensors are compared by content, not by name: an edited stage may compute the same values in
another way, and only the first one that is not among the model's values is of interest.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pdcompile.eager.digest import digest
from pdcompile.ir.graph import Op
from pdcompile.ir.opaque import tensors_among
from pdcompile.passes.trace.comparison.step_values import StepValues
from pdcompile.passes.trace.comparison.steps import Step
from pdcompile.releases.torch_internals import NoTorchFunction, is_functorch_wrapped_tensor

_STAGE_FILE = re.compile(r"<pdcompile_stages_\d+_(stage_\d+\.py)>")


def content_of(tensor: Tensor) -> str:
    """The content, shape and dtype of a tensor; -0.0 counts as 0.0."""
    with torch.no_grad(), NoTorchFunction():
        plain = tensor.detach()
        if plain.layout != torch.strided:
            plain = plain.to_dense()
        if plain.is_floating_point() or plain.is_complex():
            plain = plain.resolve_conj().resolve_neg() + 0
        return f"{digest(plain.contiguous()):016x} {tuple(tensor.shape)} {tensor.dtype}"


@dataclass(frozen=True, slots=True)
class WatchedCall:
    """A torch function that ran; `where` is "stage_1.py:34", "" outside of generated files."""

    function: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    where: str


class Watch(TorchFunctionMode):
    """Records every torch function inside ``with Watch() as seen:``, and later the gradients of
    what they made."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[WatchedCall] = []
        self.values: set[str] = set()  # the content of every result
        self.gradients: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        before = _digests(tensors_among((args, kwargs)))
        result = func(*args, **kwargs)
        made = tensors_among(result)
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            made = [args[0]]
        if made and name != "__get__":
            outputs = _digests(made)
            self.events.append(WatchedCall(name, before, outputs, stage_line()))
            self.values |= outputs
            for tensor in made:
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(self._gradient)  # type: ignore[no-untyped-call]
        return result

    def _gradient(self, gradient: Tensor) -> None:
        self.gradients.add(content_of(gradient))


def _digests(tensors: list[Tensor]) -> frozenset[str]:
    """Digests of all tensors that are plain: those of a torch.func transform stand for no value."""
    return frozenset(content_of(t) for t in tensors if not is_functorch_wrapped_tensor(t))


def stage_line() -> str:
    """The line of generated source that is running, as "stage_1.py:34"; "" for none."""
    return next(_stage_lines(traceback.walk_stack(sys._getframe(1))), "")


def line_of_traceback(error: BaseException) -> str | None:
    """The innermost line of generated source that an exception passed through."""
    return [None, *_stage_lines(traceback.walk_tb(error.__traceback__))][-1]


def _stage_lines(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    for frame, line in frames:
        if found := _STAGE_FILE.fullmatch(frame.f_code.co_filename):
            yield f"{found[1]}:{line}"


@dataclass(slots=True)
class Replay:
    """The contents of each op's value and gradient, where a `Watch` on the same run saw them.

    Values that it did not see would not be seen in the run to compare with either.
    """

    ops: Mapping[str, Op]
    watch: Watch = field(default_factory=Watch)
    contents: dict[str, str] = field(default_factory=dict)  # of inputs and all ops
    values: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, frozenset[str]] = field(default_factory=dict)  # read by each op

    def ran(self, name: str, value: Any) -> None:
        """Notes what an op that has run read and made, or the value of an input."""
        op = self.ops.get(name)
        if op is not None:
            read = [self.contents[i] for i in op.inputs if i in self.contents]
            self.inputs[name] = frozenset(read)
        if isinstance(value, Tensor):
            found = self.contents[name] = content_of(value)
            if op is not None and found in self.watch.values:
                self.values[name] = found
            if value.requires_grad and value.grad_fn is not None:
                value.register_hook(partial(self._gradient, name))  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, gradient: Tensor) -> None:
        found = content_of(gradient)
        if found in self.watch.gradients:
            self.gradients[name] = found


def replay(step: Step) -> tuple[Replay, StepValues]:
    """Runs the graph of a step under a `Watch`; the model's buffers are as before afterwards."""
    recorder = Replay({op.name: op for op in step.graph.ops})

    def run() -> Any:
        with recorder.watch:
            return step.captured(recorder.ran)

    return recorder, step.values(run)


def first_difference(step: Step, gradients: bool | None) -> Op | None:
    """The first op whose value the model's own run does not have; None where there is none.

    With `gradients` (None: as the graph's mode has it) autograd records the model's run.
    """
    seen = Watch()

    def run() -> Any:
        with seen:
            return step.eager()

    step.values(run, gradients=gradients)
    known = {"", *seen.values}.union(*(event.inputs for event in seen.events))
    recorder, _ = replay(step)
    for op in step.graph.ops:
        # What a torch.func transform computes inside cannot be seen in the model's run.
        plain = not op.target.startswith("torch.ops.aten.")
        if plain and recorder.values.get(op.name, "") not in known:
            return op
    return None
