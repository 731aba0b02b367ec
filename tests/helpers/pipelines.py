"""A pipeline cut by hand: everything that compile does, without costs and planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pdcompile.batch import FlatCall, resolve_batch
from pdcompile.cluster import Cluster
from pdcompile.compiled import Compiled
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.options import Options
from pdcompile.options.configuration import SENT, recomputation
from pdcompile.passes import codegen
from pdcompile.passes.check import check
from pdcompile.passes.schedules import warmup
from pdcompile.passes.stages import boundaries
from pdcompile.passes.stages.kept_outputs import planned
from pdcompile.plan import Certificate, Plan, StagePlan, Training
from pdcompile.problem import ANY_CUT
from pdcompile.runtime.pipeline import Pipeline
from tests.helpers.captures import capture_once
from tests.helpers.schedules import group


def by_hand(
    model: nn.Module,
    stages: int,
    inputs: Any,
    target: Any = None,
    *,
    ranks: tuple[int, ...] = (),
    replicas: int = 1,
    **given: Any,
) -> Pipeline:
    """Like compile(model, …), with the ops dealt out evenly over the stages; `ranks`: the place of
    each stage, of so many replicas."""
    options = Options.given({"stages": stages, **given})

    def build(model: nn.Module, flat: FlatCall, options: Options, _: int | None) -> Compiled:
        layout = resolve_batch(flat, options.batch_dims)
        assert isinstance(options.microbatches, int)
        size = -(-layout.size // options.microbatches)
        captured = capture_once(model, flat, layout, options.loss_fn, microbatch_size=size)
        plan = plan_by_hand(captured, stages, options, layout.size)
        if ranks:
            held = zip(plan.stages, ranks, strict=True)
            placed = (
                replace(stage, replicas=replicas, ranks=group(place, replicas))
                for stage, place in held
            )
            plan = replace(plan, stages=tuple(placed))
            counts = (replicas,) * stages
            depths = warmup(options.schedule, stages, options.microbatches, counts, 0, ranks)
            plan = replace(plan, training=replace(plan.training, warmup=depths))
        captured = boundaries.as_planned(captured, plan)
        sources = codegen.generate(captured, plan)
        eval_stages = boundaries.place_eval(captured, boundaries.stage_of_ops(captured.train, plan))
        eval_edges = boundaries.edges(captured.eval, eval_stages, stages, size)
        return Compiled(captured, plan, sources, eval_edges, layout, check(plan))

    return Pipeline(model, options, build, (inputs, target))


def plan_by_hand(captured: Capture, stages: int, options: Options, batch_size: int) -> Plan:
    """Ops dealt out evenly in their order, what may not be cut kept together."""
    keeps, sends = options.outputs != "none", options.outputs in SENT
    graph = planned(captured.train, Training(keeps_outputs=keeps, sends_outputs=sends))
    stage_of = _deal(graph, stages)
    assert isinstance(options.microbatches, int)
    held = boundaries.tied(graph, stage_of)
    training = Training(
        schedule=options.schedule,
        num_microbatches=options.microbatches,
        batch_size=batch_size,
        warmup=warmup(options.schedule, stages, options.microbatches),
        max_grad_norm=options.max_grad_norm,
        seed=options.seed,
        keeps_outputs=keeps,
        sends_outputs=sends,
    )
    edges = boundaries.edges(graph, stage_of, stages, -(-batch_size // options.microbatches))
    return Plan(
        fingerprint="by hand",
        stages=tuple(
            StagePlan(
                k,
                tuple(o.name for o in graph.ops if stage_of[o.name] == k and o.region != "loss"),
                tuple(
                    sorted({p for o in graph.ops if stage_of[o.name] == k for p in o.parameters})
                ),
                ranks=(k,),
                recompute=again,
            )
            for k, again in enumerate(recomputation(options, stages) or ())
        ),
        edges=edges,
        tied=held,
        training=training,
        cluster=Cluster.local(stages).to_toml(),
        certificate=Certificate(0.0, 0.0, "feasible", "by hand", 0.0, ANY_CUT),
    )


def _deal(graph: OpGraph, stages: int) -> dict[str, int]:
    forward = [op for op in graph.ops if op.region == "forward"]
    made = {op.name: op for op in graph.ops}
    stage_of: dict[str, int] = {}
    for n, op in enumerate(forward):
        stage = n * stages // len(forward)
        stage = max([stage, *(stage_of[name] for name in op.inputs if name in stage_of)])
        for name in op.inputs:  # a container is taken apart where it is made
            if name in made and not graph.values[name].is_tensor:
                stage = stage_of[name]
        stage_of[op.name] = stage
    return {op.name: stage_of.get(op.name, stages - 1) for op in graph.ops}


def states_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors differ in a bit, or are not in both."""
    names = ours.keys() | theirs.keys()
    return sorted(
        name
        for name in names
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    )
