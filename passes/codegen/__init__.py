"""Stages as source: importable files that a person can read, edit and run."""

from __future__ import annotations

from pathlib import Path

from pdcompile.ir.graph import Capture
from pdcompile.ir.records import PARTS
from pdcompile.ir.stage_interface import Sources, module_of
from pdcompile.parts import conversions
from pdcompile.passes.codegen.folder import read, set_draw, stage_classes, write
from pdcompile.passes.codegen.pipeline_file import pipeline_file
from pdcompile.passes.codegen.stage_file import stage_file
from pdcompile.passes.stages.boundaries import staged
from pdcompile.plan import Plan

__all__ = ["generate", "module_of", "read", "set_draw", "stage_classes", "write"]


def generate(capture: Capture, plan: Plan) -> Sources:
    """Generates one file a stage, one that runs them all, and the plan.

    Raises:
        PlanError: the plan does not fit the graph.
        SourceError: something cannot be written as source, or the result fails its safety check.
    """
    on_stages = staged(capture, plan)
    found, parts = on_stages.interfaces, capture.division.parts
    whole = {k for k in range(len(found)) if plan.parts_of_stage(k) < plan.training.most_parts}
    files = {
        f"stage_{k}.py": stage_file(on_stages, k, 1 if k in whole else parts)
        for k in range(len(found))
    }
    files["pipeline.py"] = pipeline_file(capture, plan, found, parts)
    if parts > 1:
        files[f"{PARTS}.py"] = Path(conversions.__file__).read_text(encoding="utf-8")
    files["plan.json"] = plan.to_json()
    constants = {**capture.eval.tensor_values, **capture.train.tensor_values}
    return Sources(files, found, constants=constants, shards=capture.division.shards)
