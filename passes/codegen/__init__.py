"""Stages as source: importable files that a person can read, edit and run."""

from __future__ import annotations

from collections.abc import Mapping

from pdcompile.ir.graph import Capture, Op, OpGraph
from pdcompile.ir.stage_interface import Signature, Sources
from pdcompile.passes.codegen.folder import module_of, read, set_draw, stage_classes, write
from pdcompile.passes.codegen.header import Route
from pdcompile.passes.codegen.pipeline_file import pipeline_file
from pdcompile.passes.codegen.stage_file import ModeOps, stage_file
from pdcompile.passes.stages.boundaries import edges, interfaces, place_eval, stage_of_ops
from pdcompile.passes.stages.held_tensors import held_tensors, stage_names
from pdcompile.passes.stages.naming import wishes
from pdcompile.plan import Plan

__all__ = ["generate", "module_of", "read", "set_draw", "stage_classes", "write"]


def generate(capture: Capture, plan: Plan) -> Sources:
    """Generates one file a stage, one that runs them all, and the plan.

    Raises:
        PlanError: the plan does not fit the graph.
        SourceError: something cannot be written as source, or the result fails its safety check.
    """
    train_of = stage_of_ops(capture.train, plan)
    eval_of = place_eval(capture, train_of)
    held = held_tensors(capture, plan, train_of, eval_of)
    names = stage_names(capture, held, train_of, eval_of)
    found = interfaces(capture, plan)
    wished = wishes(capture.train), wishes(capture.eval)
    count = len(plan.stages)
    route = Route(
        count,
        {op.name: train_of[op.name] for op in capture.train.ops},
        {edge.value: edge.targets for edge in edges(capture.train, train_of, count, 1)},
    )

    def mode(
        graph: OpGraph,
        stage_of: Mapping[str, int],
        signature: Signature,
        wished: Mapping[str, tuple[str, bool]],
        k: int,
    ) -> ModeOps:
        regions: dict[str, list[Op]] = {"forward": [], "loss": []}
        for op in graph.ops:
            if stage_of[op.name] == k:
                regions[op.region].append(op)
        return ModeOps(graph, signature, regions["forward"], regions["loss"], wished)

    files = {}
    for interface in found:
        k = interface.index
        modes = (
            mode(capture.train, train_of, interface.train, wished[0], k),
            mode(capture.eval, eval_of, interface.eval, wished[1], k),
        )
        files[f"stage_{k}.py"] = stage_file(capture, interface, route, modes, names[k])
    files["pipeline.py"] = pipeline_file(capture, plan, found)
    files["plan.json"] = plan.to_json()
    constants = {**capture.eval.tensor_values, **capture.train.tensor_values}
    return Sources(files, found, constants=constants)
