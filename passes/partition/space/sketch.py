"""A plan with nothing but what time and memory depend on, to be simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from pdcompile.cluster import Cluster
from pdcompile.passes.costs import Resident
from pdcompile.passes.partition.space.evaluate import Measure
from pdcompile.passes.planning.sketch import updated_sizes
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Certificate, Edge, Forecast, Plan, StagePlan, TiedParameter, Training
from pdcompile.problem import PartitionProblem
from pdcompile.problem.space import Candidate

NOTHING = Certificate(0.0, 0.0, "feasible", "", 0.0, "")


def forecast(
    problem: PartitionProblem,
    cluster: Cluster,
    candidate: Candidate,
    held: Sequence[Resident] = (),
) -> Forecast:
    """What the simulator says of a candidate: seconds of a step in steady state, ledgers."""
    links = cache(cluster.level_between)
    drawn = sketch(problem, cluster, candidate, held)
    return simulate(drawn, links=links, timeline=False).forecast


def sketch(
    problem: PartitionProblem,
    cluster: Cluster,
    candidate: Candidate,
    held: Sequence[Resident] = (),
) -> Plan:
    """The candidate as a plan without ops.

    Values with the same stages are one edge where links have no latency: the same seconds in
    fewer instructions.

    Args:
        held: what each stage is said to hold; that of its items counts where it is more.
    """
    setting, measure = candidate.setting, Measure(problem, cluster, candidate)
    training = Training(
        setting.schedule,
        setting.num_microbatches,
        setting.num_microbatches,
        candidate.warmup,
        max_grad_norm=1.0 if setting.clipping else None,
        optimizer_factor=setting.optimizer_factor,
        step=setting.step,
    )
    stages = []
    for s, (option, ranks) in enumerate(zip(candidate.options, candidate.ranks, strict=True)):
        items = [i for i, t in zip(problem.items, candidate.stage_of, strict=True) if t == s]
        forward, backward = measure.compute(s)
        saved = sum(item.saved_bytes for item in items)
        workspace = max((item.workspace_bytes for item in items), default=0)
        stages.append(
            StagePlan(
                s,
                (),
                (),
                option.replicas,
                ranks,
                forward,
                backward - (forward if option.recompute else 0.0),
                sum(item.parameter_bytes - item.trainable_bytes for item in items)
                + measure.trainable(s),
                measure.trainable(s),
                max(saved, held[s].saved_bytes) if held else saved,
                max(workspace, held[s].workspace_bytes) if held else workspace,
                option.recompute,
                training.step_bytes(updated_sizes(problem, candidate.stage_of, s)),
            )
        )
    merge = not any(level.latency_seconds for level in cluster.levels)
    edges, tied = _edges(problem, candidate, merge), _tied(problem, candidate)
    return Plan("", tuple(stages), edges, tied, training, "", NOTHING)


def _edges(problem: PartitionProblem, candidate: Candidate, merge: bool) -> tuple[Edge, ...]:
    found: dict[tuple[object, ...], int] = defaultdict(int)
    for n, value in enumerate(problem.traffic):
        source = candidate.stage_of[value.producer]
        targets = tuple(sorted({candidate.stage_of[c] for c in value.consumers} - {source}))
        if targets:
            key = (source, targets, value.backward_bytes > 0, 0 if merge else n)
            found[key] += value.forward_bytes
    return tuple(
        Edge(f"v{n}", source, targets, size, gradient)  # type: ignore[arg-type]
        for n, ((source, targets, gradient, _), size) in enumerate(found.items())
    )


def _tied(problem: PartitionProblem, candidate: Candidate) -> tuple[TiedParameter, ...]:
    found = []
    for parameter in problem.shared:
        holders = tuple(sorted({candidate.stage_of[i] for i in parameter.items}))
        if parameter.trainable and len(holders) > 1:
            found.append(TiedParameter(parameter.fqn, holders, parameter.bytes))
    return tuple(found)
