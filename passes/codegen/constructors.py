"""The constructors: how a stage and its blocks build their modules and tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from pdcompile.errors import SourceError
from pdcompile.ir.graph import Affine, TensorInfo
from pdcompile.passes.codegen.safety import Imports
from pdcompile.passes.codegen.source_text import Line
from pdcompile.passes.form.expressions import Scope, literal, quote
from pdcompile.passes.form.module_tree import (
    TAKEN,
    Node,
    child_expression,
    is_plain,
    reach,
    tensor_expression,
)


def _nowhere(name: object) -> str:
    raise SourceError(f"a constructor argument refers to {name!r}, which only forward knows")


_SCOPE = Scope(
    value=_nowhere,
    tensor=_nowhere,
    size=lambda size: _nowhere(Affine),
    device=lambda: _nowhere("device"),
    module=_nowhere,
    function=_nowhere,
    named=str,
)


@dataclass(frozen=True, slots=True)
class Constructors:
    """Writes ``__init__`` bodies; `class_names` are those of the blocks, by index."""

    class_names: list[str]
    imports: Imports

    def lines(self, node: Node, owner: str = "self") -> list[Line]:
        """Statements that fill the module `node`, whose expression is `owner`."""
        done = [_tensor(owner, name, info) for name, info in node.tensors.items()]
        for name, child in node.children.items():
            expression, finished = self._make(child)
            done.append(_put(owner, name, expression, "_modules"))
            if not finished:
                done += self._finish(child, reach(owner, name))
        return done

    def _make(self, node: Node) -> tuple[str, bool]:
        """The expression that builds a module, and whether nothing is left to be done."""
        if node.block is not None:
            given = ", ".join(literal(value, _SCOPE) for value in node.arguments)
            return f"{self.class_names[node.block]}({given})", True
        if node.leaf is not None:
            return self._leaf(node)
        if node.is_indexed:
            return self._container(node)
        return "nn.Module()", False

    def _finish(self, node: Node, owner: str) -> list[Line]:
        if node.leaf is not None:
            frozen = [reach(owner, name, "_parameters") for name in node.frozen]
            return [Line(f"{each}.requires_grad_(False)") for each in frozen]
        if not node.is_indexed:
            return self.lines(node, owner)
        done = []
        for name, child in node.children.items():
            if not self._make(child)[1]:
                done += self._finish(child, child_expression(owner, node, name))
        return done

    def _container(self, node: Node) -> tuple[str, bool]:
        made = [self._make(child) for child in node.children.values()]
        items = [expression for expression, _ in made]
        finished = all(done for _, done in made)
        elements = _elements([int(name) for name in node.children], items, in_list=node.is_list)
        return f"nn.Module{'List' if node.is_list else 'Dict'}({elements})", finished

    def _leaf(self, node: Node) -> tuple[str, bool]:
        assert node.leaf is not None
        target, given = node.leaf.target, dict(node.leaf.constructor)
        if node.leaf.opaque:
            self.imports.opaque.add(target)
            return f"OpaqueModule({quote(target)})", True
        name = target.rpartition(".")[2]
        cls = getattr(nn, name, None)
        found = isinstance(cls, type) and issubclass(cls, nn.Module)
        if not target.startswith("torch.nn.") or not found or cls is None:
            raise SourceError(f"{target!r} is not a module of torch.nn", where=node.path)
        text = f"nn.{name}({', '.join(_arguments(cls, given))})"
        if node.dtype is not None:
            text += f".to(torch.{node.dtype})"
        if node.frozen and set(node.frozen) >= set(node.parameters):
            return f"{text}.requires_grad_(False)", True
        return text, not node.frozen


def _tensor(owner: str, name: str, info: TensorInfo) -> Line:
    value = _initial(name, info)
    if info.kind == "parameter":
        grad = "" if info.requires_grad else ", requires_grad=False"
        return _put(owner, name, f"nn.Parameter({value}{grad})", "_parameters")
    persistent = info.persistent and info.kind == "buffer"
    return _put(owner, name, value, "_buffers", "" if persistent else ", persistent=False")


_REGISTER = {
    "_parameters": "register_parameter", "_buffers": "register_buffer", "_modules": "add_module",
}  # fmt: skip


def _put(owner: str, name: str, value: str, table: str, extra: str = "") -> Line:
    """The statement that gives a module a tensor or a child."""
    if name in TAKEN:
        return Line(f"{owner}.{table}[{quote(name)}] = {value}")
    if is_plain(name) and table != "_buffers":
        return Line(f"{owner}.{name} = {value}")
    return Line(f"{owner}.{_REGISTER[table]}({quote(name)}, {value}{extra})")


def ties(root: Node, names: Mapping[str, str]) -> list[Line]:
    """Statements that make all names of one tensor the same object.

    Names in opaque modules are left out: those bring their tensors with them.
    """
    first: dict[str, str] = {}
    done = []
    opaque = [node.path for node in root.walk() if node.leaf is not None and node.leaf.opaque]
    for name, fqn in names.items():
        if any(name.startswith(f"{path}.") for path in opaque):
            continue
        if fqn in first:
            target = tensor_expression(root, "", name, assigned=True)
            source = tensor_expression(root, "", first[fqn])
            done.append(Line(f"{target} = {source}", "tied"))
        else:
            first[fqn] = name
    return done


def _elements(numbers: Sequence[int], items: Sequence[str], *, in_list: bool) -> str:
    """A list or dict of numbered items, equal ones in a row as a comprehension, which stands
    without brackets where it is all."""
    rows = enumerate(zip(numbers, items, strict=True))
    grouped = groupby(rows, key=lambda row: (row[1][1], row[1][0] - row[0]))
    runs = [[row for _, row in run] for _, run in grouped]  # equal ones with consecutive numbers
    few = 2 if len(runs) > 1 else 1  # equal items in a row that are written out
    if len(runs) == 1 and len(items) > few and in_list:
        return f"{items[0]} for _ in range({len(items)})"
    parts = []
    for run in runs:
        (start, item), count = run[0], len(run)
        if count > few and in_list:
            parts.append(f"*({item} for _ in range({count}))")
        elif count > few:
            each = f"{{str(i): {item} for i in range({start}, {start + count})}}"
            if len(runs) == 1:
                return each
            parts.append(f"**{each}")
        elif in_list:
            parts += [item] * count
        else:
            parts += [f"{quote(str(i))}: {item}" for i in range(start, start + count)]
    return f"[{', '.join(parts)}]" if in_list else f"{{{', '.join(parts)}}}"


def _arguments(cls: type[nn.Module], given: Mapping[str, Any]) -> list[str]:
    """Constructor arguments: required ones by position, others by name unless the default."""
    done: list[str] = []
    positional = True
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    for parameter in parameters:
        if parameter.name not in given:
            positional = False
            continue
        value = given[parameter.name]
        text = literal(value, _SCOPE)
        required = parameter.default is inspect.Parameter.empty
        if not required and type(value) is type(parameter.default) and value == parameter.default:
            positional = False
            continue
        done.append(text if required and positional else f"{parameter.name}={text}")
        positional = positional and required
    known = {parameter.name for parameter in parameters}
    return done + [f"{k}={literal(v, _SCOPE)}" for k, v in given.items() if k not in known]


def _initial(name: str, info: TensorInfo) -> str:
    """An expression for the first contents: small random weights, ones for scales, else zeros."""
    shape = ", ".join(literal(size, _SCOPE) for size in info.shape) if info.shape else "()"
    dtype = "" if info.dtype == "float32" else f", dtype=torch.{info.dtype}"
    floating = info.dtype in ("float16", "bfloat16", "float32", "float64")
    if info.kind == "parameter" and floating:
        if len(info.shape) >= 2:
            return f"0.02 * torch.randn({shape}{dtype})"
        if name.rpartition("_")[2] in ("weight", "scale", "gamma"):
            return f"torch.ones({shape}{dtype})"
    return f"torch.zeros({shape}{dtype})"
