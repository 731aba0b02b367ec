"""The imports of a generated file, and the safety check of its text.

Names of a model can hold anything, so the writer never uses them as code; here the result is
parsed and every node held against an allow-list, so that a mistake in the writer cannot become
an execution of text from a model, a profile or a plan.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from pdcompile.errors import SourceError
from pdcompile.ir.targets import resolve


@dataclass(slots=True)
class Imports:
    """Collects modules and classes while the bodies are written."""

    modules: set[str] = field(default_factory=set)  # math, operator
    functional: bool = False
    classes: dict[tuple[str, str], str] = field(default_factory=dict)  # (module, name) -> here
    opaque: set[str] = field(default_factory=set)  # classes of modules that run as they are

    def function(self, target: str) -> str:
        """The expression of a function target; raises SourceError unless it resolves."""
        resolve(target)
        if target.startswith("torch.nn.functional."):
            self.functional = True
            return f"F.{target.removeprefix('torch.nn.functional.')}"
        if target.startswith("torch."):
            return target
        if target.startswith(("math.", "operator.")):
            self.modules.add(target.partition(".")[0])
            return target
        return f"{self.cls(target.removesuffix('.apply'))}.apply"

    def cls(self, qualified: str) -> str:
        """The expression of a class of the user's, imported by its qualified name."""
        module, name = _split(qualified)
        outer, _, inner = name.partition(".")
        here = self.classes.get((module, outer))
        if here is None:
            used = set(self.classes.values())
            here, count = outer, 0
            while here in used or here in ("torch", "nn", "F", "math", "operator", "draw"):
                count += 1
                here = f"{outer}_{count}"
            self.classes[module, outer] = here
        return f"{here}.{inner}" if inner else here

    @property
    def names(self) -> set[str]:
        """Names that the imports bind."""
        return {"torch", "nn", *self.modules, *self.classes.values()} | (
            {"F"} if self.functional else set()
        )

    @property
    def needs(self) -> list[str]:
        """Qualified names of what does not come with torch."""
        return sorted({f"{module}.{name}" for module, name in self.classes} | self.opaque)

    def lines(self, *, torch_used: bool = True) -> list[str]:
        """Import statements, sorted: standard library, torch, the user's."""
        blocks = [
            [f"import {name}" for name in sorted(self.modules)],
            (["import torch"] if torch_used else [])
            + (["import torch.nn.functional as F"] if self.functional else [])
            + ["from torch import nn"],
            [
                f"from {module} import {name}" + (f" as {here}" if here != name else "")
                for (module, name), here in sorted(self.classes.items())
            ],
        ]
        return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


def _split(qualified: str) -> tuple[str, str]:
    """Module and qualified name within it.  Raises SourceError when it cannot be imported."""
    parts = qualified.split(".")
    if all(part.isidentifier() for part in parts):
        for cut in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:cut])
            if module in sys.modules and hasattr(sys.modules[module], parts[cut]):
                return module, ".".join(parts[cut:])
    raise SourceError(
        f"{qualified!r} cannot be imported by its name",
        remedy="define the class at the top level of an importable module",
    )


_NODES = (
    ast.Module, ast.Expr, ast.Constant, ast.Import, ast.ImportFrom, ast.alias, ast.ClassDef,
    ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.For,
    ast.If, ast.With, ast.withitem, ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Subscript,
    ast.Slice, ast.Tuple, ast.List, ast.Dict, ast.Starred, ast.BinOp, ast.UnaryOp, ast.Compare,
    ast.IfExp, ast.GeneratorExp, ast.DictComp, ast.comprehension, ast.expr_context, ast.operator,
    ast.unaryop, ast.cmpop,
)  # fmt: skip
_BUILTINS = frozenset(["super", "range", "str", "float", "complex", "slice", "getattr"])
_MODULES = frozenset({"torch", "nn", "F", "math", "operator"})
_METHODS = frozenset({"__init__", "forward", "loss", "draw"})
# What a stage writes itself, besides the targets of its ops.
_OWN = frozenset(
    {
        "torch.no_grad",
        "torch.enable_grad",
        "torch.autocast",
        "torch.device",
        "torch.get_default_device",
    }
    | {"torch.zeros", "torch.ones", "torch.randn", "nn.Parameter"}
)


