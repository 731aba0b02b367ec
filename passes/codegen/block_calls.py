"""The ops of a stage as calls of its blocks, in training and evaluation side by side.

A run of consecutive ops below one module is one call of that module, if the whole of the module
is on this stage.  Ops of a module that a cut goes through, or that cannot be one function, stay
in the caller's body ("flat").  Every grouping computes the same thing: a call takes what its ops
read from outside and returns what others read of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

from pdcompile.ir.graph import Attr, Op, Ref, rewritten
from pdcompile.ir.stage_interface import Port, StageInterface
from pdcompile.passes.form.module_tree import ancestors


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of the module at `path`, in one mode.

    inputs: values that it reads from outside, in order of first use.  tensors: FQNs of tensors
    of the model that lie outside of `path` (shared weights), handed in after the inputs.
    outputs: values that others read, in order of production.
    """

    path: str
    items: tuple[Item, ...]
    inputs: tuple[str, ...]
    tensors: tuple[str, ...]
    outputs: tuple[str, ...]


Item: TypeAlias = Op | BlockCall


def relative(path: str, ancestor: str) -> str:
    """`path` without the prefix `ancestor`."""
    return path if not ancestor else path[len(ancestor) + 1 :]


def tensors_of(item: Item) -> tuple[str, ...]:
    """FQNs of the model's tensors that are arguments of the item."""
    return item.attributes if isinstance(item, Op) else item.tensors


def ops_of(item: Item) -> list[Op]:
    """All ops below an item, in order."""
    return [item] if isinstance(item, Op) else [op for part in item.items for op in ops_of(part)]


def calls_below(call: BlockCall) -> Iterator[BlockCall]:
    """All calls inside a call, outer ones first."""
    for item in call.items:
        if isinstance(item, BlockCall):
            yield item
            yield from calls_below(item)


@dataclass(slots=True)
class CallTrees:
    """Builds the call trees of one stage's ops.

    `is_block`: whether the module at a path becomes a call (rather than flat); `reachable`: (fqn,
    path) whether the tensor has a name below the module at path.
    """

    is_block: Callable[[str], bool]
    reachable: Callable[[str, str], bool]

    def call(self, path: str, ops: Sequence[Op], wanted: Collection[str]) -> BlockCall:
        """The call of the module at a path ("": the stage), of ops in topological order, which
        returns the wanted values."""
        last_use = {name: i for i, op in enumerate(ops) for name in op.inputs}
        items: list[Item] = []
        start = 0
        for block, run in groupby(ops, key=lambda op: self.next_block(op.scope, path)):
            members = list(run)
            for part in [members] if block is None else _calls(members, block):
                start += len(part)
                if block is None:
                    items.extend(part)
                    continue
                needed = {
                    op.name for op in part
                    if op.name in wanted or last_use.get(op.name, -1) >= start
                }  # fmt: skip
                items.append(self.call(block, part, needed))
        made = {op.name for op in ops}
        read = [fqn for item in items for fqn in tensors_of(item)] if path else []
        return BlockCall(
            path=path,
            items=tuple(items),
            inputs=tuple(dict.fromkeys(n for item in items for n in item.inputs if n not in made)),
            tensors=tuple(dict.fromkeys(fqn for fqn in read if not self.reachable(fqn, path))),
            outputs=tuple(op.name for op in ops if op.name in wanted),
        )

    def next_block(self, scope: str, path: str) -> str | None:
        """The outermost block strictly below `path` that contains `scope`."""
        inside = ancestors(scope)[len(ancestors(path)) :]
        return next((at for at in inside if self.is_block(at)), None)


def _calls(run: list[Op], path: str) -> list[list[Op]]:
    """One list of ops for each call of the module, when consecutive calls look alike."""
    own = {op.module_call for op in run if op.module_path == path}
    count = len(own)
    if count < 2 or len(run) % count:
        return [run]
    size = len(run) // count
    parts = [run[i : i + size] for i in range(0, len(run), size)]
    looks = {tuple((op.module_path, op.kind, op.target) for op in part) for part in parts}
    calls = [{op.module_call for op in part if op.module_path == path} for part in parts]
    return parts if len(looks) == 1 and all(len(each) == 1 for each in calls) else [run]


