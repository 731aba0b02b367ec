"""How long a stage's forward holds each value, apart from what autograd keeps.

A stage is written as its modules are: a module whose ops all lie on the stage is a function of
its own, whose variables die when it returns; those of modules that are cut lie in the stage's
own forward.  A variable that is bound again lets go of what it had; what goes straight into the
next expression has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from pdcompile.ir.graph import Op, OpGraph, TensorInfo
from pdcompile.passes.codegen import access
from pdcompile.passes.codegen.expressions import Scope, rough
from pdcompile.passes.codegen.inline import Inliner, may_draw
from pdcompile.passes.codegen.pairs import Pair
from pdcompile.passes.codegen.pieces import Piece
from pdcompile.passes.codegen.skeleton import Node, skeleton
from pdcompile.passes.stages.naming import wishes


@dataclass(frozen=True, slots=True)
class Written:
    """What the source of every stage of a graph has in common; made once a graph.

    `wished`: the name that each value gets, and whether it may be bound again; `calls`: how many
    ops run inside each module; `tensors`: parameters and buffers by every name.
    """

    wished: Mapping[str, tuple[str, bool]]
    calls: Mapping[str, int]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def of(cls, graph: OpGraph) -> Written:
        infos = graph.tensors.values()
        return cls(
            wishes(graph),
            Counter(path for op in graph.ops for path in _modules(op)),
            {name: info for info in infos for name in (info.fqn, *info.aliases)},
        )


def releases(written: Written, ops: Sequence[Op], kept: Collection[str]) -> list[list[str]]:
    """For each op the values that nobody holds any more once it has run.

    Args:
        written: of the graph that the ops belong to.
        ops: those of one stage, in order.
        kept: values that leave the stage; they are released nowhere.
    """
    scopes = _scopes(written, ops)
    ends = _ends(scopes)
    last = {name: i for i, op in enumerate(ops) for name in op.inputs}
    passed = _passed_on(written, ops, scopes, kept)
    bound: dict[tuple[str, int, str], list[int]] = {}  # scope, its end, variable -> ops
    place: list[tuple[str, int]] = []
    for i, op in enumerate(ops):
        where = _binding(scopes[i], ends[i], last.get(op.name, i))
        place.append(where)
        bound.setdefault((*where, op.variable or op.name), []).append(i)
    found: list[list[str]] = [[] for _ in ops]
    for i, op in enumerate(ops):
        if op.name in kept:
            continue
        used = last.get(op.name, i)
        if op.name in passed:
            found[used].append(op.name)
            continue
        again = bound[(*place[i], op.variable or op.name)]
        rebound = next((j for j in again if j > i and j >= used), len(ops))
        found[min(max(place[i][1], used), rebound)].append(op.name)
    return found


def _passed_on(
    written: Written, ops: Sequence[Op], scopes: Sequence[tuple[str, ...]], kept: Collection[str]
) -> set[str]:
    """Values without a name of the author's that the next op alone reads: no variable has them.

    Decided as the code generator decides it, from training alone.
    """
    scope_of = dict(zip((op.name for op in ops), scopes, strict=True))
    wished = written.wished
    root = _modules_of(written, ops)

    def place(piece: Piece) -> Hashable:
        return scope_of[_op(piece).name]

    def text(piece: Piece, inner: Mapping[str, str]) -> str:
        op = _op(piece)
        base = scope_of[op.name][0] if scope_of[op.name] else ""
        scope = Scope(
            value=lambda name: inner.get(name) or wished[name][0],
            tensor=lambda fqn: access.tensor(root, base, fqn),
            size=str,
            device=lambda: "value.device",
            module=lambda path: access.module(root, base, path),
            function=lambda target: "F." + target.rpartition(".")[2],
        )
        return rough(op, None, scope)

    return Inliner(wished, kept, place, text, may_draw).unnamed([Pair(op) for op in ops])


def _op(piece: Piece) -> Op:
    assert isinstance(piece, Pair)
    assert isinstance(piece.item, Op)
    return piece.item


def _modules_of(written: Written, ops: Sequence[Op]) -> Node:
    """The modules of the stage, in the order in which they run."""
    infos = written.tensors
    read = {op.name: (*op.attributes, *op.parameters, *op.buffers_read) for op in ops}
    order: dict[str, None] = {}
    for op in ops:
        paths = [op.module_path, *(name.rpartition(".")[0] for name in read[op.name])]
        order.update(dict.fromkeys(paths))
    names = {name: infos[name].fqn for found in read.values() for name in found}
    tensors = {info.fqn: info for info in infos.values()}
    return skeleton(names, tensors, ops, order)


def _scopes(written: Written, ops: Sequence[Op]) -> list[tuple[str, ...]]:
    """For each op the modules that it runs in and that are functions here, innermost first."""
    here = Counter(path for op in ops for path in _modules(op))
    return [tuple(path for path in _modules(op) if here[path] == written.calls[path]) for op in ops]


def _modules(op: Op) -> list[str]:
    """Paths of the modules whose forward calls the op, innermost first, the root left out."""
    path = op.module_path
    if op.kind in ("module", "opaque"):
        path = path.rpartition(".")[0]
    found = []
    while path:
        found.append(path)
        path = path.rpartition(".")[0]
    return found


def _ends(scopes: Sequence[tuple[str, ...]]) -> list[dict[str, int]]:
    """For each op and each of its scopes the last op of that call."""
    ends: list[dict[str, int]] = [{} for _ in scopes]
    for i in reversed(range(len(scopes))):
        after = ends[i + 1] if i + 1 < len(scopes) else {}
        ends[i] = {path: after.get(path, i) for path in scopes[i]}
        ends[i][""] = len(scopes) - 1
    return ends


def _binding(scopes: tuple[str, ...], ends: dict[str, int], used: int) -> tuple[str, int]:
    """The innermost scope that still runs when the value is used last, and its end."""
    for path in scopes:
        if used <= ends[path]:
            return path, ends[path]
    return "", ends[""]
