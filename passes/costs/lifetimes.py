"""How long a stage's forward holds each value, apart from what autograd keeps.

A stage is written as its modules are: a module whose ops all lie on the stage is a function of
its own, whose variables die when it returns; those of modules that are cut lie in the stage's
own forward.  A variable that is bound again lets go of what it had; what goes straight into the
next expression has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from pdcompile.graph import Op, OpGraph, Ref, walk

INSIDE = 52  # columns of an expression that goes into another one, as the code generator has it


def releases(graph: OpGraph, ops: Sequence[Op], kept: Collection[str]) -> list[list[str]]:
    """For each op the values that nobody holds any more once it has run.

    Args:
        ops: those of one stage, in order.
        kept: values that leave the stage; they are released nowhere.
    """
    scopes = _scopes(graph, ops)
    ends = _ends(scopes)
    last = {name: i for i, op in enumerate(ops) for name in op.inputs}
    passed = _passed_on(ops, scopes)
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


def _passed_on(ops: Sequence[Op], scopes: Sequence[tuple[str, ...]]) -> set[str]:
    """Values without a name of the author's that the next op alone reads: no variable has them.

    Long expressions are statements, so how long they get in the source is estimated here, which
    the plan is too early to know.
    """
    readers = Counter(ref.name for op in ops for ref in walk((op.args, op.kwargs), Ref))
    columns: dict[str, int] = {}
    for (op, scope), (reader, other) in pairwise(zip(ops, scopes, strict=True)):
        drawn = op.draw is not None and op.kind != "module"  # seeded by a line before
        plain = not (op.variable or op.mutates or op.opaque or drawn)
        if plain and readers[op.name] == 1 and op.name in reader.inputs and scope == other:
            length = _columns(op, scope, columns)
            if length <= INSIDE:
                columns[op.name] = length
    return set(columns)


def _columns(op: Op, scope: tuple[str, ...], inner: Mapping[str, int]) -> int:
    """About how long the expression of an op is; `inner` are those that go into it."""
    head = len(op.target.rpartition(".")[2]) + len("F.()")
    if op.kind == "module":
        path = op.module_path[len(scope[0]) + 1 :] if scope else op.module_path
        numbers = sum(part.isdigit() for part in path.split("."))
        head = len("self.()") + len(path) + 3 * numbers  # h["3"] for h.3
    given = (*op.args, *(value for _, value in op.kwargs))
    arguments = [value for value in given if value is not None and value is not False]  # defaults
    return head + sum(
        inner.get(value.name, len(value.name)) if isinstance(value, Ref) else len(f"{value}, ")
        for value in arguments
    )


def _scopes(graph: OpGraph, ops: Sequence[Op]) -> list[tuple[str, ...]]:
    """For each op the modules that it runs in and that are functions here, innermost first."""
    here = {op.name for op in ops}
    cut: set[str] = set()
    for op in graph.ops:
        if op.name not in here:
            cut.update(_modules(op))
    return [tuple(path for path in _modules(op) if path not in cut) for op in ops]


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
