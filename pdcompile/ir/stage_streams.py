"""Random streams: every random op of a stage draws from a stream of its own.

Generated source calls ``draw(where, index)`` before each random function, which does nothing by
itself; here it re-seeds the generator for (seed, minibatch, microbatch, module, index), so that
what is drawn does not depend on the plan, the schedule or the rank.  Random leaf modules (dropout,
attention, …) get the same through a hook, and opaque modules run in a scope that seeds
every draw inside of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

from torch import nn

from pdcompile.eager.randomness import DrawScope, begin_draw, end_draw, reseed, seed_of
from pdcompile.eager.stage_compiler import Backend, compile_in_place, pass_images, uncompiled
from pdcompile.ir.opaque import announce
from pdcompile.ir.stage_interface import StageInterface, module_of, submodule_of


class Streams:
    """The streams of one process; `begin` says which microbatch is about to run.

    Stages that are attached run through torch.compile where there is a `backend`.
    """

    def __init__(self, seed: int, backend: Backend | None = None) -> None:
        self._seed, self.backend = seed, backend
        self.apart: Callable[..., Any] = uncompiled if backend else lambda function: function
        self._where = (0, 0)
        self._names: dict[nn.Module, str] = {}
        self._calls: dict[str, count[int]] = {}
        self._scopes: dict[nn.Module, DrawScope] = {}
        # One function each: compiled code is shared by modules with the same.
        self._announced, self._after = self.apart(self._draw), self.apart(lambda *_: end_draw())
        self._hook_of = cache(lambda *counted: self.apart(self._hook(*counted)))

    def begin(self, minibatch: int, microbatch: int) -> None:
        """A forward begins: what is drawn without being announced gets a fixed start, too."""
        self._where = (minibatch, microbatch)
        self._calls.clear()
        self._scopes.clear()
        reseed(seed_of(self._seed, *self._where, "", -1))

    def scope(self, stage: nn.Module) -> DrawScope:
        """The scope in which opaque modules of a stage draw, in the forward that runs."""
        found = self._scopes.get(stage)
        if found is None:
            found = self._scopes[stage] = DrawScope(stage, self._seed, *self._where)
        return found

    def drawn(self, stage: nn.Module) -> DrawScope | None:
        """The scope of the forward that has run, where something was drawn in it."""
        found = self._scopes.get(stage)
        return found if found is not None and found.draws else None

    def attach(self, stage: nn.Module, interface: StageInterface) -> None:
        """Let a stage's random ops draw from here."""
        for name, module in stage.named_modules():
            self._names[module] = name
        names = vars(module_of(type(stage)))
        names["draw"] = self._announced
        apart = [submodule_of(stage, path) for path in interface.opaque]
        modes = interface.eval, interface.train
        for path in {*interface.train.draws, *interface.eval.draws}:
            evaluation, train = (one.draws.get(path, ()) for one in modes)
            module = submodule_of(stage, path)
            module.register_forward_pre_hook(self._hook_of(path, train, evaluation))
            module.register_forward_hook(self._after)
            if not [*module.parameters()]:  # there is little to compile between the two hooks
                apart.append(module)
        announce(stage, interface, lambda: self.scope(stage))
        came = [{n: x.any_layout for n, p in enumerate(x.inputs) if p.image} for x in modes]
        left = [{n: p.image for n, p in enumerate(x.outputs) if not p.stride_order} for x in modes]
        if self.backend == "inductor":
            pass_images(type(stage), came, left)
        if self.backend:
            compile_in_place(stage, names, self.backend, apart)

    def _hook(self, path: str, train: tuple[int, ...], evaluation: tuple[int, ...]) -> Any:
        def before(module: nn.Module, _: Any) -> None:
            call = next(self._calls.setdefault(path, count()))
            self._draw(path, (train if module.training else evaluation)[call])

        return before

    def _draw(self, where: nn.Module | str, index: int) -> None:
        path = where if isinstance(where, str) else self._names[where]
        begin_draw(seed_of(self._seed, *self._where, path, index))
