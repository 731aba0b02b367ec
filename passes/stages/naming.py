"""Names for a reader: Python identifiers for values, close to what the model's author wrote."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

from pdcompile.ir.graph import Argument, DictOf, LeftOut, ListOf, Op, OpGraph, Ref, Value
from pdcompile.ir.records import CONVERSIONS, FROM_PARTS

# What generated source refers to by these names; no variable may hide them.
RESERVED = frozenset(
    {"self", "torch", "nn", "F", "math", "operator", "draw", "super", "range", "float", "complex"}
    | {"slice", "getattr", "setattr", "str", "print", "len", "sum", "abs", "sorted", "tuple"}
)

# What an op's result is called, where the op's own name says little of it.
_WORDS = {
    "getitem": "part", "item": "number", "requires_grad_": "tracked", "truediv": "quotient",
    "floordiv": "quotient", "where": "chosen",
}  # fmt: skip

# Three letters that look like numbers (linters refuse them), and classes that a file defines.
_TAKEN = re.compile(r"[lOI]|Stage\d+|OpaqueModule")


def identifier(text: str, fallback: str = "value") -> str:
    """An ASCII identifier that looks like `text`; never a keyword, a dunder or over 40 long."""
    word = re.sub(r"[^0-9a-zA-Z_]+", "_", text).strip("_")[:40].strip("_")
    if not word or word[0].isdigit():
        word = f"{fallback}_{word}" if word else fallback
    if keyword.iskeyword(word) or keyword.issoftkeyword(word) or _TAKEN.fullmatch(word):
        return f"{word}_"
    return word


def unique(wish: str, taken: Iterable[str]) -> str:
    """`wish`, or the first of wish_1, wish_2, … that is neither taken nor reserved."""
    used = {*taken, *RESERVED}
    name, count = wish, 0
    while name in used:
        count += 1
        name = f"{wish}_{count}"
    return name


def below(path: str, ancestor: str) -> bool:
    """True if `path` is `ancestor` or lies in it ("" is the root)."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def is_container(class_name: str) -> bool:
    """True if the class only holds modules, so that a forward of its own says nothing."""
    return class_name in (
        "torch.nn.Sequential", "torch.nn.ModuleList", "torch.nn.ModuleDict",
        "torch.nn.ParameterList", "torch.nn.ParameterDict",
    )  # fmt: skip


def wishes(graph: OpGraph) -> dict[str, tuple[str, bool]]:
    """The name that a reader expects for every value, and whether it may be used again.

    The user's own variables come first and are rebound as in the model.  What the model returns
    under a key is called like the key.  What a module returns without naming it
    (``return x + self.mlp(x)``) keeps the name of the tensor that it updates: the first
    argument, when shape and dtype are the same, else it is called after the module.  Anything
    else is called after its op.  Such names are used only once.
    """
    found = {item.name: (identifier(item.path, "input"), True) for item in graph.inputs}
    escaping = _escaping(graph)
    keys = _keys(graph.output, "")
    for op in graph.ops:
        if op.variable.isidentifier():
            found[op.name] = (identifier(op.variable), True)
            continue
        if key := keys.get(op.name):
            found[op.name] = (identifier(key), False)
            continue
        first = next((arg for arg in op.args if isinstance(arg, Ref)), None)
        if first is not None and op.target in CONVERSIONS:
            # The same value in another layout: once it is read twice, the variable is bound again.
            name, rebinds = found[first.name]
            found[op.name] = name, rebinds and len(graph.values[op.name].consumers) > 1
            continue
        if (
            op.name in escaping
            and first is not None
            and found[first.name][1]
            and _alike(graph.values[op.name], graph.values[first.name])
        ):
            found[op.name] = found[first.name]
        elif op.name in escaping:
            name = op.scope.rpartition(".")[2]
            plain = name.isdigit() or not name
            found[op.name] = (_after_op(op) if plain else identifier(name, "module"), False)
        else:
            found[op.name] = (_after_op(op), False)
    used = {op.target.rpartition(".")[2] for op in graph.ops if op.target in FROM_PARTS}
    return {n: (f"{wish}_" if wish in used else wish, again) for n, (wish, again) in found.items()}


def _keys(output: Argument, key: str) -> dict[str, str]:
    """Value -> the innermost key under which it is in the output, if it is a name."""
    match output:
        case Ref(name) | LeftOut(name):
            return {name: key} if key else {}
        case DictOf(items):
            inner = [_keys(item, name if name.isidentifier() else key) for name, item in items]
        case tuple() | ListOf():
            parts = output.items if isinstance(output, ListOf) else output
            inner = [_keys(item, key) for item in parts]
        case _:
            return {}
    return {name: found for each in reversed(inner) for name, found in each.items()}


def _escaping(graph: OpGraph) -> set[str]:
    """Values that an op outside the maker's module (or the caller of the model) reads."""
    scopes = {op.name: _code_of(op, graph) for op in graph.ops}
    outside = {
        name
        for op in graph.ops
        for name in op.inputs
        if name in scopes and scopes[name] and not below(scopes[op.name], scopes[name])
    }
    consumed = {name for op in graph.ops for name in op.inputs}
    return outside | (set(scopes) - consumed)


def _alike(one: Value, other: Value) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _code_of(op: Op, graph: OpGraph) -> str:
    """FQN of the module whose own code calls the op: a ModuleList has none."""
    scope = op.scope
    while scope and is_container(graph.classes.get(scope, ("", ""))[0]):
        scope = scope.rpartition(".")[0]
    return scope


def _after_op(op: Op) -> str:
    if op.kind in ("module", "opaque"):
        name = op.module_path.rpartition(".")[2]
        if name.isdigit():
            return identifier(op.target.rpartition(".")[2].lower())
        return identifier(name, "module")
    word = op.target.rpartition(".")[2]
    if op.target.startswith("torch.ops."):
        word = op.target.split(".")[3]
    if word == "apply":
        word = op.target.split(".")[-2].lower()
    name = identifier(_WORDS.get(word, word))
    return f"{name}_" if hasattr(builtins, name) else name  # such as min: as PEP 8 has it
