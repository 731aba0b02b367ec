"""Whether anything asked for `training`: if nothing did, evaluation is the same computation.

A model whose Python never reads the flag of a module runs the same lines in both modes, so that
a second capture of a very large model would only repeat the first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import pdcompile

_OURS = tuple({
    str(Path(pdcompile.__file__).parent), str(Path(__file__).resolve().parents[2] / "passes"),
})  # fmt: skip


@dataclass
class Flag:
    """`read`: the flag of some module was, or might have been, read."""

    read: bool = False


@contextmanager
def watched_flag(model: nn.Module) -> Iterator[Flag]:
    """Notice reads of ``module.training`` by anybody but this package.

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

    nn.Module.training = property(get, put)  # type: ignore[assignment]
    try:
        yield flag
    finally:
        del nn.Module.training


def _hides_reads(kind: type[nn.Module]) -> bool:
    if issubclass(kind, torch.jit.ScriptModule) or kind.train is not nn.Module.train:
        return True
    return any("training" in vars(base) for base in kind.__mro__ if base is not nn.Module)
