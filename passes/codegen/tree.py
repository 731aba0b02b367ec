"""The calls of a stage as a tree: which ops become the forward of which block class.

A run of consecutive ops below one module is one call of that module, if the whole of the module
is on this stage.  Ops of a module that a cut goes through, or that cannot be one function, stay
in the caller's body ("flat").  Every grouping computes the same thing: a call takes what its ops
read from outside and returns what others read of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from pdcompile.ir.graph import Op
from pdcompile.passes.stages.naming import scope_of


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the module at `path`, in one mode.

    inputs: values that it reads from outside, in order of first use.  tensors: FQNs of tensors
    of the model that lie outside of `path` (shared weights), handed in after the inputs.
    outputs: values that others read, in order of production.
    """

    path: str
    items: tuple[Item, ...]
    inputs: tuple[str, ...]
    tensors: tuple[str, ...]
    outputs: tuple[str, ...]


Item: TypeAlias = Op | Call


def below(path: str, ancestor: str) -> bool:
    """Whether `path` is `ancestor` or lies in it ("" is the root)."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def relative(path: str, ancestor: str) -> str:
    """`path` without the prefix `ancestor`."""
    return path if not ancestor else path[len(ancestor) + 1 :]


def is_container(class_name: str) -> bool:
    """Whether the class only holds modules, so that a forward of its own says nothing."""
    return class_name in (
        "torch.nn.Sequential", "torch.nn.ModuleList", "torch.nn.ModuleDict",
        "torch.nn.ParameterList", "torch.nn.ParameterDict",
    )  # fmt: skip


def tensors_of(item: Item) -> tuple[str, ...]:
    """FQNs of the model's tensors that are arguments of the item."""
    return item.attributes if isinstance(item, Op) else item.tensors


def ops_of(item: Item) -> list[Op]:
    """All ops below an item, in order."""
    return [item] if isinstance(item, Op) else [op for part in item.items for op in ops_of(part)]


def build(
    ops: Sequence[Op],
    wanted: Collection[str],
    is_block: Callable[[str], bool],
    reachable: Callable[[str, str], bool],
) -> Call:
    """The call tree of one stage's ops.

    Args:
        ops: in topological order.
        wanted: values that the stage returns.
        is_block: whether the module at a path becomes a call (rather than flat).
        reachable: (fqn, path) whether the tensor has a name below the module at path.
    """
    return _Builder(is_block, reachable).call("", list(ops), set(wanted))


@dataclass(slots=True)
class _Builder:
    is_block: Callable[[str], bool]
    reachable: Callable[[str, str], bool]

    def call(self, path: str, ops: list[Op], wanted: set[str]) -> Call:
        last_use = {name: i for i, op in enumerate(ops) for name in op.inputs}
        items: list[Item] = []
        start = 0
        for block, run in groupby(ops, key=lambda op: self.next_block(scope_of(op), path)):
            members = list(run)
            for part in _calls(members, block) if block is not None else ():
                start += len(part)
                needed = {
                    op.name for op in part
                    if op.name in wanted or last_use.get(op.name, -1) >= start
                }  # fmt: skip
                assert block is not None
                items.append(self.call(block, part, needed))
            if block is None:
                start += len(members)
                items.extend(members)
        made = {op.name for op in ops}
        return Call(
            path=path,
            items=tuple(items),
            inputs=tuple(dict.fromkeys(n for item in items for n in item.inputs if n not in made)),
            tensors=tuple(
                dict.fromkeys(
                    fqn
                    for item in items
                    for fqn in tensors_of(item)
                    if path and not self.reachable(fqn, path)
                )
            ),
            outputs=tuple(op.name for op in ops if op.name in wanted),
        )

    def next_block(self, scope: str, path: str) -> str | None:
        """The outermost block strictly below `path` that contains `scope`."""
        parts = relative(scope, path).split(".") if scope != path else []
        at = path
        for part in parts:
            at = f"{at}.{part}" if at else part
            if self.is_block(at):
                return at
        return None


def _calls(run: list[Op], path: str) -> list[list[Op]]:
    """One list of ops for each call of the module, when consecutive calls look alike."""
    own = {op.module_call for op in run if op.module_path == path}
    count = len(own)
    if count < 2 or len(run) % count:
        return [run]
    size = len(run) // count
    parts = [run[i : i + size] for i in range(0, len(run), size)]
    looks = {tuple((op.module_path, op.kind, op.target) for op in part) for part in parts}
    calls = [{op.module_call for op in part if op.module_path == path} for part in parts]
    return parts if len(looks) == 1 and all(len(each) == 1 for each in calls) else [run]
