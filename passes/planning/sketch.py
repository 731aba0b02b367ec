"""Sketch: a plan without its graph, good enough for the ledger of its schedule.

Stages, edges and tied parameters follow from the problem that a plan holds and an assignment of
its items.  What only the graph knows is approximated: activations are the sum over items, where
a plan counts a storage once that two items of a stage save (and what is received not as saved),
and workspace is the largest of an op, where a plan walks the backward.  Receive slots, sends,
weights, gradients and optimizer state are those of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdcompile.cluster import Cluster
from pdcompile.passes.partition.evaluate import measure, stage_seconds
from pdcompile.passes.schedules import make_stream
from pdcompile.passes.simulate.ledger import ledgers
from pdcompile.plan import (
    Certificate,
    Edge,
    Forecast,
    MemoryLedger,
    Plan,
    StagePlan,
    TiedParameter,
    Training,
)
from pdcompile.problem import PartitionProblem

CALLS = 3  # of a stream, until every rank holds the most
MOST_INSTRUCTIONS = 300_000  # forwards and backwards of one call; more are not walked


def sketch(
    problem: PartitionProblem,
    stage_of: Sequence[int],
    certificate: Certificate,
    training: Training,
    cluster: Cluster,
) -> Plan:
    """A plan of the assignment, one stage a rank, with ledgers in its forecast where it is small.

    The forecast's step is the planner's objective (times the microbatches without a flush); its
    bubble and traffic are not filled in.
    """
    forward, backward = stage_seconds(problem, stage_of)
    stages = []
    for s in range(len(problem.stages)):
        items = [item for item, t in zip(problem.items, stage_of, strict=True) if t == s]
        shared = [one for one in problem.shared if any(stage_of[i] == s for i in one.items)]
        trainable = [one for one in shared if one.trainable]
        stages.append(
            StagePlan(
                index=s,
                ops=tuple(op for item in items for op in item.ops),
                parameters=tuple(sorted(one.fqn for one in trainable)),
                ranks=(s,),
                forward_seconds=forward[s],
                backward_seconds=backward[s],
                parameter_bytes=sum(i.parameter_bytes for i in items)
                + sum(p.bytes for p in shared),
                trainable_bytes=sum(item.trainable_bytes for item in items)
                + sum(one.bytes for one in trainable),
                saved_bytes=sum(item.saved_bytes for item in items),
                workspace_bytes=max((item.workspace_bytes for item in items), default=0),
                step_bytes=training.step_bytes(updated_sizes(problem, stage_of, s)),
            )
        )
    plan = Plan(
        fingerprint="",
        stages=tuple(stages),
        edges=_edges(problem, stage_of),
        tied=_tied(problem, stage_of),
        training=training,
        cluster=cluster.to_toml(),
        certificate=certificate,
        problem=problem,
    )
    if 2 * len(stages) * training.num_microbatches > MOST_INSTRUCTIONS:
        return plan
    objective = measure(problem, stage_of).objective
    flush = problem.objective == "flush"
    seconds = objective if flush else objective * problem.num_microbatches
    rate = training.batch_size / seconds if seconds > 0 else 0.0
    return replace(plan, forecast=Forecast(seconds, rate, 0.0, (), ledgers_of(plan)))


def ledgers_of(plan: Plan) -> tuple[MemoryLedger, ...]:
    """The ledger of each rank, from the programs of the plan's schedule; no clock is run."""
    stream = make_stream(plan)
    programs = []
    for _ in range(CALLS if stream.layout.kind.stream else 1):
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


def _edges(problem: PartitionProblem, stage_of: Sequence[int]) -> tuple[Edge, ...]:
    found = []
    for value in problem.traffic:
        source = stage_of[value.producer]
        targets = tuple(sorted({stage_of[c] for c in value.consumers} - {source}))
        if targets:
            gradient = value.backward_bytes > 0
            found.append(Edge(value.value, source, targets, value.forward_bytes, gradient))
    return tuple(found)


def _tied(problem: PartitionProblem, stage_of: Sequence[int]) -> tuple[TiedParameter, ...]:
    holders = [(p, tuple(sorted({stage_of[i] for i in p.items}))) for p in problem.shared]
    return tuple(
        TiedParameter(one.fqn, stages, one.bytes)
        for one, stages in holders
        if one.trainable and len(stages) > 1
    )
