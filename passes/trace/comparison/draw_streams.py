"""Random streams for a run of a graph: one for each draw, as the stages have them.

Eager draws from one generator, and a branch that is not taken draws nothing: graph and model agree
only with streams named by module and index (`pdcompile.eager.randomness`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from pdcompile.eager.randomness import DrawScope, reseed, seed_of
from pdcompile.ir.execution import Lookup
from pdcompile.ir.graph import Op, OpGraph


@dataclass(frozen=True, kw_only=True)
class StreamLookup(Lookup):
    """Finds the model's modules; those that are opaque run inside a scope of draws."""

    scope: DrawScope
    opaque: frozenset[str]

    def module(self, path: str) -> Any:
        module = Lookup.module(self, path)
        return partial(_inside, self.scope, module) if path in self.opaque else module


def _inside(scope: DrawScope, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with scope:
        return module(*args, **kwargs)


def opaque_paths(graph: OpGraph) -> frozenset[str]:
    """Paths of the modules that are one op each and draw inside as they do in eager."""
    return frozenset(op.module_path for op in graph.ops if op.opaque)


def seeding(graph: OpGraph, seed: int, minibatch: int) -> Callable[[], None]:
    """Seeds the first op (of microbatch 0) at once, and each later one when it is called again."""
    reseed(seed_of(seed, minibatch, 0, "", -1))
    waiting: Iterator[Op] = iter(graph.ops)

    def seed_next() -> None:
        op = next(waiting, None)
        if op is not None and op.draw is not None and not op.opaque:
            reseed(seed_of(seed, minibatch, 0, op.module_path, op.draw))

    seed_next()
    return seed_next
