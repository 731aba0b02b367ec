"""Expressions that reach modules and tensors of a stage by their original names.

A name that is a plain attribute is written as one.  Any other (a number, a keyword, a quote, a
newline, something that nn.Module itself has) appears as a string literal only.
"""

from __future__ import annotations

import keyword

from torch import nn

from pdcompile.passes.codegen.expressions import quote
from pdcompile.passes.codegen.skeleton import Node

# Attributes of every module, and methods of ours: such a child is reached through its table.
TAKEN = frozenset(dir(nn.Module())) | {"loss", "draw"}


def is_plain(name: str) -> bool:
    """Whether ``self.<name>`` is the child or tensor of that name, and nothing else."""
    return (
        name.isascii()
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and not name.startswith("__")  # would be mangled inside a class
        and name not in TAKEN
        and len(name) <= 40  # a longer one could not be folded
    )


def reach(owner: str, name: str, table: str = "_modules") -> str:
    """The expression of a child (or, with table ``_parameters``, ``_buffers``, of a tensor)."""
    if is_plain(name):
        return f"{owner}.{name}"
    if name in TAKEN:
        return f"{owner}.{table}[{quote(name)}]"
    return f"getattr({owner}, {quote(name)})"


def child(owner: str, node: Node, name: str) -> str:
    """The expression of a child of `node`, where `owner` is the expression of `node`."""
    if node.is_indexed:
        return f"{owner}[{name}]" if node.is_list else f"{owner}[{quote(name)}]"
    return reach(owner, name)


def module(root: Node, base: str, path: str) -> str:
    """The expression of the module at `path` inside a method of the module at `base`."""
    node = root.find(base)
    expression = "self"
    rest = path[len(base) + 1 :] if base else path
    for part in rest.split(".") if path != base and rest else []:
        # Below a leaf (attention's out_proj) there are no nodes, only plain attributes.
        expression = child(expression, node, part) if node else reach(expression, part)
        node = node.children.get(part) if node else None
    return expression


def tensor(root: Node, base: str, name: str) -> str:
    """The expression of the tensor called `name` inside a method of the module at `base`."""
    owner, _, attribute = name.rpartition(".")
    node = root.find(owner)
    info = node.tensors.get(attribute) if node else None
    table = "_parameters" if info is None or info.kind == "parameter" else "_buffers"
    return reach(module(root, base, owner), attribute, table)
