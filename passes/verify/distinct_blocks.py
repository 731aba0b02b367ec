"""Compares stages with eager block by block, for models too large for this machine or on meta.

A generated stage has one class for each distinct block.  Each of them is compared once with the
model's own module, forward and backward, on made-up inputs and weights; so a model of a hundred
equal layers needs the memory of one.  Everything outside of blocks is listed, not compared.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pdcompile.batch import BatchLayout, FlatCall, resize
from pdcompile.errors import PdcompileError, some
from pdcompile.ir.graph import Capture, Op, OpGraph
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.codegen.block_calls import BlockCall, below, calls_below, ops_of
from pdcompile.passes.codegen.block_classes import CodeLayout
from pdcompile.passes.codegen.folder import stage_classes
from pdcompile.passes.codegen.stage_file import layout_of
from pdcompile.passes.preserved_state import preserved_state
from pdcompile.passes.stages.boundaries import staged
from pdcompile.passes.stages.chain import tensors_by_name
from pdcompile.passes.stages.held_tensors import all_tensors
from pdcompile.passes.verify.module_calls import ModuleCall, module_calls
from pdcompile.passes.verify.one_block import BlockComparison, BlockTensors
from pdcompile.passes.verify.verification import Compared, Difference, Verification, mode_of
from pdcompile.plan import Plan
from pdcompile.units import format_bytes

COPIES = 4  # of a block's weights: the made-up ones, those that run, and gradients of two sides


@dataclass(slots=True)
class BlockUse:
    """A block class of the generated sources: where it is used, and one use to compare."""

    kind: str  # the model's class
    stage: int
    train: BlockCall | None
    eval: BlockCall | None
    paths: list[str] = field(default_factory=list)
    reason: str = ""  # why it was not compared

    @property
    def path(self) -> str:
        return self.paths[0]


def verify_blocks(
    capture: Capture,
    plan: Plan,
    sources: Sources,
    model: nn.Module,
    flat: FlatCall,
    layout: BatchLayout,
    loss_fn: Callable[..., Any] | None,
    *,
    budget: int,
) -> Verification:
    """Compares every distinct block of the stages with the model's own module.

    Args:
        flat, layout: a minibatch; shapes, and values where it has them.
        budget: bytes that one block may take, weights, their copies and gradients together.

    Raises TraceError and SourceError as capture and the loading of sources do.
    """
    on_stages = staged(capture, plan)
    layouts = [layout_of(on_stages, k)[0] for k in range(len(sources.interfaces))]
    found = _distinct(capture, sources, layouts)
    _leave_out_large(found, capture, budget)
    # Two samples are enough to tell, and large models come with large microbatches.
    size = min(capture.train.batch_size, max(capture.train.sizes.smallest, 2))
    call = resize(flat, layout, size)
    differences: list[Difference] = []
    rows: list[Compared] = []
    for graph in (capture.train, capture.eval):
        paths = [one.path for one in found if not one.reason]
        calls = module_calls(model, graph, call, layout, loss_fn, paths)
        done = list(_compared(found, calls, sources, model, graph, call, size, plan))
        differences += [one for more, _ in done for one in more]
        counts = [(row.outputs, row.gradients, row.buffers) for _, row in done]
        rows.append(
            Compared(mode_of(graph), 0, size, *map(sum, zip((0, 0, 0), *counts, strict=True)))
        )
    compared = [one for one in found if not one.reason]
    text = ", ".join(
        _count(kind, compared, capture) for kind in dict.fromkeys(one.kind for one in compared)
    )
    left = [*_left_out(found), *_outside(capture, layouts)]
    nothing = "" if compared else f"nothing could be compared ({'; '.join(left)})"
    return Verification(
        microbatch_size=size,
        outputs=sum(row.outputs for row in rows),
        gradients=sum(row.gradients for row in rows),
        buffers=sum(row.buffers for row in rows),
        exact=True,
        edited=sources.edited,
        differences=tuple(differences),
        unverified=nothing,
        blocks=text,
        left_out=tuple(left) if compared else (),
        rows=tuple(rows) if compared else (),
    )


def _leave_out_large(found: Sequence[BlockUse], capture: Capture, budget: int) -> None:
    sizes = {fqn: info.bytes for fqn, info in all_tensors(capture).items()}
    for one in found:
        weight = sum(size for fqn, size in sizes.items() if below(fqn, one.path))
        if COPIES * weight > budget:
            one.reason = f"{format_bytes(COPIES * weight)} is more than half of the free memory"


def _compared(
    found: Sequence[BlockUse],
    calls: Mapping[str, ModuleCall],
    sources: Sources,
    model: nn.Module,
    graph: OpGraph,
    call: FlatCall,
    size: int,
    plan: Plan,
) -> Iterator[tuple[list[Difference], Compared]]:
    """Compares every block in one mode; notes the reason where one cannot be compared."""
    owned = tensors_by_name(model, sources)
    for one in found:
        used = one.train if graph.training else one.eval
        if used is None or one.reason:
            continue
        if one.path not in calls:
            one.reason = "forward does not call it as a module"
            continue
        given = BlockTensors(graph, call.leaves, owned, size)
        interface = sources.interfaces[one.stage]
        with torch.device("meta"):
            stage = stage_classes(sources)[one.stage]()
        try:
            with preserved_state(model, graph.training):
                yield BlockComparison(
                    model, stage, interface, one.path, used, calls[one.path], given, plan
                ).run()
        except PdcompileError as error:
            one.reason = error.message


def _distinct(capture: Capture, sources: Sources, layouts: Sequence[CodeLayout]) -> list[BlockUse]:
    """One use of each distinct class text, in the order of the model.

    A block whose class the model has once gives way to repeated blocks inside it.
    """
    uses: list[tuple[Hashable, int, BlockCall | None, BlockCall | None]] = []
    counts: dict[Hashable, int] = {}
    for k, layout in enumerate(layouts):
        text = _texts(sources.files[f"stage_{k}.py"])
        evals = {call.path: call for call in calls_below(layout.eval)}
        trains = {call.path: call for call in calls_below(layout.train)}
        key_of = _keys(capture, sources, k, text)
        for path in (*trains, *(p for p in evals if p not in trains)):
            key = key_of(trains.get(path), evals.get(path))
            counts[key] = counts.get(key, 0) + 1
            uses.append((key, k, trains.get(path), evals.get(path)))
    repeated = {(k, _path(t, e)) for key, k, t, e in uses if counts[key] > 1}
    found: dict[Hashable, BlockUse] = {}
    taken: list[tuple[int, str]] = []
    for key, k, train, evaluation in sorted(uses, key=lambda use: _path(*use[2:]).count(".")):
        path = _path(train, evaluation)
        if any(at == k and below(path, outer) for at, outer in taken):
            continue
        inner = any(at == k and other != path and below(other, path) for at, other in repeated)
        kind = _class_of(capture, path)
        if inner and counts[key] == 1 and len(_of_class(capture, kind)) == 1:
            continue
        taken.append((k, path))
        found.setdefault(key, BlockUse(kind, k, train, evaluation)).paths.append(path)
    return list(found.values())


def _keys(
    capture: Capture, sources: Sources, k: int, text: dict[str, str]
) -> Callable[[BlockCall | None, BlockCall | None], Hashable]:
    with torch.device("meta"):
        stage = stage_classes(sources)[k]()

    def facts(call: BlockCall | None, training: bool) -> Hashable:
        if call is None:
            return None
        values = (capture.train if training else capture.eval).values
        return tuple((values[n].shape, values[n].dtype) for n in (*call.inputs, *call.outputs))

    def key_of(train: BlockCall | None, evaluation: BlockCall | None) -> Hashable:
        path = _path(train, evaluation)
        name = type(stage.get_submodule(path)).__name__
        return (
            text.get(name, name), _class_of(capture, path),
            facts(train, True), facts(evaluation, False),
        )  # fmt: skip

    return key_of


def _texts(source: str) -> dict[str, str]:
    """The code of each class of a stage's file, without its name, comments and documentation."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    found: dict[str, str] = {}
    for node in classes:  # inner ones come first
        body = [n for n in node.body if not isinstance(n, ast.Expr)]
        text = "\n".join(ast.dump(part) for part in body)
        for name, inner in found.items():
            text = text.replace(f"id='{name}'", f"id={hash(inner)}")
        found[node.name] = text
    return found


