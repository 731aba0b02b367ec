"""Watch: records the tensors that torch functions take and make, by content and source line.

Tensors are compared by content, not by name: an edited stage may compute the same values in
another way, and only the first one that is not among the model's values is of interest.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pdcompile.eager.digest import flat_bytes
from pdcompile.ir.opaque import tensors_among
from pdcompile.releases.torch_internals import NoTorchFunction, is_functorch_wrapped_tensor

_STAGE_FILE = re.compile(r"<pdcompile_stages_\d+_(stage_\d+\.py)>")


def digest(tensor: Tensor) -> str:
    """The content, shape and dtype of a tensor; -0.0 counts as 0.0."""
    with torch.no_grad(), NoTorchFunction():
        plain = tensor.detach()
        if plain.layout != torch.strided:
            plain = plain.to_dense()
        if plain.is_floating_point() or plain.is_complex():
            plain = plain.resolve_conj().resolve_neg() + 0
        raw = flat_bytes(plain.cpu())
    found = hashlib.blake2b(raw.numpy().tobytes(), digest_size=16)
    found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    return found.hexdigest()


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
        self.gradients.add(digest(gradient))


def _digests(tensors: list[Tensor]) -> frozenset[str]:
    """Digests of all tensors that are plain: those of a torch.func transform stand for no value."""
    return frozenset(digest(t) for t in tensors if not is_functorch_wrapped_tensor(t))


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
