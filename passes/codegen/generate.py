"""From a capture and a plan to source: one file a stage, one that runs them all, the plan."""

from __future__ import annotations

from collections.abc import Mapping

from pdcompile.ir.graph import Capture, Op, OpGraph
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.codegen.header import Route
from pdcompile.passes.codegen.pipeline_file import pipeline_file
from pdcompile.passes.codegen.stage_file import StageOps, Wishes, stage_file
from pdcompile.passes.stages.boundaries import edges, interfaces, place_eval, stage_of_ops
from pdcompile.passes.stages.held_tensors import held_tensors, stage_names
from pdcompile.passes.stages.naming import wishes
from pdcompile.plan import Plan


def generate(capture: Capture, plan: Plan) -> Sources:
    """Source for every stage of the plan.

    Raises:
        PlanError: the plan does not fit the graph.
        SourceError: something has no form as source, or the result fails its safety check.
    """
    train_of = stage_of_ops(capture.train, plan)
    eval_of = place_eval(capture, train_of)
    held = held_tensors(capture, plan, train_of, eval_of)
    names = stage_names(capture, held, train_of, eval_of)
    found = interfaces(capture, plan)
    wished = Wishes(wishes(capture.train), wishes(capture.eval))
    train, evaluation = (
        _by_stage(graph, of, len(plan.stages))
        for graph, of in ((capture.train, train_of), (capture.eval, eval_of))
    )
    route = Route(
        len(plan.stages),
        {op.name: train_of[op.name] for op in capture.train.ops},
        {edge.value: edge.targets for edge in edges(capture.train, train_of, len(plan.stages), 1)},
    )
    files = {}
    for interface in found:
        k = interface.index
        ops = StageOps(
            [op for op in train[k] if op.region == "forward"],
            [op for op in evaluation[k] if op.region == "forward"],
            [op for op in train[k] if op.region == "loss"],
            [op for op in evaluation[k] if op.region == "loss"],
        )
        files[f"stage_{k}.py"] = stage_file(capture, interface, route, ops, names[k], wished)
    files["pipeline.py"] = pipeline_file(capture, plan, found)
    files["plan.json"] = plan.to_json()
    constants = {**capture.eval.tensor_values, **capture.train.tensor_values}
    return Sources(files, found, constants=constants)


def _by_stage(graph: OpGraph, stage_of: Mapping[str, int], num_stages: int) -> list[list[Op]]:
    found: list[list[Op]] = [[] for _ in range(num_stages)]
    for op in graph.ops:
        found[stage_of[op.name]].append(op)
    return found