@dataclass(frozen=True, slots=True)
class Pair:
    """An item of a body, with its twin in evaluation (None where a body is of one mode).

    A twin that is an op reads the values of training.
    """

    item: Item
    twin: Item | None = None


def pair(train: BlockCall, evaluation: BlockCall) -> tuple[Pair, ...] | None:
    """The items of both calls in pairs; None when they need two bodies.

    They agree when op for op kind, target, module, region and data flow are the same; literals
    may differ.
    """
    if len(train.items) != len(evaluation.items) or not same_arity(train, evaluation):
        return None
    if train.tensors != evaluation.tensors:
        return None
    match = dict(zip(evaluation.inputs, train.inputs, strict=True))
    found = []
    for item, twin in zip(train.items, evaluation.items, strict=True):
        if isinstance(item, Op) and isinstance(twin, Op):
            twin = _renamed(twin, match)
        if not _alike(item, twin, match):
            return None
        match.update(zip(twin.outputs, item.outputs, strict=True))
        found.append(Pair(item, twin))
    if tuple(match.get(name) for name in evaluation.outputs) != train.outputs:
        return None
    return tuple(found)


def same_arity(one: BlockCall, other: BlockCall) -> bool:
    """True if both take and return equally many values and tensors."""
    return (len(one.inputs), len(one.tensors), len(one.outputs)) == (
        len(other.inputs),
        len(other.tensors),
        len(other.outputs),
    )


def _alike(item: Item, twin: Item, match: dict[str, str]) -> bool:
    if isinstance(item, BlockCall) and isinstance(twin, BlockCall):
        return (
            item.path == twin.path
            and same_arity(item, twin)
            and item.tensors == twin.tensors
            and tuple(match.get(name) for name in twin.inputs) == item.inputs
        )
    if isinstance(item, Op) and isinstance(twin, Op):
        return _facts(item) == _facts(twin) and _flow(item) == _flow(twin)
    return False


def _facts(op: Op) -> tuple[Any, ...]:
    return (
        op.kind, op.target, op.module_path, op.draw, op.grad_enabled, op.enables_grad, op.autocast,
        op.region,
        repr(op.constructor), tuple(key for key, _ in op.kwargs),
    )  # fmt: skip


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    """The op on values of the other mode; "" stands for a value that is not there."""

    def rename(part: Any) -> Any:
        return Ref(names.get(part.name, "")) if isinstance(part, Ref) else part

    args, kwargs = rewritten((op.args, op.kwargs), rename)
    return replace(op, args=args, kwargs=kwargs)


def _flow(op: Op) -> Any:
    """The structure and the data flow of an op's arguments, without literals."""

    def flow(part: Any) -> Any:
        return part if isinstance(part, Ref | Attr) else None

    return rewritten((op.args, tuple(value for _, value in op.kwargs)), flow)


def wider_twins(
    train: Sequence[Op], evaluation: Sequence[Op], interface: StageInterface
) -> dict[str, str] | None:
    """Value of evaluation -> value of training, if evaluation returns more and may do so alike.

    Training of which only the loss is wanted (``outputs="none"``) leaves out results that it
    computes anyway: caches, logits, hidden states.  Blocks return them in both modes then, and
    the stage returns fewer of them in training.  None where both return the same, and where one
    mode has other ops or inputs.
    """
    ours, theirs = interface.train, interface.eval
    if len(train) != len(evaluation) or len(ours.inputs) != len(theirs.inputs):
        return None
    found = {b.value: a.value for a, b in zip(ours.inputs, theirs.inputs, strict=True)}
    found |= {b.name: a.name for a, b in zip(train, evaluation, strict=True)}
    returned = [found.get(port.value) for port in theirs.outputs]
    mine = [port.value for port in ours.outputs]
    if None in returned or mine == returned or not set(mine) < set(returned):
        return None
    return found


def wider_ports(ports: Sequence[Port], twin: dict[str, str]) -> tuple[Port, ...]:
    """The results of evaluation, as values of training."""
    return tuple(replace(port, value=twin[port.value]) for port in ports)
