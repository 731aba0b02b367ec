"""Watch: records the tensors that torch functions take and make, by content.

The model's own run has no names for its values: an op of the graph differs whose value is not
among them.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pdcompile.eager.digest import digest
from pdcompile.ir.graph import Op
from pdcompile.ir.opaque import tensors_among
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


class Watch(TorchFunctionMode):
    """Records what every torch function inside ``with Watch() as seen:`` takes and makes."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()  # the content of every argument
        self.made: set[str] = set()  # and of every result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.read |= _digests(tensors_among((args, kwargs)))
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name != "__get__":
            self.made |= _digests([args[0]] if name == "__setitem__" else tensors_among(result))
        return result


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


def first_difference(step: Step, gradients: bool | None) -> Op | None:
    """The first op whose value the model's own run does not have; None where there is none.

    With `gradients` (None: as the graph's mode has it) autograd records the model's run.
    """
    seen, replayed, contents = Watch(), Watch(), dict[str, str]()

    def eager() -> Any:
        with seen:
            return step.eager()

    def ran(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            contents[name] = content_of(value)

    def captured() -> Any:
        with replayed:
            return step.captured(ran)

    step.values(eager, gradients=gradients)
    step.values(captured)
    # What a `Watch` does not see in one run it does not see in the other either.
    wrong = replayed.made - seen.made - seen.read
    # What a torch.func transform computes inside cannot be seen in the model's run.
    plain = (op for op in step.graph.ops if not op.target.startswith("torch.ops.aten."))
    return next((op for op in plain if contents.get(op.name) in wrong), None)
