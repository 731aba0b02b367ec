"""The classes of a stage: equal blocks become one class.

Two modules are equal when their forwards run the same ops on the same relative data flow with
the same literals and dtypes, in training and in evaluation, and when the same leaves, blocks and
tensors lie in them.  They may differ in a few numbers (`class_arguments`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdcompile.ir.graph import Affine, Attr, Capture, Op, OpGraph, Ref, rewritten, walk
from pdcompile.passes.codegen import class_arguments
from pdcompile.passes.codegen.block_calls import (
    BlockCall,
    CallTrees,
    calls_below,
    ops_of,
    relative,
    same_arity,
)
from pdcompile.passes.codegen.class_arguments import Change, Facts, Template
from pdcompile.passes.form.module_tree import Node, ancestors, skeleton
from pdcompile.passes.stages.held_tensors import all_tensors
from pdcompile.passes.stages.naming import below, is_container


@dataclass(frozen=True, slots=True)
class Block:
    """One class to write: an example of its calls in each mode, and of its modules."""

    index: int
    path: str  # of the example
    train: BlockCall | None
    eval: BlockCall | None
    node: Node
    arguments: tuple[str, ...] = ()  # of its constructor
    shapes: tuple[dict[str, tuple[Any, ...]], ...] = ({}, {})  # for comments, in each mode


@dataclass(slots=True)
class CodeLayout:
    """Division of a stage's code: its root body and the classes that it uses."""

    train: BlockCall
    eval: BlockCall
    root: Node
    classes: Mapping[str, tuple[str, str]]  # module path -> the model's class and its source
    blocks: list[Block] = field(default_factory=list)  # inner ones first
    block_of: dict[str, int] = field(default_factory=dict)  # module path -> index
    partial: frozenset[str] = frozenset()  # modules of which other stages run a part

    def members(self, block: Block) -> list[str]:
        """Paths of the modules that are instances of a class."""
        return [path for path, index in self.block_of.items() if index == block.index]


def name_below(fqn: str, path: str, names: Mapping[str, str]) -> str:
    """The name of a tensor that lies below the module at `path`; raises StopIteration if none."""
    if names.get(fqn) == fqn and below(fqn, path):
        return fqn
    return next(name for name, other in names.items() if other == fqn and below(name, path))


def divide(
    capture: Capture,
    ops: tuple[Sequence[Op], Sequence[Op]],
    wanted: tuple[Collection[str], Collection[str]],
    names: Mapping[str, str],
) -> CodeLayout:
    """Finds the blocks of a stage; modules that cannot be one function each stay flat.

    Args:
        ops: of this stage, in training and in evaluation; those of the loss are in no block.
        wanted: values that the stage returns, in training and in evaluation.
        names: every tensor name on the stage, mapped to its canonical FQN.
    """
    classes = {**capture.eval.classes, **capture.train.classes}
    root = skeleton(names, all_tensors(capture), [*ops[0], *ops[1]], classes)
    train, evaluation = ([op for op in each if op.region == "forward"] for each in ops)
    candidates, partial = _candidates(capture, train, evaluation, classes)
    reach: dict[str, list[str]] = defaultdict(list)
    for name, fqn in names.items():
        reach[fqn].append(name)

    def reachable(fqn: str, path: str) -> bool:
        return any(below(name, path) for name in reach[fqn])

    trees = CallTrees(candidates.__contains__, reachable)
    while True:
        calls = tuple(
            trees.call("", each, keep)
            for each, keep in zip((train, evaluation), wanted, strict=True)
        )
        layout = CodeLayout(calls[0], calls[1], root, classes, partial=partial)
        interned = Classes(capture, names, layout)
        flat = interned.assign()
        if not flat:
            interned.finish()
            return layout
        candidates -= flat


