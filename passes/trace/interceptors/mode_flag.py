"""Watches whether forward asks for the mode: if not, evaluation is the same computation.

A model that never reads a module's training flag, nor whether autograd is on, runs the same lines
in both modes, so that a second capture of a very large model would only repeat the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import torch
from torch import nn

from pdcompile.passes.trace.calls.attribute_reads import AttributeReads
from pdcompile.passes.trace.tape.interceptor import patched


@contextmanager
def watched_flag(model: nn.Module, reads: AttributeReads) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether a module's flag or autograd's may have been read.

    Classes with their own ``train()``, or that keep the flag where reads cannot be seen, count as
    reads.
    """
    asked = [any(_hides_reads(type(module)) for module in model.modules())]

    def note(enabled: bool) -> bool:
        asked.append(True)
        return enabled

    with answered(note):
        yield lambda: any(asked) or reads.modes()


def answered(answer: Callable[[bool], bool]) -> AbstractContextManager[None]:
    """Changes what a model hears that asks whether autograd is on.

    Torch itself gets the true answer: what it does then is captured op by op.
    """
    plain = torch.is_grad_enabled

    def is_grad_enabled() -> bool:
        enabled = plain()
        return answer(enabled) if _asked_by_model() else enabled

    return patched((torch, "is_grad_enabled", is_grad_enabled))


def _asked_by_model() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    asker = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return asker.partition(".")[0] not in ("torch", "pdcompile")


def _hides_reads(kind: type[nn.Module]) -> bool:
    if issubclass(kind, torch.jit.ScriptModule) or kind.train is not nn.Module.train:
        return True
    return any("training" in vars(base) for base in kind.__mro__ if base is not nn.Module)
