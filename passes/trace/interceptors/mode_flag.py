"""Whether anything asked for the mode: if nothing did, evaluation is the same computation.

A model whose Python never reads the flag of a module runs the same lines in both modes, so that
a second capture of a very large model would only repeat the first.  Nor may it ask whether
autograd is on, which is another question with the same answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import nn

from pdcompile.passes.trace.calls.attribute_reads import AttributeReads


@contextmanager
def watched_flag(model: nn.Module, reads: AttributeReads) -> Iterator[Callable[[], bool]]:
    """Gives what tells whether the flag of a module, or autograd's, was or might have been read.

    Classes that do something of their own when the mode changes, or that keep the flag where
    reads cannot be seen, count as reads.
    """
    asked = [any(_hides_reads(type(module)) for module in model.modules())]

    def note(enabled: bool) -> bool:
        asked.append(True)
        return enabled

    with _answered(note):
        yield lambda: any(asked) or reads.modes()


@contextmanager
def autograd_as_run(training: bool) -> Iterator[None]:
    """A model that asks whether autograd is on is told what holds when its stages run.

    Recording has it on in both modes, evaluation runs without it.  torch itself is told the
    truth: what it does by the answer is captured op by op.
    """
    with _answered(lambda enabled: enabled and training):
        yield


@contextmanager
def _answered(answer: Callable[[bool], bool]) -> Iterator[None]:
    plain = torch.is_grad_enabled

    def is_grad_enabled() -> bool:
        enabled = plain()
        return answer(enabled) if _asked_by_model() else enabled

    torch.is_grad_enabled = is_grad_enabled
    try:
        yield
    finally:
        torch.is_grad_enabled = plain


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