def _path(train: BlockCall | None, evaluation: BlockCall | None) -> str:
    call = train or evaluation
    assert call is not None
    return call.path


def _class_of(capture: Capture, path: str) -> str:
    classes = {**capture.eval.classes, **capture.train.classes}
    return classes.get(path, ("a module",))[0].rpartition(".")[2]


def _of_class(capture: Capture, kind: str) -> list[str]:
    """Paths of the modules of a class."""
    classes = {**capture.eval.classes, **capture.train.classes}
    return [path for path in classes if _class_of(capture, path) == kind]


def _count(kind: str, done: Sequence[BlockUse], capture: Capture) -> str:
    """'32 of 32 DecoderLayer as 1 distinct block'."""
    mine = [one for one in done if one.kind == kind]
    count = sum(len(one.paths) for one in mine)
    every = max(len(_of_class(capture, kind)), count)
    blocks = f"{len(mine)} distinct block{'s' if len(mine) > 1 else ''}"
    return f"{count} of {every} {kind} as {blocks}"


def _left_out(found: Sequence[BlockUse]) -> list[str]:
    return [
        f"{len(one.paths)} {one.kind} ({one.path}): {one.reason}" for one in found if one.reason
    ]


def _outside(capture: Capture, layouts: Sequence[CodeLayout]) -> list[str]:
    """Everything outside of blocks: modules cut between stages, single ops, the loss."""
    partial = sorted({path for layout in layouts for path in layout.partial if path})
    inside = {op.name for layout in layouts for c in calls_below(layout.train) for op in ops_of(c)}
    single: list[Op] = [op for op in capture.train.ops if op.name not in inside]
    plain = [op for op in single if op.region == "forward"]
    leaves = dict.fromkeys(op.module_path for op in plain if op.kind == "module")
    left = [f"{path} (cut between stages)" for path in partial if path.rpartition(".")[2].isdigit()]
    named = [path for path in leaves if not any(below(path, p) for p in partial if p in left)]
    if named:
        left.append(some(named, 4))
    others = len(plain) - sum(op.kind == "module" for op in plain)
    left += [f"{others} ops outside of blocks"] if others else []
    left += ["the loss"] if len(plain) < len(single) else []
    return [*left, "values that blocks hand to each other"]
