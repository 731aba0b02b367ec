"""Runs of a graph in which every draw has a stream of its own, as the stages have them.

Eager draws from one generator, and a branch that is not taken draws nothing: where branches draw,
graph and model agree only with streams named by module and index (`pdcompile.eager.randomness`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from pdcompile.eager.randomness import DrawScope, reseed, seed_of
from pdcompile.ir.execution import Lookup
from pdcompile.ir.graph import Op, OpGraph, Ref


@dataclass(frozen=True)
class StreamLookup(Lookup):
    """Finds the model's modules; those that are opaque run inside a scope of draws."""

    scope: DrawScope | None = None
    opaque: frozenset[str] = frozenset()

    def module(self, path: str) -> Any:
        module = Lookup.module(self, path)
        return partial(_inside, self.scope, module) if path in self.opaque else module


def _inside(scope: DrawScope | None, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    assert scope is not None
    with scope:
        return module(*args, **kwargs)


def opaque_paths(graph: OpGraph) -> frozenset[str]:
    """Paths of the modules that are one op each and draw inside as they do in eager."""
    return frozenset(op.module_path for op in graph.ops if op.opaque)


def announce(op: Op, seed: int, minibatch: int) -> None:
    """Seed the op that comes next, in microbatch 0."""
    if op.draw is not None and not op.opaque:
        reseed(seed_of(seed, minibatch, 0, op.module_path, op.draw))


def announcing(graph: OpGraph, seed: int = 0, minibatch: int = 0) -> Callable[..., None]:
    """Seeds the first op at once, and each later one when it is told that an op has run."""
    waiting: Iterator[Op] = iter(graph.ops)

    def following(*_: Any) -> None:
        op = next(waiting, None)
        if op is not None:
            announce(op, seed, minibatch)

    following()
    return following


def branches_draw(graph: OpGraph) -> bool:
    """Whether random ops may run here that eager leaves out."""
    chosen = any(
        op.target == "operator.getitem"
        and isinstance(op.args[0], tuple)
        and isinstance(op.args[1], Ref)
        for op in graph.ops
    )
    return chosen and any(op.draw is not None for op in graph.ops)
