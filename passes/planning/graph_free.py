"""A plan without its graph, good enough for the ledger and the clock of its schedule.

Stages, edges and tied parameters follow from a problem and an assignment of its items.  What only
the graph knows is approximated: activations are the sum over items, where a plan counts a storage
once that two items of a stage save (and what is received not as saved), and workspace is the
largest of an op, where a plan walks the backward.  Receive slots, sends, weights, gradients and
optimizer state are those of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdcompile.passes.schedules import make_stream
from pdcompile.passes.simulate.ledger import ledgers
from pdcompile.plan import (
    NOT_CERTIFIED,
    Edge,
    MemoryLedger,
    Plan,
    StagePlan,
    TiedParameter,
    Training,
)
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import PartitionProblem


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
    holders = [(p, tuple(sorted({stage_of[i] for i in p.items}))) for p in problem.shared]
    tied = tuple(
        TiedParameter(one.fqn, held, one.bytes) for one, held in holders
        if one.trainable and len(held) > 1
    )  # fmt: skip
    edges = _edges(problem, stage_of, merge)
    return Plan("", tuple(stages), edges, tied, training, "", NOT_CERTIFIED)


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
