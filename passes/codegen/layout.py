"""How the code of a stage is divided into classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdcompile.passes.codegen.skeleton import Node
from pdcompile.passes.codegen.tree import Call, below


@dataclass(frozen=True, slots=True)
class Block:
    """One class to write: an example of its calls in each mode, and of its modules."""

    index: int
    path: str  # of the example
    train: Call | None
    eval: Call | None
    node: Node
    arguments: tuple[str, ...] = ()  # of its constructor
    shapes: tuple[dict[str, tuple[Any, ...]], ...] = ({}, {})  # for comments, in each mode


@dataclass(slots=True)
class Layout:
    """How the code of a stage is divided: its root body and the classes that it uses."""

    train: Call
    eval: Call
    root: Node
    blocks: list[Block] = field(default_factory=list)  # inner ones first
    block_of: dict[str, int] = field(default_factory=dict)  # module path -> index
    partial: frozenset[str] = frozenset()  # modules of which other stages run a part


def name_below(fqn: str, path: str, names: Mapping[str, str]) -> str:
    """The name of a tensor that lies below the module at `path`; raises StopIteration if none."""
    if names.get(fqn) == fqn and below(fqn, path):
        return fqn
    return next(name for name, other in names.items() if other == fqn and below(name, path))
