"""The driver's way to refined costs: whether planned stages are timed, and what a plan says of it.

Timing all stages takes a second, or four runs of each where those take longer.  By itself that is
done where op costs were measured here and it costs little beside what it saves: sums of op times
are some 10 % below what stages take, and not by the same share everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.options import Options
from pdcompile.passes import codegen
from pdcompile.passes.planning.refine import refine
from pdcompile.passes.profile.stage_times import MIN_RUNS, WARMUPS, StageTimes, measure_stages
from pdcompile.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from pdcompile.steps import Listener

ESTIMATED = "costs are estimated, not measured on this machine"
LITTLE_SECONDS = 5.0  # for timing the stages, and for solving again


def check_refine(options: Options, *, searching: bool) -> None:
    """Refuse refine=True where no stages would be timed, before anything is captured.

    Args:
        searching: the planner decides more than the cut.

    Raises:
        ConfigError: costs are estimated, a plan is given, or the planner also decides replicas or
            microbatches.
    """
    if options.refine is not True:
        return
    if options.plan is not None or options.sources is not None:
        raise ConfigError(
            "refine is for the search, and a plan is given: it would have no effect",
            where="refine",
            remedy="leave refine out, or plan again with it",
        )
    if options.costs == "estimated":
        _impossible(options, ESTIMATED)
    if searching:
        raise ConfigError(
            "refine=True (--refine on) mends the costs of one cut, and here the planner also "
            "decides replicas, schedule or microbatches",
            where="refine",
            remedy="leave refine out; then plan again with what was chosen, and refine that",
        )


def why_not(plan: Plan, options: Options, model: nn.Module) -> str | None:
    """Why the stages of a plan are not timed; "" where nobody would ask, None where they are.

    Raises:
        ConfigError: refine=True, and it is not possible.
    """
    if options.refine is False:
        return ""
    if options.costs == "estimated":
        return _impossible(options, ESTIMATED)
    if any(parameter.is_meta for parameter in model.parameters()):
        return _impossible(options, "the model's parameters have no memory (meta device)")
    if options.refine is True:
        return None
    if options.costs != "measured" or len(plan.stages) == 1:
        return ""
    runs = (WARMUPS + MIN_RUNS) * sum(s.forward_seconds + s.backward_seconds for s in plan.stages)
    for seconds, what in ((runs, "timing them"), (plan.certificate.seconds, "planning again")):
        if seconds > LITTLE_SECONDS:
            return f"{what} takes about {seconds:.0f} s"
    return None


def _impossible(options: Options, reason: str) -> str:
    if options.refine is True:
        raise ConfigError(
            f"refine=True (--refine on) times the planned stages on this machine, but {reason}",
            where="refine",
            remedy="leave refine out, or plan a model with memory and measured costs",
        )
    return ""


def refined_plan(
    plan: Plan,
    graph: OpGraph,
    captured: Capture,
    model: nn.Module,
    leaves: Mapping[str, Any],
    solve: Callable[[OpGraph], Plan],
    listener: Listener,
) -> Plan:
    """The plan after its stages were timed, with a note that says how far it was off.

    Args:
        graph: with the costs that the plan was made with.
        leaves: of one microbatch, by path.
        solve: makes the plan anew from other costs.
    """
    size = next(op.cost.microbatch_size for op in graph.ops if op.cost is not None)

    def measure(plan: Plan) -> tuple[StageTimes, ...]:
        sources = codegen.generate(captured, plan)
        return measure_stages(
            captured.train, plan, sources, model, leaves,
            microbatch_size=size, progress=listener.part,
        )  # fmt: skip

    found = refine(plan, graph, measure, solve)
    return replace(found.plan, notes=(*found.plan.notes, str(found)))
