"""What a stage needs to run its forward again as it ran the first time: recomputation.

The first run is that of a stage which keeps its activations, with autograd on, because kernels are
chosen by it and would round otherwise without; then its graph is dropped.  Kept are the inputs as
they came (what a stage writes in place it clones), and every buffer that forward writes as it was
before.  The second run works on these copies, which are forgotten after it, so that the model's
own buffers are written once.  Forward hooks of opaque modules run in the first run alone: those
that do more than look were refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pdcompile.compiled import Compiled
from pdcompile.eager.module_hooks import HOOK_TABLES
from pdcompile.ir.stage_interface import submodule_of

Place = tuple[str, str]  # path of a module in the stage, name of one of its buffers


@dataclass(frozen=True, slots=True)
class Kept:
    """One microbatch of a recomputing stage between its forward and its backward.

    `given` are the stage's inputs in order, `leaves` what its loss reads of the caller's.
    """

    given: list[Any]
    leaves: dict[str, Any]
    buffers: dict[Place, Tensor]


class SecondRun:
    """Of one stage: which of its tensors forward writes, and which of its hooks run once."""

    def __init__(self, module: nn.Module, compiled: Compiled, stage: int) -> None:
        """`module`: one instance of the stage."""
        interface, graph = compiled.interfaces[stage], compiled.capture.train
        written = compiled.written_buffers(stage)
        self._buffers: list[Place] = [
            (path, leaf)
            for name, _ in module.named_buffers(remove_duplicate=False)
            for path, _, leaf in [name.rpartition(".")]
            if interface.aliases.get(name, name) in written
        ]
        self._leaves = frozenset(graph.written_inputs())
        self._hooked = [
            (f"{path}.{below}" if below else path, table)
            for path in interface.opaque
            for below, one in submodule_of(module, path).named_modules()
            for table in HOOK_TABLES
            if getattr(one, table)
        ]

    def before(self, module: nn.Module, given: list[Any], leaves: dict[str, Any]) -> Kept:
        """What is to be kept of the forward to come."""
        copies: dict[int, Tensor] = {}  # of a buffer with several names there is one
        buffers = {}
        for path, leaf in self._buffers:
            buffer = submodule_of(module, path)._buffers[leaf]
            assert buffer is not None
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.clone()
            buffers[path, leaf] = copies[id(buffer)]
        # `given` is cloned where forward writes it; what the loss reads is not.
        leaves = {p: x.clone() if p in self._leaves else x for p, x in leaves.items()}
        return Kept(given, leaves, buffers)

    @contextmanager
    def around(self, module: nn.Module, buffers: dict[Place, Tensor]) -> Iterator[None]:
        """While the module runs again: on these buffers, and without the hooks that ran."""
        tables = [(submodule_of(module, path).__dict__, name) for path, name in self._hooked]
        homes = [(submodule_of(module, path)._buffers, leaf) for path, leaf in buffers]
        hooks = [table[name] for table, name in tables]
        present = [home[leaf] for home, leaf in homes]
        try:
            for (home, leaf), copy in zip(homes, buffers.values(), strict=True):
                home[leaf] = copy
            for (table, name), every in zip(tables, hooks, strict=True):
                table[name] = type(every)()
            yield
        finally:
            for (home, leaf), buffer in zip(homes, present, strict=True):
                home[leaf] = buffer
            for (table, name), every in zip(tables, hooks, strict=True):
                table[name] = every
