"""check_plan(plan, graph, cluster): a plan held against the graph that it is for.

From the graph and the plan's own cut comes the plan that the compiler makes of that cut: what
differs there from the plan is named by its place.  The objective is computed again by the clock
that searches use.  So a plan that was edited by hand, or made for another model, is refused with
the first thing that is not so.  The problem and the bound that was proved of it are under the seal
of the plan's file (see `pdcompile.plan.seal`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

from pdcompile.cluster import Cluster, slowest
from pdcompile.eager.summation import disordered
from pdcompile.errors import PlanError, some
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen.spans import Groups, join_spans
from pdcompile.passes.stages.assemble import plan_of_cut
from pdcompile.plan import Plan
from pdcompile.plan.diff import CLOSE, differences, named, other_prints
from pdcompile.plan.embedded import Finding, assignment, plain
from pdcompile.plan.evaluate import Evaluation
from pdcompile.plan.times import PipelineTimes, times_of
from pdcompile.plan.validate import validate
from pdcompile.problem.deployment import stage_limits

AGAIN = "make the plan again for this model and cluster"
PRINTS = {  # parts of a fingerprint
    "model": "another graph, in which an argument of an op or a shape inside a stage is another",
    "costs": "other costs",
    "cluster": "another cluster",
}
DERIVED = ("parameters", "parameter_bytes", "trainable_bytes", "step_bytes", "update_seconds",
           "home_bytes", "forward_seconds", "backward_seconds")  # of a stage  # fmt: skip


def check_plan(plan: Plan, graph: OpGraph, cluster: Cluster) -> None:
    """Refuse a plan that is not what the graph and its own cut make.

    For a stream with replicas, and for half-duplex links under a flush, which only the simulator
    can time, the objective must lie between the closed form and what all work takes one after the
    other.  For a graph without costs the seconds of stages are taken as the plan gives them.
    Memory is left to the ledger of the schedule.

    Raises:
        PlanError: an op is missing or misplaced, a stage, an edge or a tied parameter is not what
            the graph makes, the certificate's objective cannot be reproduced, the plan's
            fingerprint is of another graph or cluster, or the plan tears apart what its problem
            keeps together.  `where` is the place in the plan.
    """
    validate(plan, "plan")
    # Ops of an outside loss are on the last stage, listed or not.
    of_loss = {op.name: len(plan.stages) - 1 for op in graph.ops if op.region == "loss"}
    stage_of = of_loss | plan.stage_of
    for path, message, remedy in chain(
        _misplaced(plan, graph, stage_of),
        _together(graph, stage_of),
        _summed(plan, graph, stage_of),
        _cut(plan, graph, stage_of, cluster),
        _objective(plan, graph, cluster),
        _kept(plan),
    ):
        raise PlanError(message, where=f"plan: {path}", remedy=remedy)


def _misplaced(plan: Plan, graph: OpGraph, stage_of: Mapping[str, int]) -> Iterator[Finding]:
    """Ops that are missing, unknown, or not in the order of the graph."""
    position = {op.name: i for i, op in enumerate(graph.ops)}
    last = len(plan.stages) - 1
    for s, stage in enumerate(plan.stages):
        path = f"stages[{s}].ops"
        for i, name in enumerate(stage.ops):
            if name not in position:
                yield f"{path}[{i}]", f"the graph has no op {name!r}", AGAIN
            elif graph.ops[position[name]].region == "loss" and s != last:
                yield f"{path}[{i}]", f"op {name!r} of the loss", f"move it to stage {last}"
        for i, (before, name) in enumerate(pairwise(stage.ops), 1):
            if position[before] > position[name]:
                remedy = "list the ops of a stage in the order of the graph"
                yield f"{path}[{i}]", f"op {name!r} comes before {before!r} in the graph", remedy
    for op in graph.ops:
        if op.name not in stage_of:
            message = f"op {op.name!r} ({op.source}) is on no stage"
            yield "stages", message, "add it to the ops of one stage"


def _together(graph: OpGraph, stage_of: Mapping[str, int]) -> Iterator[Finding]:
    """Ops on several stages that the planner never parts, and the reason."""
    groups = Groups(len(graph.ops) + 1)
    join_spans(graph, groups)
    for first, second, why in groups.joined:
        if max(first, second) == len(graph.ops):
            continue  # the output, of which `boundaries` sends parts to the last stage
        names = graph.ops[first].name, graph.ops[second].name
        stages = [stage_of[name] for name in names]
        if stages[0] != stages[1]:
            message = f"{names[0]!r} and {names[1]!r} are on stages {stages}, and have to be "
            message += f"on one: {why}"
            yield f"stages[{stages[1]}].ops", message, "put them on one stage, or plan again"


def _summed(plan: Plan, graph: OpGraph, stage_of: Mapping[str, int]) -> Iterator[Finding]:
    """Gradients are summed in eager's order; replicas sum in an order of their own anyway."""
    if any(stage.replicas > 1 for stage in plan.stages):
        return
    for first, second, what in disordered(graph, stage_of):
        message = (
            f"the gradient of {what!r} would be summed in another order than eager's: op "
            f"{first!r} on stage {stage_of[first]} reads it before op {second!r} on stage "
            f"{stage_of[second]}"
        )
        remedy = f"move {second!r} to stage {stage_of[first]} or later, or {first!r} to an earlier"
        yield f"stages[{stage_of[first]}].ops", message, remedy


