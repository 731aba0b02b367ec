"""Plans made by hand: the ops of a capture, split at given positions."""

from __future__ import annotations

from collections.abc import Sequence

from pdcompile.cluster import Cluster
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.passes.stages.boundaries import edges, place_eval, stage_of_ops, tied
from pdcompile.passes.stages.held_tensors import all_tensors, held_tensors
from pdcompile.plan import Certificate, Plan, StagePlan, Training


def cut(capture: Capture, positions: Sequence[int], **training: object) -> Plan:
    """Stage k has the ops from positions[k-1] up to positions[k] of the train graph.

    Positions count the ops of the model's forward; those of the loss go to the last stage.
    A cut between a tuple and what is taken out of it moves behind that.
    """
    graph = capture.train
    positions = [_behind_tuples(graph, position) for position in positions]
    names = [op.name for op in graph.ops if op.region == "forward"]
    starts = [0, *positions]
    stops = [*positions, len(names)]
    groups = [names[start:stop] for start, stop in zip(starts, stops, strict=True)]
    groups[-1] += [op.name for op in graph.ops if op.region == "loss"]
    return plan_of(capture, groups, **training)


def _behind_tuples(graph: OpGraph, position: int) -> int:
    ops = [op for op in graph.ops if op.region == "forward"]
    made = {op.name for op in ops[:position] if not graph.values[op.name].is_tensor}
    readers = [i + 1 for i, op in enumerate(ops) if made.intersection(op.inputs)]
    return max([position, *readers])


def plan_of(capture: Capture, groups: Sequence[Sequence[str]], **training: object) -> Plan:
    """A plan whose stage k has the ops groups[k], one rank a stage, times all zero."""
    bare = [StagePlan(k, tuple(ops), (), ranks=(k,)) for k, ops in enumerate(groups)]
    plan = _plan(bare, **training)
    graph = capture.train
    stage_of = stage_of_ops(graph, plan)
    held = held_tensors(capture, plan, stage_of, place_eval(capture, stage_of))
    tensors = all_tensors(capture)
    stages = [
        StagePlan(
            k,
            tuple(ops),
            tuple(sorted(f for f in held[k] if tensors[f].kind == "parameter")),
            ranks=(k,),
        )
        for k, ops in enumerate(groups)
    ]
    return _plan(
        stages,
        edges=edges(graph, stage_of, len(groups), graph.batch_size),
        tied=tied(graph, stage_of),
        **training,
    )


def _plan(stages: Sequence[StagePlan], edges=(), tied=(), **training) -> Plan:  # type: ignore[no-untyped-def]
    return Plan(
        fingerprint="by hand",
        stages=tuple(stages),
        edges=tuple(edges),
        tied=tuple(tied),
        training=Training(**{"warmup": (0,) * len(stages), **training}),
        cluster=Cluster.local(len(stages)).to_toml(),
        certificate=Certificate(0.0, 0.0, "feasible", "relaxation", 0.0, "by hand"),
    )
