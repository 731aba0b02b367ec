"""Times of compiled stages: the forecast of a plan whose stages run through torch.compile.

A cut is chosen by costs of single ops, which no compiler has fused.  Once it is, its stages are
timed as they will run, and the forecast of a step is of these times, with the activations that
compiled code keeps for its backward.  Workspace is that of stages as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from pdcompile.eager.stage_compiler import Backend, name_of
from pdcompile.ir.graph import OpGraph
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.profile.stage_times import measure_stages
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan
from pdcompile.units import format_bytes, format_seconds


def with_compiled_times(
    graph: OpGraph, plan: Plan, sources: Sources, model: nn.Module, leaves: Mapping[str, Any],
    size: int, backend: Backend | None,
) -> Plan:  # fmt: skip
    """The plan with a forecast of compiled stages, timed on one microbatch of `size` samples, and a
    note that has both forecasts."""
    before, devices = plan.forecast, plan.machines.devices
    assert before is not None
    times = measure_stages(
        graph, plan, sources, model, leaves, microbatch_size=size, backend=backend
    )
    speeds = [min(devices[rank].speed for rank in ranks) for ranks in plan.ranks]
    stages = tuple(
        replace(
            stage,
            forward_seconds=one.forward_seconds / speed,
            backward_seconds=one.backward_seconds / speed,
            saved_bytes=one.saved_bytes,
            split_bytes=0,
        )
        for stage, one, speed in zip(plan.stages, times, speeds, strict=True)
    )
    found = simulate(replace(plan, stages=stages)).forecast
    kept = [format_bytes(sum(one.saved_bytes for one in each)) for each in (plan.stages, times)]
    took = ", ".join(f"{1e3 * one.seconds:.3g}" for one in times)
    note = (
        f"stages compiled by {name_of(backend)} measured: {took} ms; a step is forecast from them, "
        f"{format_seconds(found.step_seconds)} in place of {format_seconds(before.step_seconds)} "
        f"of stages as they are, and they keep {kept[1]} of activations a microbatch in place of "
        f"{kept[0]}; cut, timeline and workspace are of stages as they are"
    )
    return replace(plan, forecast=found, notes=(*plan.notes, note))
