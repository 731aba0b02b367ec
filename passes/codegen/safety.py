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
from pdcompile.ir.records import FROM_PARTS, PARTS
from pdcompile.ir.targets import resolve
from pdcompile.passes.stages.naming import unique


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
        if target in FROM_PARTS:
            return self.cls(target)
        return f"{self.cls(target.removesuffix('.apply'))}.apply"

    def cls(self, qualified: str) -> str:
        """The expression of a class of the user's, imported by its qualified name."""
        module, name = _split(qualified)
        outer, _, inner = name.partition(".")
        here = self.classes.get((module, outer))
        if here is None:
            here = self.classes[module, outer] = unique(outer, self.classes.values())
        return f"{here}.{inner}" if inner else here

    @property
    def names(self) -> set[str]:
        """Names that the imports bind."""
        return {"torch", "nn", *["F"] * self.functional, *self.modules, *self.classes.values()}

    @property
    def needs(self) -> list[str]:
        """Qualified names of what does not come with torch."""
        return sorted({".".join(one) for one in self.classes if one[0] != PARTS} | self.opaque)

    def lines(self, *, torch_used: bool = True) -> list[str]:
        """Import statements, sorted: standard library, torch, the user's."""
        own = [here for (module, _), here in self.classes.items() if module == PARTS]
        blocks = [
            [f"import {name}" for name in sorted(self.modules)],
            (["import torch"] if torch_used else [])
            + (["import torch.nn.functional as F"] if self.functional else [])
            + ["from torch import nn"],
            [
                f"from {module} import {name}" + (f" as {here}" if here != name else "")
                for (module, name), here in sorted(self.classes.items())
                if module != PARTS
            ],
            [f"from {PARTS} import {', '.join(sorted(own))}"] * bool(own),
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
_OWN = (
    "torch.no_grad", "torch.enable_grad", "torch.autocast", "torch.device",
    "torch.get_default_device", "torch.zeros", "torch.ones", "torch.randn", "nn.Parameter",
)  # fmt: skip


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
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    _Checker(imports, imports.names | _BUILTINS | classes | {"draw"}, allowed, where).walk(tree)


@dataclass(frozen=True, slots=True)
class _Checker:
    imports: Imports
    known: set[str]
    allowed: set[str]
    where: str

    def walk(self, tree: ast.Module) -> None:
        nodes = [*ast.walk(tree)]
        owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
        bound |= {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        if clash := bound & self.known:
            self.refuse(tree, f"binds {sorted(clash)}")
        for node in nodes:
            match node:
                case _ if not isinstance(node, _NODES):
                    self.refuse(node, f"has a {type(node).__name__}")
                case ast.Name(id=name) if name not in bound | self.known:
                    self.refuse(node, f"refers to {name!r}")
                case ast.Name(id=name) if name in _MODULES and id(node) not in owners:
                    self.refuse(node, f"hands {name!r} around")
                case ast.Attribute(attr=name) if name.startswith("__") and name != "__init__":
                    self.refuse(node, f"has {ast.unparse(node)!r}")
                # The outermost attribute of a chain stands for all.
                case ast.Attribute() if id(node) not in owners and not self.is_known(node):
                    self.refuse(node, f"has {ast.unparse(node)!r}")
                case ast.FunctionDef(name=name) if name not in _METHODS or node.decorator_list:
                    self.refuse(node, f"defines {name!r}")
                case ast.ClassDef(name=name, bases=bases):
                    own = [ast.unparse(base) for base in bases] == ["nn.Module"]
                    if node.decorator_list or node.keywords or not own:
                        self.refuse(node, f"defines the class {name!r}")
                case ast.Import() | ast.ImportFrom():
                    if ast.unparse(node) not in self.imports.lines():
                        self.refuse(node, f"has {ast.unparse(node)!r}")

    def is_known(self, node: ast.Attribute) -> bool:
        """True for what a stage may use of torch's modules, and for attributes of anything else."""
        chain = _chain(node) or ""
        first, _, name = chain.partition(".")
        if first not in _MODULES or chain in self.allowed:
            return True
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
