"""A plan without its graph, good enough for the ledger and the clock of its schedule.

Stages, edges and tied parameters follow from a problem and an assignment of its items.  What only
the graph knows is approximated: activations are the sum over items, where a plan counts a storage
once that two items of a stage save (and what is received not as saved), and workspace is the
largest of an op, where a plan walks the backward.  Receive slots, sends, weights, gradients and
optimizer state are those of the plan.  Another plan of the same model tells what the caller gives
and gets and what libraries such as cuBLAS take, and of a cut that it has too, all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdcompile.cluster import Cluster
from pdcompile.passes.schedules import make_stream
from pdcompile.passes.simulate.ledger import ledgers
from pdcompile.plan import (
    NOT_CERTIFIED,
    Certificate,
    Edge,
    Forecast,
    MemoryLedger,
    Plan,
    StagePlan,
    TiedParameter,
    Training,
)
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import PartitionProblem

MOST_INSTRUCTIONS = 300_000  # forwards and backwards of one call; more are not walked


def plan_of(found: Evaluation, training: Training, *, merge: bool = False) -> Plan:
    """A plan of an assignment, without certificate, cluster and forecast.

    `merge`: make one edge of values with the same stages.
    """
    problem, stage_of, on = found.problem, found.stage_of, found.deployment
    stages = []
    for s in found.stages:
        items = [item for item, t in zip(problem.items, stage_of, strict=True) if t == s]
        shared = [one for one in problem.shared if any(stage_of[i] == s for i in one.items)]
        forward = found.times.forward[s]
        stages.append(
            StagePlan(
                index=s,
                ops=tuple(op for item in items for op in item.ops),
                parameters=tuple(sorted(one.fqn for one in shared if one.trainable)),
                replicas=len(on.ranks[s]),
                ranks=tuple(on.ranks[s]),
                forward_seconds=forward,
                backward_seconds=found.times.backward[s] - (forward if on.recompute[s] else 0),
                parameter_bytes=sum(i.parameter_bytes for i in items)
                + sum(p.bytes for p in shared),
                trainable_bytes=found.trainable(s),
                saved_bytes=sum(item.saved_bytes for item in items),
                workspace_bytes=max((item.workspace_bytes for item in items), default=0),
                recompute=on.recompute[s],
                turns=on.patterns[s] if on.patterns else (),
                paces=tuple(on.paces[s]) if on.paces else (),
                step_bytes=training.step_bytes(updated_sizes(problem, stage_of, s)),
            )
        )
    tied = _tied(problem, stage_of)
    edges = _edges(problem, stage_of, merge)
    return Plan("", tuple(stages), edges, tied, training, "", NOT_CERTIFIED)


def straight_plan_of(
    problem: PartitionProblem,
    stage_of: Sequence[int],
    certificate: Certificate,
    training: Training,
    cluster: Cluster,
    like: Plan | None = None,
) -> Plan:
    """A straight plan of the assignment, with ledgers in its forecast where the schedule is short.

    The forecast's step is the planner's objective (times the microbatches without a flush); its
    bubble and traffic are not filled in.

    Args:
        like: a straight plan of the same model, which knows what its ops keep.
    """
    found = Evaluation(problem, stage_of)
    plan = replace(
        plan_of(found, training),
        certificate=certificate,
        cluster=cluster.to_toml(),
        problem=problem,
    )
    if 2 * len(plan.stages) * training.num_microbatches > MOST_INSTRUCTIONS:
        return plan
    seconds = found.seconds * (1 if found.deployment.flush else problem.num_microbatches)
    rate = training.batch_size / seconds if seconds > 0 else 0.0
    known = plan if like is None or like.forecast is None else _as_known(plan, like)
    return replace(plan, forecast=Forecast(seconds, rate, 0.0, (), ledgers_of(known)))


def _as_known(plan: Plan, like: Plan) -> Plan:
    """The plan with what only the graph knows, as far as another plan tells it."""
    ours, theirs = plan.training, like.training
    size, was = (-(-one.batch_size // one.num_microbatches) for one in (ours, theirs))
    batch = ours.batch_size / theirs.batch_size
    if size == was and [set(s.ops) for s in plan.stages] == [set(s.ops) for s in like.stages]:
        stages = [replace(s, input_bytes=math.ceil(s.input_bytes * batch)) for s in like.stages]
        return replace(plan, stages=tuple(stages), edges=like.edges)
    more = _beside(like)
    stages = [replace(s, workspace_bytes=s.workspace_bytes + more) for s in plan.stages]
    for at in (0, -1):  # the first has most of the inputs, the last has targets and all outputs
        stages[at] = replace(
            stages[at],
            input_bytes=math.ceil(like.stages[at].input_bytes * batch),
            output_bytes=math.ceil(like.stages[at].output_bytes * size / was),
        )
    return replace(plan, stages=tuple(stages))


def _beside(plan: Plan) -> int:
    """Bytes of workspace that every stage has besides that of its largest op, such as cuBLAS's."""
    items = plan.problem.items if plan.problem is not None else ()
    largest = {op: item.workspace_bytes for item in items for op in item.ops}
    own = [max((largest.get(op, 0) for op in stage.ops), default=0) for stage in plan.stages]
    return max(0, min(s.workspace_bytes - n for s, n in zip(plan.stages, own, strict=True)))


def ledgers_of(plan: Plan) -> tuple[MemoryLedger, ...]:
    """The ledger of each rank, from the programs of the plan's schedule; no clock is run."""
    stream = make_stream(plan)
    programs = []
    for _ in range(1 + stream.spec.reach if stream.spec.kind.stream else 1):  # then it is full
        program, stream = stream.step(plan.training.num_microbatches)
        programs.append(program)
    return ledgers(plan, (*programs, stream.flush()[0]))


def updated_sizes(problem: PartitionProblem, stage_of: Sequence[int], stage: int) -> Iterator[int]:
    """Bytes of the parameters that a stage updates; shared ones belong to their first holder."""
    for one in problem.shared:
        if one.trainable and min(stage_of[i] for i in one.items) == stage:
            yield one.bytes
    for item, at in zip(problem.items, stage_of, strict=True):
        if at == stage:
            yield from item.trained_sizes


def _edges(problem: PartitionProblem, stage_of: Sequence[int], merge: bool) -> tuple[Edge, ...]:
    found: dict[tuple[object, ...], Edge] = {}
    for value in problem.traffic:
        source = stage_of[value.producer]
        targets = tuple(sorted({stage_of[c] for c in value.consumers} - {source}))
        if targets:
            gradient = value.backward_bytes > 0
            key = (source, targets, gradient, "" if merge else value.value)
            size = value.forward_bytes + (found[key].bytes if key in found else 0)
            found[key] = Edge(value.value, source, targets, size, gradient)
    return tuple(found.values())


def _tied(problem: PartitionProblem, stage_of: Sequence[int]) -> tuple[TiedParameter, ...]:
    holders = [(p, tuple(sorted({stage_of[i] for i in p.items}))) for p in problem.shared]
    return tuple(
        TiedParameter(one.fqn, stages, one.bytes)
        for one, stages in holders
        if one.trainable and len(stages) > 1
    )
