"""Equal blocks become one class.

Two modules are equal when their forwards run the same ops on the same relative data flow with
the same literals, shapes and dtypes, in training and in evaluation, and when the same leaves,
blocks and tensors lie in them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence

from pdcompile.ir.graph import Capture, Op
from pdcompile.passes.codegen.interning import Classes
from pdcompile.passes.codegen.layout import Layout
from pdcompile.passes.codegen.skeleton import Node
from pdcompile.passes.codegen.tree import below, build, is_container
from pdcompile.passes.stages.naming import scope_of


def divide(
    capture: Capture,
    train_ops: Sequence[Op],
    eval_ops: Sequence[Op],
    wanted: tuple[Collection[str], Collection[str]],
    names: Mapping[str, str],
    root: Node,
) -> Layout:
    """Find the blocks of a stage; modules that cannot be one function each stay flat.

    Args:
        train_ops, eval_ops: this stage's ops of the model (not of the loss).
        wanted: values that the stage returns, in training and in evaluation.
        names: every tensor name on the stage, mapped to its canonical FQN.
        root: the stage's modules; `Node.block` and `Node.arguments` are filled in.
    """
    candidates, partial = _candidates(capture, train_ops, eval_ops)
    reach: dict[str, list[str]] = defaultdict(list)
    for name, fqn in names.items():
        reach[fqn].append(name)

    def reachable(fqn: str, path: str) -> bool:
        return any(below(name, path) for name in reach[fqn])

    apart: set[Hashable] = set()  # blocks that differ in too many numbers for one class
    while True:
        calls = tuple(
            build(ops, keep, candidates.__contains__, reachable)
            for ops, keep in zip((train_ops, eval_ops), wanted, strict=True)
        )
        layout = Layout(calls[0], calls[1], root, partial=partial)
        classes = Classes(capture, names, layout, apart)
        flat = classes.assign()
        candidates -= flat
        if not flat and classes.finish():
            return layout


def _candidates(
    capture: Capture, train_ops: Sequence[Op], eval_ops: Sequence[Op]
) -> tuple[set[str], frozenset[str]]:
    """Modules that are whole on this stage, in both modes, and no mere containers.

    Second those that are here in part.
    """
    whole: dict[str, int] = defaultdict(int)
    for graph, ops in ((capture.train, train_ops), (capture.eval, eval_ops)):
        for op in graph.ops:
            if op.region == "forward":
                for path in _ancestors(scope_of(op)):
                    whole[path] += 1
        for op in ops:
            for path in _ancestors(scope_of(op)):
                whole[path] -= 1
    classes = {**capture.eval.classes, **capture.train.classes}
    # What takes a leaf's result apart stands in the leaf's scope, and yet is no part of it.
    leaves = {op.module_path for op in (*train_ops, *eval_ops) if op.kind in ("module", "opaque")}
    here = {path for op in (*train_ops, *eval_ops) for path in _ancestors(scope_of(op))}
    return {
        path
        for path, missing in whole.items()
        if missing == 0 and path not in leaves and not is_container(classes.get(path, ("", ""))[0])
    }, frozenset(path for path in here if whole[path] > 0)


def _ancestors(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[: n + 1]) for n in range(len(parts))]
