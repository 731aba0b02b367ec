"""Whether anything asked for the mode: if nothing did, evaluation is the same computation.

A model whose Python never reads the flag of a module runs the same lines in both modes, so that
a second capture of a very large model would only repeat the first.  Nor may it ask whether
autograd is on, which is another question with the same answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import pdcompile

_OURS = tuple({
    str(Path(pdcompile.__file__).parent), str(Path(__file__).resolve().parents[2] / "passes"),
})  # fmt: skip


@dataclass
class Flag:
    """`read`: the flag of some module, or autograd's, was or might have been read."""

    read: bool = False


@contextmanager
def watched_flag(model: nn.Module) -> Iterator[Flag]:
    """Notice reads of ``module.training``, and the model's ``torch.is_grad_enabled()``.

    Classes that do something of their own when the mode changes, or that keep the flag where
    reads cannot be seen, count as reads.
    """
    flag = Flag(any(_hides_reads(type(module)) for module in model.modules()))
    if flag.read:
        yield flag
        return

    def get(module: nn.Module) -> bool:
        if not sys._getframe(1).f_code.co_filename.startswith(_OURS):
            flag.read = True
        try:
            found: bool = module.__dict__["training"]
        except KeyError:
            raise AttributeError(f"{type(module).__name__!r} has no 'training'") from None
        return found

    def put(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    def note(enabled: bool) -> bool:
        flag.read = True
        return enabled

    nn.Module.training = property(get, put)  # type: ignore[assignment]
    try:
        with _answered(note):
            yield flag
    finally:
        del nn.Module.training


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
