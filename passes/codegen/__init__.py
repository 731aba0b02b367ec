"""Stages as source: importable files that a person can read, edit and run."""

from __future__ import annotations

import inspect
from types import ModuleType

from pdcompile.ir.graph import Capture
from pdcompile.ir.records import PARTS, TURNS
from pdcompile.ir.stage_interface import Sources, module_of
from pdcompile.parts import conversions, turns
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
        files |= {f"{name}.py": _carried(module) for name, module in _CARRIED.items()}
    files["plan.json"] = plan.to_json()
    constants = {**capture.eval.tensor_values, **capture.train.tensor_values}
    return Sources(files, found, constants=constants, shards=capture.division.shards)


_CARRIED = {PARTS: conversions, TURNS: turns}


def _carried(module: ModuleType) -> str:
    """The text of one of our modules, for a folder in which it has another name."""
    text = inspect.getsource(module)
    for name, own in _CARRIED.items():
        text = text.replace(own.__name__, name)
    return text
