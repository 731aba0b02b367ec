"""Equal blocks become one class.

Two modules are equal when their forwards run the same ops on the same relative data flow with
the same literals, shapes and dtypes, in training and in evaluation, and when the same leaves,
blocks and tensors lie in them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdcompile.graph import (
    Affine,
    Attr,
    Capture,
    DictOf,
    ListOf,
    Op,
    OpGraph,
    Ref,
    Slice,
    walk,
)
from pdcompile.passes.codegen.pairs import same_arity
from pdcompile.passes.codegen.skeleton import Node
from pdcompile.passes.codegen.tree import Call, below, build, ops_of, relative
from pdcompile.passes.naming import scope_of


@dataclass(frozen=True, slots=True)
class Block:
    """One class to write: an example of its calls in each mode, and of its modules."""

    index: int
    path: str  # of the example
    train: Call | None
    eval: Call | None
    node: Node


@dataclass(slots=True)
class Layout:
    """How the code of a stage is divided: its root body and the classes that it uses."""

    train: Call
    eval: Call
    root: Node
    blocks: list[Block] = field(default_factory=list)  # inner ones first
    block_of: dict[str, int] = field(default_factory=dict)  # module path -> index
    partial: frozenset[str] = frozenset()  # modules of which other stages run a part


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
        root: the stage's modules; `Node.block` is filled in.
    """
    candidates, partial = _candidates(capture, train_ops, eval_ops)
    reach: dict[str, list[str]] = defaultdict(list)
    for name, fqn in names.items():
        reach[fqn].append(name)

    def reachable(fqn: str, path: str) -> bool:
        return any(below(name, path) for name in reach[fqn])

    while True:
        calls = tuple(
            build(ops, keep, candidates.__contains__, reachable)
            for ops, keep in zip((train_ops, eval_ops), wanted, strict=True)
        )
        layout = Layout(calls[0], calls[1], root, partial=partial)
        flat = _Classes(capture, names, layout).assign()
        if not flat:
            return layout
        candidates -= flat


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


def is_container(class_name: str) -> bool:
    """Whether the class only holds modules, so that a forward of its own says nothing."""
    return class_name in (
        "torch.nn.Sequential", "torch.nn.ModuleList", "torch.nn.ModuleDict",
        "torch.nn.ParameterList", "torch.nn.ParameterDict",
    )  # fmt: skip