def _cut(
    plan: Plan, graph: OpGraph, stage_of: Mapping[str, int], cluster: Cluster
) -> Iterator[Finding]:
    """Differences from the plan that the compiler makes of this cut."""
    made = plan_of_cut(graph, stage_of, plan.ranks, plan.training, cluster, rehearsed=False)
    derived, prints = [*DERIVED], made.fingerprint.split(".")
    if all(op.cost is None for op in graph.ops):
        derived, prints[1:2] = derived[:-2], plan.fingerprint.split(".")[1:2]
    stages = tuple(
        replace(given, **{name: getattr(own, name) for name in derived})
        for given, own in zip(plan.stages, made.stages, strict=True)
    )
    yield from _differences(plan.stages, stages, "stages")
    yield from _differences(plan.edges, made.edges, "edges")
    yield from _differences(plan.tied, made.tied, "tied")
    for part in other_prints(plan.fingerprint, ".".join(prints)):
        known = f"the plan was made for {PRINTS.get(part)}"
        unknown = f"{plan.fingerprint!r} is not a fingerprint"
        yield "fingerprint", known if part in PRINTS else unknown, AGAIN
    if Cluster.from_toml(plan.cluster, where="plan: cluster").to_toml() != made.cluster:
        yield "cluster", "the plan is for another cluster", AGAIN


def _differences(given: Any, made: Any, path: str) -> Iterator[Finding]:
    """Findings, each with the value of the plan, that of the graph, and the one to write."""
    for place, said, found in differences(given, made, path):
        name = place.rpartition(".")[2]
        if said is None and found is not None:
            yield place, f"{named(found, found)!r} is missing", AGAIN
        elif found is None and said is not None:
            message = f"{named(said, said)!r} is not among what the graph makes of this cut"
            yield place, message, f"remove it, or {AGAIN}"
        elif isinstance(said, tuple) and any(isinstance(one, str) for one in (*said, *found)):
            others = sorted(map(str, set(said) ^ set(found))) or ["the order"]
            yield place, f"{name} are not those of the graph: {some(others)}", AGAIN
        else:
            was, due = (list(one) if isinstance(one, tuple) else one for one in (said, found))
            message = f"{name} is {was!r}, and the graph makes it {due!r}"
            yield place, message, f"write {due!r}, or {AGAIN}"


def _objective(plan: Plan, graph: OpGraph, cluster: Cluster) -> Iterator[Finding]:
    claimed = plan.certificate.objective_seconds
    flush = plan.training.kind.drains
    # The planner counts a gradient for every value that has one; some never return over an edge.
    wide = [edge.value for edge in plan.edges if graph.values[edge.value].needs_gradient]
    narrow = [edge.value for edge in plan.edges if edge.gradient]
    levels = tuple(replace(level, full_duplex=True) for level in cluster.levels)
    free = replace(cluster, levels=levels) if flush else cluster  # at least, where they share links
    every = [times_of(plan, free, one) for one in [narrow, wide][narrow == wide :]]
    if plain(plan) and len(levels) > 1:  # a search for a cut knows links between neighbours alone
        near = stage_limits(free, range(len(plan.stages)))
        every.append(replace(every[-1], link=lambda a, b: slowest(near[min(a, b) : max(a, b)])))
    found = [_seconds_of(plan, times) for times in every]
    low, high = found[0] * (1 - CLOSE), max(found) * (1 + CLOSE)
    # Of these only the simulator knows how long they take, and a bound of any order is left.
    replicated = any(stage.replicas > 1 for stage in plan.stages)
    if replicated if not flush else not all(one.full_duplex for one in cluster.levels):
        m = plan.training.num_microbatches
        high = max(high, times_of(plan, free, wide).serial(m) * (m if flush else 1))
    own = f"write {found[0]!r}, status 'feasible' and bound_seconds 0.0: nobody has searched"
    shared = plan.num_ranks < sum(map(len, plan.ranks))
    if not low <= claimed <= high:
        message = f"objective_seconds is {claimed!r}, the stages take {found[0]!r}"
        yield "certificate.objective_seconds", message, own if shared else f"{AGAIN}, or {own}"


def _seconds_of(plan: Plan, times: PipelineTimes) -> float:
    """Seconds of a minibatch with a flush; without, those per microbatch, at least."""
    kind, m = plan.training.kind, plan.training.num_microbatches
    depths = plan.training.warmup or range(len(plan.stages) - 1, -1, -1)
    shares = [stage.deployment.share(m) for stage in plan.stages]
    in_flight = list(map(kind.in_flight, depths, shares))
    if plan.patterned:  # depths of which no replica has as many microbatches count too
        in_flight = [depth + 1 for depth in depths]
    if all(stage.replicas == 1 for stage in plan.stages):
        times = replace(times, clips=False)  # the planner leaves out what all straight plans take
    if not kind.drains:
        return times.period(in_flight, m)
    try:
        return times.makespan([n - 1 for n in in_flight], m)
    except ValueError as error:
        raise PlanError(str(error), where="plan: training.warmup", remedy=AGAIN) from None


def _kept(plan: Plan) -> Iterator[Finding]:
    """Items of the problem that the plan tears apart, and demands that it does not meet."""
    if plan.problem is None:
        return
    try:
        stage_of = assignment(plan)
    except PlanError as error:
        yield "stages", error.message, error.remedy or AGAIN
        return
    for message in Evaluation(plan.problem.without_memory_limits(), stage_of).violations():
        yield "stages", message, "move it back, or plan again"
