"""The driver's way to a plan: costs, the search of what is open, and stages timed once.

Timing all stages takes a second, or four runs of each where those take longer.  By itself that is
done where op costs were measured here and it costs little beside what it saves: sums of op times
are some 10 % below what stages take, and not by the same share everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pdcompile.cluster import Cluster
from pdcompile.eager.meta import refuse_mostly_estimated
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Capture, OpGraph
from pdcompile.options import Options
from pdcompile.options.configuration import Configuration, search_space
from pdcompile.passes import codegen
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.costs.machines import relative
from pdcompile.passes.planning.branch_and_bound import best_plan
from pdcompile.passes.planning.optimizer_state import optimizer_memory
from pdcompile.passes.planning.refine import refine
from pdcompile.passes.profile.fitted_sizes import Sizes
from pdcompile.passes.profile.stage_times import MIN_RUNS, WARMUPS, StageTimes, measure_stages
from pdcompile.plan import Plan, Training
from pdcompile.plan import check as check_plan
from pdcompile.problem import PartitionProblem, StageLimits
from pdcompile.problem.space import SearchSpace
from pdcompile.steps import Steps

if TYPE_CHECKING:
    from torch import nn

    from pdcompile.batch import FlatCall
    from pdcompile.steps import Listener

ESTIMATED = "costs are estimated, not measured on this machine"
LITTLE_SECONDS = 5.0  # for timing the stages, and for solving again


def make_plan(
    model: nn.Module,
    captured: Capture,
    options: Options,
    chosen: Configuration,
    microbatch: Callable[[int], FlatCall],
    step: Steps,
) -> Plan:
    """Costs, a plan, and where that pays the same again with costs that timed stages mend.

    Args:
        microbatch: one of the example's, by its size.

    Raises:
        InfeasibleError: no plan fits (NotFoundError: none was found).
        ConfigError: the options ask for what the model or the minibatch does not allow.
    """
    if options.costs == "estimated":
        cluster = relative(chosen.cluster, captured.train, chosen.microbatch_size)
        chosen = replace(chosen, cluster=cluster)
    takes, assumed = optimizer_memory(options.optimizer)
    training = replace(chosen.training, optimizer_factor=takes.factor, step=takes.step)
    space = search_space(options, chosen, captured.train.sizes)
    counts = space.microbatches
    said = [assumed] if assumed else []
    sizes = Sizes(
        captured.train,
        model,
        [-(-training.batch_size // m) for m in counts],
        costs=options.costs,
        device_kind=chosen.cluster.devices[0].kind,
        progress=step.listener.part,
        say=said.append,
    )

    @cache
    def graph_at(m: int) -> OpGraph:
        return sizes.at(-(-training.batch_size // m))

    def costs() -> OpGraph:
        for m in counts:
            graph_at(m)
        return graph_at(counts[0])

    def planned(graph_at: Callable[[int], OpGraph], step: Steps) -> Plan:
        found = _planned(options, chosen.cluster, space, training, graph_at, step)
        return replace(found, notes=(*found.notes, *chosen.cluster.notes, *said))

    graph = step("costs", costs)
    if options.searches:
        plan = planned(graph_at, step)
        if options.refine is not True:
            return plan
        # of one schedule and size
        settled = replace(chosen, training=replace(plan.training, warmup=()))
        options = replace(options, schedule=plan.training.schedule, replicas=None)
        return make_plan(model, captured, options, settled, microbatch, step)
    if options.costs == "measured":
        refuse_mostly_estimated(graph, model)
    plan = planned(graph_at, step)
    reason = why_not(plan, options, model)
    if reason is not None:
        note = (f"stages not timed: {reason}; refine=True (--refine on) does it",) if reason else ()
        return replace(plan, notes=(*plan.notes, *note))

    def again(mended: OpGraph) -> Plan:
        return planned(lambda _: mended, Steps(folder=""))

    leaves = microbatch(chosen.microbatch_size).leaves
    return step(
        "refined",
        lambda: refined_plan(plan, graph, captured, model, leaves, again, step.listener),
    )


def _planned(
    options: Options,
    cluster: Cluster,
    space: SearchSpace,
    training: Training,
    graph_at: Callable[[int], OpGraph],
    step: Steps,
) -> Plan:
    """The best plan of the space, checked."""
    free = (StageLimits(),) * (space.stages or len(cluster.devices))

    @cache
    def problem_at(m: int) -> PartitionProblem:
        return coarsen(graph_at(m), free, num_microbatches=m, constraints=options.constraints)

    step("problem", lambda: problem_at(space.microbatches[0]))
    search = partial(
        best_plan, graph_at, problem_at, cluster, space, training,
        time_limit=options.time_limit, seed=options.seed, progress=step.listener.found,
    )  # fmt: skip
    plan = step("plan", lambda: search().plan)
    check_plan(plan, graph_at(plan.training.num_microbatches), cluster)
    return plan


def check_refine(options: Options) -> None:
    """Refuse refine=True where no stages would be timed, before anything is captured.

    Raises:
        ConfigError: costs are estimated, a plan is given, or the planner also decides replicas or
            microbatches.
    """
    if options.refine is not True:
        return
    if options.plan is not None or options.sources is not None:
        raise ConfigError(
            "refine would have no effect: it is an option of the search, and a plan is given",
            where="refine",
            remedy="leave refine out, or plan again with it",
        )
    if options.costs == "estimated":
        _impossible(options, ESTIMATED)
    if options.replicas is not None:
        raise ConfigError(
            "refine=True (--refine on) corrects the costs of one cut, but here the planner also "
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
