"""The modules of a stage: which exist, what each is, which tensors it declares, how it is reached.

Every module on the path of an op or of a tensor exists under its original name, so that
state_dict keys are the model's.  A name that is a plain attribute is written as one.  Any other
(a number, a keyword, a quote, a newline, something that nn.Module itself has) appears as a string
literal only.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pdcompile.ir.graph import Op, TensorInfo
from pdcompile.passes.form.expressions import quote

# Attributes of every module, and methods of ours: such a child is reached through its table.
TAKEN = frozenset(dir(nn.Module())) | {"loss", "draw"}


@dataclass(slots=True)
class Node:
    """One module.  A leaf is built by its op's constructor and declares nothing itself."""

    path: str
    children: dict[str, Node] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    leaf: Op | None = None
    parameters: tuple[str, ...] = ()  # names of a leaf's parameters
    frozen: tuple[str, ...] = ()  # a leaf's parameters that take no gradient
    dtype: str | None = None  # of a leaf's floating tensors, where its constructor does not say
    block: int | None = None  # index of the class of which it is an instance
    arguments: tuple[Any, ...] = ()  # what that class is constructed with
    needed: bool = False  # even if nothing lies in it and no class was made of it

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children.values():
            yield from child.walk()

    def find(self, path: str) -> Node | None:
        node: Node | None = self
        for part in path.split(".") if path else []:
            node = node.children.get(part) if node else None
        return node

    @property
    def is_indexed(self) -> bool:
        """Children are numbered and nothing else is in here: a list, if not a class of ours."""
        return (
            bool(self.children and self.path)
            and not self.tensors
            and self.block is None
            and all(name.isdecimal() and str(int(name)) == name for name in self.children)
        )

    @property
    def is_list(self) -> bool:
        """Children are numbered from 0 without a gap: nn.ModuleList can hold them."""
        return self.is_indexed and list(self.children) == [
            str(i) for i in range(len(self.children))
        ]


@functools.lru_cache(maxsize=1 << 16)
def ancestors(path: str) -> tuple[str, ...]:
    """Paths of the modules that lie on a path, the root left out, itself last."""
    parts = path.split(".") if path else []
    return tuple(".".join(parts[: n + 1]) for n in range(len(parts)))


def skeleton(
    names: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    ops: Iterable[Op],
    order: Iterable[str],
) -> Node:
    """The module tree of a stage.

    Args:
        names: every tensor name on the stage, mapped to its canonical FQN.
        tensors: by canonical FQN.
        ops: of both modes.
        order: module paths in the order of the model.
    """
    leaves: dict[str, Op] = {}
    paths: set[str] = set()
    running: set[str] = set()
    for op in ops:
        if op.region == "forward":
            running.add(op.scope)
        if op.kind in ("module", "opaque"):
            leaves.setdefault(op.module_path, op)
        elif op.draw is not None and op.region == "forward":
            paths.add(op.module_path)  # draw() is told which module draws
    inside: dict[str, dict[str, TensorInfo]] = {path: {} for path in leaves}
    declared: dict[str, dict[str, TensorInfo]] = {}
    for name, fqn in names.items():
        leaf = leaf_of(name, leaves)
        if leaf is not None:
            inside[leaf][name[len(leaf) + 1 :]] = tensors[fqn]
        else:
            owner, _, attribute = name.rpartition(".")
            declared.setdefault(owner, {})[attribute] = tensors[fqn]
    rank = {path: i for i, path in enumerate(order)}
    root = Node("")
    every = {*leaves, *paths, *declared, *running}
    for path in sorted(every, key=lambda p: (rank.get(p, len(rank)), p)):
        node = _grow(root, path)
        node.needed = path in paths
        node.tensors = declared.get(path, {})
        node.leaf = leaves.get(path)
        if node.leaf is not None:
            own = inside[path]
            node.parameters = tuple(n for n, info in own.items() if info.kind == "parameter")
            node.frozen = tuple(
                name
                for name, info in own.items()
                if info.kind == "parameter" and not info.requires_grad
                and info.dtype.startswith(("float", "bfloat", "complex"))
            )  # fmt: skip
            node.dtype = _dtype(node.leaf, own)
    return root


def prune(node: Node) -> None:
    """Removes modules that hold nothing and of which no class was made."""
    for name, child in list(node.children.items()):
        prune(child)
        empty = not (child.children or child.tensors or child.needed)
        if empty and child.leaf is None and child.block is None:
            del node.children[name]


def leaf_of(name: str, leaves: Container[str]) -> str | None:
    """The leaf module that a tensor's name lies in; None where it is in none of these."""
    return next((path for path in ancestors(name)[:-1] if path in leaves), None)


def _grow(root: Node, path: str) -> Node:
    node = root
    for at in ancestors(path):
        node = node.children.setdefault(at.rpartition(".")[2], Node(at))
    return node


def _dtype(leaf: Op, own: Mapping[str, TensorInfo]) -> str | None:
    if any(key == "dtype" for key, _ in leaf.constructor):
        return None
    found = {info.dtype for info in own.values() if info.dtype.startswith(("float", "bfloat"))}
    return found.pop() if len(found) == 1 and found != {"float32"} else None


def is_plain(name: str) -> bool:
    """True if ``self.<name>`` is the child or tensor of that name, and nothing else."""
    return (
        name.isascii()
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and not name.startswith("__")  # would be mangled inside a class
        and name not in TAKEN
        and len(name) <= 40  # a longer one could not be folded
    )


def reach(owner: str, name: str, table: str = "_modules", *, assigned: bool = False) -> str:
    """The expression of a child (or, with table ``_parameters``, ``_buffers``, of a tensor).

    `assigned`: of one that is there already and that a statement puts another into the place of.
    """
    if is_plain(name):
        return f"{owner}.{name}"
    if assigned or name in TAKEN:
        return f"{owner}.{table}[{quote(name)}]"
    return f"getattr({owner}, {quote(name)})"


def child_expression(owner: str, node: Node, name: str) -> str:
    """The expression of a child of `node`, where `owner` is the expression of `node`."""
    if node.is_indexed:
        return f"{owner}[{name}]" if node.is_list else f"{owner}[{quote(name)}]"
    return reach(owner, name)


def module_expression(root: Node, base: str, path: str) -> str:
    """The expression of the module at `path` inside a method of the module at `base`."""
    node = root.find(base)
    expression = "self"
    rest = path[len(base) + 1 :] if base else path
    for part in rest.split(".") if path != base and rest else []:
        # Below a leaf (attention's out_proj) there are no nodes, only plain attributes.
        expression = child_expression(expression, node, part) if node else reach(expression, part)
        node = node.children.get(part) if node else None
    return expression


def tensor_expression(root: Node, base: str, name: str, *, assigned: bool = False) -> str:
    """The expression of the tensor called `name` inside a method of the module at `base`."""
    owner, _, attribute = name.rpartition(".")
    node = root.find(owner)
    info = node.tensors.get(attribute) if node else None
    table = "_parameters" if info is None or info.kind == "parameter" else "_buffers"
    return reach(module_expression(root, base, owner), attribute, table, assigned=assigned)
