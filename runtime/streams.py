"""Random streams: every random op of a stage draws from a stream of its own.

Generated source calls ``draw(where, index)`` before each random function, which does nothing by
itself; here it re-seeds the generator for (seed, minibatch, microbatch, module, index), so that
what is drawn does not depend on the plan, the schedule or the rank.  Random leaf modules (dropout,
attention, …) get the same through a hook.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

from torch import nn

from pdcompile.randomness import reseed, seed_of
from pdcompile.stage import StageInterface


class Streams:
    """The streams of one process; `begin` says which microbatch is about to run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._where = (0, 0)
        self._names: dict[nn.Module, str] = {}
        self._calls: dict[str, count[int]] = {}

    def begin(self, minibatch: int, microbatch: int) -> None:
        """A forward begins: what is drawn without being announced gets a fixed start, too."""
        self._where = (minibatch, microbatch)
        self._calls.clear()
        self._draw("", -1)

    def attach(self, stage: nn.Module, interface: StageInterface) -> None:
        """Let a stage's random ops draw from here."""
        for name, module in stage.named_modules():
            self._names[module] = name

        def draw(where: nn.Module | str, index: int) -> None:
            self._draw(where if isinstance(where, str) else self._names[where], index)

        vars(sys.modules[type(stage).__module__])["draw"] = draw
        for path in {*interface.train.draws, *interface.eval.draws}:
            train = interface.train.draws.get(path, ())
            evaluation = interface.eval.draws.get(path, ())
            hook = self._hook(path, train, evaluation)
            stage.get_submodule(path).register_forward_pre_hook(hook)

    def _hook(self, path: str, train: tuple[int, ...], evaluation: tuple[int, ...]) -> Any:
        def announce(module: nn.Module, _: Any) -> None:
            call = next(self._calls.setdefault(path, count()))
            self._draw(path, (train if module.training else evaluation)[call])

        return announce

    def _draw(self, path: str, index: int) -> None:
        reseed(seed_of(self._seed, *self._where, path, index))