def check(text: str, imports: Imports, targets: Iterable[str], where: str) -> None:
    """Raises SourceError unless the text of a stage is what the writer may have meant.

    Args:
        targets: function targets of the stage's ops, resolved already.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise SourceError(f"generated source does not parse: {error}", where=where) from error
    allowed = set(_OWN)
    for target in targets:
        allowed.add(target)
        allowed.add(target.replace("torch.nn.functional.", "F."))
    _Checker(tree, imports, allowed, where).walk()


class _Checker:
    def __init__(self, tree: ast.Module, imports: Imports, allowed: set[str], where: str) -> None:
        self.tree, self.imports, self.allowed, self.where = tree, imports, allowed, where
        self.classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        self.parents = {
            id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }
        self.bound = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        } | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}

    def walk(self) -> None:
        known = self.imports.names | _BUILTINS | self.classes | {"draw"}
        if clash := self.bound & known:
            self.refuse(self.tree, f"binds {sorted(clash)}")
        for node in ast.walk(self.tree):
            if not isinstance(node, _NODES):
                self.refuse(node, f"has a {type(node).__name__}")
            match node:
                case ast.Name(id=name) if name not in self.bound | known:
                    self.refuse(node, f"refers to {name!r}")
                case ast.Name(id=name) if name in _MODULES and not self.is_owner(node):
                    self.refuse(node, f"hands {name!r} around")
                case ast.Attribute():
                    self.attribute(node)
                case ast.FunctionDef(name=name):
                    if name not in _METHODS or node.decorator_list:
                        self.refuse(node, f"defines {name!r}")
                case ast.ClassDef():
                    if (
                        node.decorator_list
                        or node.keywords
                        or [*map(ast.unparse, node.bases)] != ["nn.Module"]
                    ):
                        self.refuse(node, f"defines the class {node.name!r}")
                case ast.Import() | ast.ImportFrom():
                    if ast.unparse(node) not in self.imports.lines():
                        self.refuse(node, f"has {ast.unparse(node)!r}")
                case _:
                    pass

    def attribute(self, node: ast.Attribute) -> None:
        if isinstance(self.parents.get(id(node)), ast.Attribute):
            return  # the outermost attribute of a chain stands for all
        chain = _chain(node)
        if chain is None:
            parts = [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)]
            if any(part.startswith("__") and part != "__init__" for part in parts):
                self.refuse(node, f"has {ast.unparse(node)!r}")
            return
        root = chain.partition(".")[0]
        if any(p.startswith("__") and p != "__init__" for p in chain.split(".")):
            self.refuse(node, f"has {chain!r}")
        if root in _MODULES and not self.is_known(chain):
            self.refuse(node, f"has {chain!r}")

    def is_owner(self, node: ast.Name) -> bool:
        return isinstance(self.parents.get(id(node)), ast.Attribute)

    def is_known(self, chain: str) -> bool:
        if chain in self.allowed:
            return True
        first, _, name = chain.partition(".")
        found = getattr({"torch": torch, "nn": nn}.get(first), name, None)
        if first == "nn":
            return isinstance(found, type) and issubclass(found, nn.Module)
        kinds = (torch.dtype, torch.layout, torch.memory_format)
        return first == "torch" and isinstance(found, kinds)

    def refuse(self, node: ast.AST, what: str) -> None:
        line = getattr(node, "lineno", 0)
        raise SourceError(
            f"generated source {what}, which no stage needs",
            where=f"{self.where}:{line}",
            remedy="this is a mistake in pdcompile: please report it with the model",
        )


def _chain(node: ast.expr) -> str | None:
    """``a.b.c`` for attributes of a plain name, None for attributes of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])