def _candidates(
    capture: Capture,
    train_ops: Sequence[Op],
    eval_ops: Sequence[Op],
    classes: Mapping[str, tuple[str, str]],
) -> tuple[set[str], frozenset[str]]:
    """Modules that lie wholly on this stage, in both modes, and do more than hold others.

    Second those that are here in part.
    """
    missing: dict[str, int] = defaultdict(int)  # ops that are on other stages
    for graph, ops in ((capture.train, train_ops), (capture.eval, eval_ops)):
        for op in graph.ops:
            if op.region == "forward":
                for path in ancestors(op.scope):
                    missing[path] += 1
        for op in ops:
            for path in ancestors(op.scope):
                missing[path] -= 1
    # What takes a leaf's result apart stands in the leaf's scope without being a part of it.
    leaves = {op.module_path for op in (*train_ops, *eval_ops) if op.kind in ("module", "opaque")}
    here = {path for op in (*train_ops, *eval_ops) for path in ancestors(op.scope)}
    return {
        path
        for path, count in missing.items()
        if count == 0 and path not in leaves and not is_container(classes.get(path, ("", ""))[0])
    }, frozenset(path for path in here if missing[path] > 0)


@dataclass(slots=True)
class Classes:
    """Interns structures bottom up: equal keys, equal class."""

    capture: Capture
    names: Mapping[str, str]
    layout: CodeLayout
    index_of: dict[Hashable, int] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)  # by path
    calls: dict[str, tuple[BlockCall | None, ...]] = field(default_factory=dict)

    def assign(self) -> set[str]:
        """Fills in the layout's blocks; returns the modules that have to stay flat instead."""
        for each in self.layout.root.walk():
            each.block, each.arguments = None, ()
        modes = (
            (self.layout.train, self.capture.train),
            (self.layout.eval, self.capture.eval),
        )
        found: dict[str, tuple[list[BlockCall], list[BlockCall]]] = {}
        for side, (call, _) in enumerate(modes):
            for inner in calls_below(call):
                found.setdefault(inner.path, ([], []))[side].append(inner)
        flat: set[str] = set()
        for path in sorted(found, key=lambda p: -p.count(".")):
            if any(below(path_, path) and path_ != path for path_ in flat):
                continue  # its structure changes in the next round
            node = self.layout.root.find(path)
            assert node is not None  # the tree has the scopes of all ops
            reader = Facts()
            keys: list[Hashable] = [self._read_node(node, path, reader)]
            for calls, (_, graph) in zip(found[path], modes, strict=True):
                read = [Facts() for _ in calls]
                distinct = {
                    (self._body_key(call, graph, one), tuple(map(repr, one.numbers)))
                    for call, one in zip(calls, read, strict=True)
                }
                if len(distinct) > 1 or not all(_self_contained(call, graph) for call in calls):
                    flat.add(path)
                keys.append(next(iter(distinct))[0] if distinct else None)
                if calls:
                    reader.numbers += read[0].numbers
                    reader.hints += read[0].hints
            train, evaluation = (next(iter(calls), None) for calls in found[path])
            if train is not None and evaluation is not None and not same_arity(train, evaluation):
                flat.add(path)
            if path not in flat:
                self.facts[path] = reader
                self.calls[path] = train, evaluation
                index = self.index_of.setdefault(tuple(keys), len(self.layout.blocks))
                if index == len(self.layout.blocks):
                    self.layout.blocks.append(Block(index, path, train, evaluation, node))
                self.layout.block_of[path] = node.block = index
        return flat

    def finish(self) -> None:
        """Makes arguments of the numbers in which instances differ."""
        found: list[Template] = []
        for block in self.layout.blocks:
            facts = [self.facts[path] for path in self.layout.members(block)]
            taken = (*block.node.children, *block.node.tensors)
            found.append(class_arguments.template(facts, taken))
        for path, index in self.layout.block_of.items():
            node = self.layout.root.find(path)
            assert node is not None
            node.arguments = found[index].arguments(self.facts[path].numbers)
        self.layout.blocks[:] = [self._general(block, found) for block in self.layout.blocks]

    def _general(self, block: Block, found: Sequence[Template]) -> Block:
        """The block with its arguments in the place of the example's numbers."""
        own = found[block.index]
        change = own.change()

        def inner(node: Node, put: Change) -> Node:
            assert node.block is not None
            numbers = [put(number, "") for number in self.facts[node.path].numbers]
            return replace(node, arguments=found[node.block].arguments(numbers))

        node = class_arguments.in_node(block.node, change, inner, block.path)
        train, evaluation = (
            class_arguments.in_call(call, change) for call in (block.train, block.eval)
        )
        members = self.layout.members(block)
        trains, evals = zip(*(self.calls[path] for path in members), strict=True)
        known, letters = dict(own.known), iter(class_arguments.LETTERS * 9)
        shapes = (
            class_arguments.shapes(trains, self.capture.train, known, letters),
            class_arguments.shapes(evals, self.capture.eval, known, letters),
        )
        return replace(
            block, node=node, train=train, eval=evaluation, arguments=own.names, shapes=shapes
        )

    def _body_key(self, call: BlockCall, graph: OpGraph, reader: Facts) -> Hashable:
        number: dict[str, int] = {name: i for i, name in enumerate(call.inputs)}
        class_name, _ = self.layout.classes.get(call.path, ("", ""))
        key: list[Hashable] = [class_name, len(call.inputs)]
        key.extend(_facts(graph, name) for name in call.inputs)
        for item in call.items:
            refs = tuple(number[name] for name in item.inputs)
            path = item.path if isinstance(item, BlockCall) else item.module_path
            at = relative(path, call.path) if below(path, call.path) else path
            if isinstance(item, BlockCall):
                shared = tuple(self._tensor(fqn, call) for fqn in item.tensors)
                key.append((at, self.layout.block_of.get(item.path), refs, shared))
            else:
                general = class_arguments.in_op(item, reader.read)
                arguments = self._argument((general.args, general.kwargs), number, call)
                key.append(
                    (at, item.kind, item.target, item.variable, item.draw, item.grad_enabled,
                     item.enables_grad,
                     item.autocast, arguments, _facts(graph, item.name))
                )  # fmt: skip
            for name in item.outputs:
                number[name] = len(number)
        key.append(tuple(number[name] for name in call.outputs))
        return tuple(key)

    def _argument(self, value: Any, number: Mapping[str, int], call: BlockCall) -> Hashable:
        def key(part: Any) -> Hashable:
            if isinstance(part, Ref):
                return ("value", number[part.name])
            if isinstance(part, Attr):
                return ("tensor", self._tensor(part.fqn, call))
            return (type(part).__name__, repr(part))  # True, 1 and 1.0 are not the same

        found: Hashable = rewritten(value, key)
        return found

    def _tensor(self, fqn: str, call: BlockCall) -> Hashable:
        if fqn in call.tensors:
            return call.tensors.index(fqn)
        return relative(name_below(fqn, call.path, self.names), call.path)

    def _read_node(self, node: Node, path: str, reader: Facts) -> Hashable:
        """The key of a module without its numbers, which the reader takes down."""

        def inner(child: Node, change: Change) -> Node:
            facts = self.facts[child.path]
            for number, hint in zip(facts.numbers, facts.hints, strict=True):
                change(number, hint.rpartition("/")[2])
            return child

        return _node_key(class_arguments.in_node(node, reader.read, inner, path), path)


def _node_key(node: Node, path: str) -> Hashable:
    if node.path != path and node.block is not None:
        return ("block", node.block)
    tensors = tuple(
        (name, info.kind, info.shape, info.dtype, info.requires_grad, info.persistent)
        for name, info in node.tensors.items()
    )
    leaf = node.leaf and (node.leaf.target, repr(node.leaf.constructor))
    children = tuple((name, _node_key(child, path)) for name, child in node.children.items())
    return (leaf, node.frozen, node.dtype, tensors, children)


def _facts(graph: OpGraph, name: str) -> Hashable:
    value = graph.values.get(name)
    if value is None:
        return None
    return tuple("n" if type(size) is int else str(size) for size in value.shape), value.dtype


def _self_contained(call: BlockCall, graph: OpGraph) -> bool:
    """True if its own ops can learn batch size and device from its arguments, if they ask."""
    own = [item for item in call.items if isinstance(item, Op)]
    tells = any(
        isinstance(size, Affine)
        for name in call.inputs
        if name in graph.values
        for size in graph.values[name].shape
    )
    needs = any(walk((op.args, op.kwargs), Affine) for op in own)
    return (bool(call.inputs) or not ops_of(call)) and (tells or not needs)