def _ancestors(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


@dataclass(slots=True)
class _Classes:
    """Interns structures bottom up: equal keys, equal class."""

    capture: Capture
    names: Mapping[str, str]
    layout: Layout
    index_of: dict[Hashable, int] = field(default_factory=dict)

    def assign(self) -> set[str]:
        """Fill in the layout's blocks; returns the modules that have to stay flat instead."""
        modes = (
            (self.layout.train, self.capture.train),
            (self.layout.eval, self.capture.eval),
        )
        found: dict[str, tuple[list[Call], list[Call]]] = {}
        for side, (call, _) in enumerate(modes):
            for inner in _calls_below(call):
                found.setdefault(inner.path, ([], []))[side].append(inner)
        flat: set[str] = set()
        for path in sorted(found, key=lambda p: -p.count(".")):
            if any(below(path_, path) and path_ != path for path_ in flat):
                continue  # its structure changes in the next round
            keys = []
            for calls, (_, graph) in zip(found[path], modes, strict=True):
                distinct = {self._body_key(call, graph) for call in calls}
                if len(distinct) > 1 or not all(_self_contained(call, graph) for call in calls):
                    flat.add(path)
                keys.append(next(iter(distinct), None))
            train, evaluation = (next(iter(calls), None) for calls in found[path])
            if train is not None and evaluation is not None and not same_arity(train, evaluation):
                flat.add(path)
            node = self.layout.root.find(path)
            if path in flat or node is None:
                flat.add(path)
                continue
            self._intern(path, (*keys, self._node_key(node, path)), train, evaluation, node)
        return flat

    def _intern(
        self, path: str, key: Hashable, train: Call | None, evaluation: Call | None, node: Node
    ) -> None:
        index = self.index_of.get(key)
        if index is None:
            index = self.index_of[key] = len(self.layout.blocks)
            self.layout.blocks.append(Block(index, path, train, evaluation, node))
        self.layout.block_of[path] = index

    def _class_name(self, path: str) -> str:
        classes = self.capture.train.classes
        return classes.get(path, self.capture.eval.classes.get(path, ("", "")))[0]

    def _body_key(self, call: Call, graph: OpGraph) -> Hashable:
        number: dict[str, int] = {name: i for i, name in enumerate(call.inputs)}
        key: list[Hashable] = [self._class_name(call.path), len(call.inputs)]
        key.extend(_facts(graph, name) for name in call.inputs)
        for item in call.items:
            refs = tuple(number[name] for name in item.inputs)
            path = item.path if isinstance(item, Call) else item.module_path
            at = relative(path, call.path) if below(path, call.path) else path
            if isinstance(item, Call):
                shared = tuple(self._tensor(fqn, call) for fqn in item.tensors)
                key.append((at, self.layout.block_of.get(item.path), refs, shared))
            else:
                arguments = self._argument((item.args, item.kwargs), number, call)
                key.append(
                    (at, item.kind, item.target, item.variable, item.draw, item.grad_enabled,
                     item.autocast, arguments, _facts(graph, item.name))
                )  # fmt: skip
            for name in item.outputs:
                number[name] = len(number)
        key.append(tuple(number[name] for name in call.outputs))
        return tuple(key)

    def _argument(self, value: Any, number: Mapping[str, int], call: Call) -> Hashable:
        if isinstance(value, Ref):
            return ("value", number[value.name])
        if isinstance(value, Attr):
            return ("tensor", self._tensor(value.fqn, call))
        if isinstance(value, tuple):
            return tuple(self._argument(each, number, call) for each in value)
        if isinstance(value, ListOf | DictOf):
            return (type(value).__name__, self._argument(value.items, number, call))
        if isinstance(value, Slice):
            return ("slice", self._argument((value.start, value.stop, value.step), number, call))
        return (type(value).__name__, repr(value))  # True, 1 and 1.0 are not the same

    def _tensor(self, fqn: str, call: Call) -> Hashable:
        if fqn in call.tensors:
            return call.tensors.index(fqn)
        return relative(name_below(fqn, call.path, self.names), call.path)

    def _node_key(self, node: Node, path: str) -> Hashable:
        own = None if node.path == path else self.layout.block_of.get(node.path)
        if own is not None:
            return ("block", own)
        tensors = tuple(
            (name, info.kind, info.shape, info.dtype, info.requires_grad, info.persistent)
            for name, info in node.tensors.items()
        )
        leaf = node.leaf and (node.leaf.target, repr(node.leaf.constructor))
        children = tuple(
            (name, self._node_key(child, path)) for name, child in node.children.items()
        )
        return (leaf, node.frozen, node.dtype, tensors, children)


def name_below(fqn: str, path: str, names: Mapping[str, str]) -> str:
    """The name of a tensor that lies below the module at `path`; raises StopIteration if none."""
    if names.get(fqn) == fqn and below(fqn, path):
        return fqn
    return next(name for name, other in names.items() if other == fqn and below(name, path))


def _calls_below(call: Call) -> list[Call]:
    found = []
    for item in call.items:
        if isinstance(item, Call):
            found.append(item)
            found.extend(_calls_below(item))
    return found


def _facts(graph: OpGraph, name: str) -> Hashable:
    value = graph.values.get(name)
    return (value.shape, value.dtype) if value is not None else None


def _self_contained(call: Call, graph: OpGraph) -> bool:
    """Whether its own ops can learn batch size and device from its arguments, if they ask."""
    own = [item for item in call.items if isinstance(item, Op)]
    tells = any(
        isinstance(size, Affine)
        for name in call.inputs
        if name in graph.values
        for size in graph.values[name].shape
    )
    needs = any(walk((op.args, op.kwargs), Affine) for op in own)
    return (bool(call.inputs) or not ops_of(call)) and (tells or not needs)
