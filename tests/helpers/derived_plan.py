"""The oracle of `check_plan`: a plan's claims, derived from the graph once more by other code.

What a plan says about the graph (ops, order, edges, tied parameters, seconds, bytes) is derived
here without the passes that make plans; what its problem says, in `derived_problem`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from pdcompile.cluster import Cluster
from pdcompile.eager.summation import disordered
from pdcompile.errors import PlanError
from pdcompile.ir.graph import Op, OpGraph, Ref, walk
from pdcompile.ir.records import OpCost
from pdcompile.passes.stages.assemble import sum_seconds
from pdcompile.plan.embedded import Finding
from pdcompile.plan.schema import Plan, StagePlan, ranks_of
from pdcompile.plan.times import times_of
from pdcompile.plan.validate import validate
from pdcompile.schedule.registry import kind_of
from tests.helpers import derived_problem
from tests.helpers.derived_problem import AGAIN

TOLERANCE = 1e-6  # relative, of recomputed seconds


def check_derived(plan: Plan, graph: OpGraph, cluster: Cluster) -> None:
    """Recompute objective and feasibility.

    The objective is recomputed from stages and edges, by the clock that searches use.  For a
    stream with replicas, and for half-duplex links under a flush, which only the simulator can
    time, it must lie between the closed form and what all work takes one after the other.  For a
    graph without costs the seconds of the stages are taken as the plan gives them.

    Raises:
        PlanError: names the first thing that is not so.
    """
    validate(plan, "plan")
    stage_of = _stage_of(plan, graph)
    for findings in (
        _order(graph, stage_of),
        _summed(plan, graph, stage_of),
        _together(graph, stage_of),
        _edges(plan, graph, stage_of),
        _tied(plan, graph, stage_of),
        _stages(plan, graph, stage_of, cluster),
        _memory(plan, graph, cluster),
        _objective(plan, graph, cluster),
        derived_problem.findings(plan, graph, cluster),
    ):
        for path, message, remedy in findings:
            raise PlanError(message, where=f"plan: {path}", remedy=remedy)


def _stage_of(plan: Plan, graph: OpGraph) -> dict[str, int]:
    """Stage of every op; ops of an outside loss are on the last stage, listed or not."""
    last = len(plan.stages) - 1
    ops = {op.name: op for op in graph.ops}
    position = {op.name: i for i, op in enumerate(graph.ops)}
    placed = {}
    for s, stage in enumerate(plan.stages):
        for i, name in enumerate(stage.ops):
            where = f"plan: stages[{s}].ops[{i}]"
            if name not in ops:
                raise PlanError(f"the graph has no op {name!r}", where=where, remedy=AGAIN)
            if ops[name].region == "loss" and s != last:
                remedy = f"move it to stage {last}"
                raise PlanError(f"op {name!r} of the loss", where=where, remedy=remedy)
            placed[name] = s
        _in_order(stage, s, position)
    for op in graph.ops:
        if op.region == "loss":
            placed.setdefault(op.name, last)
        if op.name not in placed:
            raise PlanError(
                f"op {op.name!r} ({op.source}) is on no stage",
                where="plan: stages",
                remedy="add it to the ops of one stage",
            )
    return placed


def _in_order(stage: StagePlan, s: int, position: Mapping[str, int]) -> None:
    for i, (before, name) in enumerate(pairwise(stage.ops), 1):
        if position[before] > position[name]:
            raise PlanError(
                f"op {name!r} comes before {before!r} in the graph",
                where=f"plan: stages[{s}].ops[{i}]",
                remedy="list the ops of a stage in the order of the graph",
            )


def _order(graph: OpGraph, stage_of: Mapping[str, int]) -> Iterator[Finding]:
    for op in graph.ops:
        for name in op.inputs:
            if stage_of.get(name, 0) > stage_of[op.name]:
                message = (
                    f"op {op.name!r} on stage {stage_of[op.name]} reads {name!r} of "
                    f"stage {stage_of[name]}"
                )
                remedy = f"move {op.name!r} to stage {stage_of[name]} or later"
                yield f"stages[{stage_of[op.name]}].ops", message, remedy


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


def _together(graph: OpGraph, stage_of: Mapping[str, int]) -> Iterator[Finding]:
    """Containers with those who take them apart; storages and buffers that are written."""
    groups: dict[str, set[str]] = defaultdict(set)
    written: set[int] = set()
    for op in graph.ops:
        for name in op.inputs:
            if not graph.values[name].is_tensor and name in stage_of:
                groups[f"container {name!r}"] |= {op.name, name}
        for name in op.mutates:
            groups[f"value {name!r}, which is written in place,"].add(op.name)
            if graph.values[name].storage >= 0:
                written.add(graph.values[name].storage)
        for fqn in op.buffers_written:
            groups[f"buffer {fqn!r}"].add(op.name)
    for op in graph.ops:
        for fqn in op.buffers_read:
            if f"buffer {fqn!r}" in groups:
                groups[f"buffer {fqn!r}"].add(op.name)
        for name in op.mutates:
            if name in stage_of:
                groups[f"value {name!r}, which is written in place,"].add(name)
    for what, names in groups.items():
        stages = sorted({stage_of[name] for name in names})
        if len(stages) > 1:
            message = f"{what} is used on stages {stages}, and has to stay on one"
            yield "stages", message, f"put {', '.join(sorted(names))} on one stage"


def _needed(graph: OpGraph, stage_of: Mapping[str, int], last: int) -> dict[str, set[int]]:
    """Later stages that read each op's value; the model's output is read on the last one."""
    readers: dict[str, set[int]] = {op.name: set() for op in graph.ops}
    for op in graph.ops:
        for name in op.inputs:
            if name in readers:
                readers[name].add(stage_of[op.name])
    for ref in walk(graph.output, Ref):
        if ref.name in readers:
            readers[ref.name].add(last)
    return {
        name: stages - {stage_of[name]}
        for name, stages in readers.items()
        if stages - {stage_of[name]}
    }


def _edges(plan: Plan, graph: OpGraph, stage_of: Mapping[str, int]) -> Iterator[Finding]:
    needed = _needed(graph, stage_of, len(plan.stages) - 1)
    b = _microbatch_size(graph)
    for i, edge in enumerate(plan.edges):
        path = f"edges[{i}]"
        if edge.value not in needed:
            yield path, f"value {edge.value!r} crosses no boundary", "remove the edge"
            continue
        targets = tuple(sorted(needed.pop(edge.value)))
        value = graph.values[edge.value]
        if edge.targets != targets:
            message = f"{edge.value!r} is read on stages {list(targets)}, not {list(edge.targets)}"
            yield f"{path}.targets", message, f"write {list(targets)}"
        if edge.bytes != value.bytes(b):
            message = f"{edge.value!r} has {value.bytes(b)} bytes, not {edge.bytes}"
            yield f"{path}.bytes", message, AGAIN
        shape = tuple(str(size) for size in value.shape)
        if value.is_tensor and (edge.shape, edge.dtype) != (shape, value.dtype):
            message = f"{edge.value!r} is {value.dtype} {list(shape)}, not {edge.dtype} "
            yield path, message + f"{list(edge.shape)}", AGAIN
        if edge.gradient and not value.needs_gradient:
            yield f"{path}.gradient", f"{edge.value!r} has no gradient", "write false"
        if value.needs_gradient and not edge.gradient and _returns(graph, edge.value, stage_of):
            message = f"the loss depends on {edge.value!r} through a later stage"
            yield f"{path}.gradient", message, "write true"
    for name in needed:
        message = f"{name!r} of stage {stage_of[name]} is read on {sorted(needed[name])}"
        yield "edges", message + ", and has no edge", AGAIN


def _returns(graph: OpGraph, name: str, stage_of: Mapping[str, int]) -> bool:
    readers = [op for op in graph.ops if name in op.inputs and stage_of[op.name] != stage_of[name]]
    return name == graph.loss or any(graph.values[op.name].needs_gradient for op in readers)


def _tied(plan: Plan, graph: OpGraph, stage_of: Mapping[str, int]) -> Iterator[Finding]:
    holders: dict[str, dict[tuple[str, int], list[int]]] = defaultdict(dict)
    for op in graph.ops:
        for fqn in dict.fromkeys((*op.parameters, *op.attributes)):
            info = graph.tensors[fqn]
            if info.kind == "parameter" and info.requires_grad:
                uses = holders[fqn].setdefault((op.module_path, op.module_call), [])
                uses.append(stage_of[op.name])
    expected = {
        fqn: stages
        for fqn, uses in holders.items()
        if len(stages := tuple(sorted(set(chain.from_iterable(uses.values()))))) > 1
    }
    for i, tied in enumerate(plan.tied):
        stages = expected.pop(tied.fqn, ())
        if tied.stages != stages:
            message = f"{tied.fqn!r} is used on stages {list(stages)}, not {list(tied.stages)}"
            yield f"tied[{i}].stages", message, AGAIN
        used = {(use.module, use.call): list(use.stages) for use in tied.uses}
        if stages and used and used != holders[tied.fqn]:
            yield f"tied[{i}].uses", f"{tied.fqn!r} is used by other ops, or elsewhere", AGAIN
        if tied.bytes != graph.tensors[tied.fqn].bytes:
            yield f"tied[{i}].bytes", f"{tied.fqn!r} has other bytes", AGAIN
    for fqn, stages in expected.items():
        message = f"{fqn!r} is used on stages {list(stages)} and is not listed"
        yield "tied", message, "list it: its gradients have to be summed"


def _stages(
    plan: Plan, graph: OpGraph, stage_of: Mapping[str, int], cluster: Cluster
) -> Iterator[Finding]:
    ranks = ranks_of(plan.stages)
    costed = any(op.cost is not None for op in graph.ops)
    placed: list[list[Op]] = [[] for _ in plan.stages]
    for op in graph.ops:
        placed[stage_of[op.name]].append(op)
    for s, (stage, ops) in enumerate(zip(plan.stages, placed, strict=True)):
        speed = min(cluster.devices[rank].speed for rank in ranks[s])
        for name, found in zip(("forward_seconds", "backward_seconds"), _seconds(ops), strict=True):
            if costed and not math.isclose(
                getattr(stage, name), found / speed, rel_tol=TOLERANCE, abs_tol=1e-300
            ):
                message = f"{name} is {getattr(stage, name)!r}, its ops take {found / speed!r}"
                yield f"stages[{s}].{name}", message, AGAIN
        used = {fqn for op in ops for fqn in (*op.parameters, *op.attributes)}
        missing = sorted(fqn for fqn in used if graph.tensors[fqn].kind == "parameter")
        if tuple(missing) != stage.parameters:
            strange = sorted(set(missing) ^ set(stage.parameters))
            message = f"parameters are not those of its ops: {', '.join(strange[:4])}"
            yield f"stages[{s}].parameters", message, AGAIN
        trainable = sum(
            graph.tensors[fqn].bytes for fqn in missing if graph.tensors[fqn].requires_grad
        )
        if stage.trainable_bytes != trainable:
            message = f"trainable_bytes is {stage.trainable_bytes}, its parameters have {trainable}"
            yield f"stages[{s}].trainable_bytes", message, AGAIN
        copied = {tied.fqn for tied in plan.tied if s in tied.stages[1:]}
        sizes = [
            info.bytes
            for fqn, info in graph.tensors.items()
            if fqn in stage.parameters and info.requires_grad and fqn not in copied
        ]
        if stage.step_bytes != (expected := plan.training.step_bytes(sizes)):
            message = f"step_bytes is {stage.step_bytes}, a step on its parameters needs {expected}"
            yield f"stages[{s}].step_bytes", message, AGAIN
        versions = kind_of(plan.training.schedule).stream
        update = plan.training.update_seconds(sum(sizes), versions=versions) / speed
        summed = graph.summed.intersection(stage.parameters) - copied
        update += sum_seconds(graph, summed, cluster.parts)
        if not math.isclose(stage.update_seconds, update, rel_tol=TOLERANCE, abs_tol=1e-300):
            message = f"update_seconds is {stage.update_seconds!r}, its weights need {update!r}"
            yield f"stages[{s}].update_seconds", message, AGAIN


def _memory(plan: Plan, graph: OpGraph, cluster: Cluster) -> Iterator[Finding]:
    """The closed formula, with what the plan says that a stage saves and with what its ops do.

    Beside a rank's other stages: what stages hold for microbatches is not at its most in all of
    them at once, so of the others only what they hold always counts.
    """
    costs, ranks = {op.name: op.cost for op in graph.ops}, ranks_of(plan.stages)
    holding = [_holding(plan, s, costs) for s in range(len(plan.stages))]
    on_rank: Counter[int] = Counter()
    for s, (always, _) in enumerate(holding):
        on_rank.update(dict.fromkeys(ranks[s], always))
    for s, (always, most) in enumerate(holding):
        limits = [cluster.devices[rank].memory_bytes for rank in ranks[s]]
        limit = min((one for one in limits if one is not None), default=None)
        if limit is None:
            continue
        needed = always + most
        others = max(on_rank[rank] for rank in ranks[s]) - always
        if needed + others > limit:
            message = f"stage {s} needs {needed} bytes of memory, its device has {limit - others}"
            message += " left beside its other stages" if others else ""
            remedy = "move ops away, raise memory, or use more stages"
            yield f"stages[{s}]", message, remedy


def _holding(plan: Plan, s: int, costs: Mapping[str, OpCost | None]) -> tuple[int, int]:
    """Bytes of a rank of the stage: what it holds always, and at most for microbatches."""
    stage, training, warmup = plan.stages[s], plan.training, _warmup(plan)
    kind = kind_of(training.schedule)
    known = [cost for name in stage.ops if (cost := costs[name]) is not None]
    added = sum(cost.saved_bytes for cost in known)
    largest = max((cost.workspace_bytes for cost in known), default=0)
    received = sum(edge.bytes for edge in plan.edges if s in edge.targets)
    share = -(-training.num_microbatches // stage.replicas)
    count = kind.in_flight(kind.depth_held(warmup[s], warmup[0]), share)
    sets = 1 if stage.recompute else count
    owned = stage.trainable_bytes - sum(tied.bytes for tied in plan.tied if s in tied.stages[1:])
    first = stage.first_workspace_bytes or owned + stage.workspace_bytes
    always = (
        stage.parameter_bytes
        + stage.trainable_bytes * (kind.versions(warmup[s], warmup[0]) - 1)
        + math.floor(owned * training.optimizer_factor)
    )
    kept = sets * (stage.saved_bytes - stage.loose_bytes)
    most = max(kept + first - stage.freed_bytes, sets * added + owned + largest)
    return always, count * received + most


def _objective(plan: Plan, graph: OpGraph, cluster: Cluster) -> Iterator[Finding]:
    claimed = plan.certificate.objective_seconds
    flush = not kind_of(plan.training.schedule).stream
    # The planner counts a gradient for every value that has one; some never return over an edge.
    wide = [edge.value for edge in plan.edges if graph.values[edge.value].needs_gradient]
    narrow = [edge.value for edge in plan.edges if edge.gradient]
    found = [_seconds_of(plan, cluster, narrow)]
    found.append(found[0] if narrow == wide else _seconds_of(plan, cluster, wide))
    low, high = found[0] * (1 - TOLERANCE), found[1] * (1 + TOLERANCE)
    # Of these only the simulator knows how long they take, and a bound of any order is left.
    if _replicated(plan) if not flush else not all(one.full_duplex for one in cluster.levels):
        m = plan.training.num_microbatches
        high = max(high, times_of(plan, cluster, wide).serial(m) * (m if flush else 1))
    own = f"write {found[0]!r}, status 'feasible' and bound_seconds 0.0: nobody has searched"
    shared = len(set(ranks_of(plan.stages))) < len(plan.stages)
    if not low <= claimed <= high:
        message = f"objective_seconds is {claimed!r}, the stages take {found[0]!r}"
        yield "certificate.objective_seconds", message, own if shared else f"{AGAIN}, or {own}"


def _seconds_of(plan: Plan, cluster: Cluster, returning: list[str]) -> float:
    """Seconds of a minibatch with a flush; without, those per microbatch, at least."""
    m, in_flight = plan.training.num_microbatches, _in_flight(plan)
    stream = kind_of(plan.training.schedule).stream
    if not stream:  # at least, where directions share a link
        free = tuple(replace(level, full_duplex=True) for level in cluster.levels)
        cluster = replace(cluster, levels=free)
    times = times_of(plan, cluster, returning)
    if not _replicated(plan):
        times = replace(times, clips=False)  # the planner leaves out what all straight plans take
    if stream:
        return times.period(in_flight, m)
    try:
        return times.makespan([n - 1 for n in in_flight], m)
    except ValueError as error:
        raise PlanError(str(error), where="plan: training.warmup", remedy=AGAIN) from None


def _replicated(plan: Plan) -> bool:
    return any(stage.replicas > 1 for stage in plan.stages)


def _in_flight(plan: Plan) -> list[int]:
    """Microbatches of one replica of each stage between forward and backward, at most."""
    kind, m = kind_of(plan.training.schedule), plan.training.num_microbatches
    return [
        kind.in_flight(depth, -(-m // stage.replicas))
        for stage, depth in zip(plan.stages, _warmup(plan), strict=True)
    ]


def _warmup(plan: Plan) -> Sequence[int]:
    """Warm-up of each stage; where a plan names none, the least that keeps balanced stages busy."""
    return plan.training.warmup or range(len(plan.stages) - 1, -1, -1)


def _seconds(ops: list[Op]) -> tuple[float, float]:
    costs = [op.cost for op in ops if op.cost is not None]
    return (
        math.fsum(cost.forward_seconds for cost in costs),
        math.fsum(cost.backward_seconds for cost in costs),
    )


def _microbatch_size(graph: OpGraph) -> int:
    return next((op.cost.microbatch_size for op in graph.ops if op.cost), graph.batch_size)
