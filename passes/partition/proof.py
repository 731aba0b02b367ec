"""A plan's bound, proved again: what `pdcompile.plan.check` alone cannot know."""

from __future__ import annotations

from dataclasses import replace

from pdcompile.cluster import Cluster
from pdcompile.errors import PlanError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.partition.search import Progress, partition
from pdcompile.plan import Certificate, Plan, check
from pdcompile.plan.embedded import problem_of

TOLERANCE = 1e-6  # relative


def prove(
    plan: Plan,
    graph: OpGraph,
    cluster: Cluster,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Certificate:
    """Check the plan, solve its problem again from nothing, and compare the bounds.

    Returns:
        The plan's certificate with the bound, prover and seconds of the new proof.

    Raises:
        PlanError: `check` refuses the plan; it holds no problem, or replicas or recomputation,
            which its problem does not speak of; a faster plan refutes its bound; or the bound
            could not be proved within the time limit (seconds).
    """
    check(plan, graph, cluster)
    problem, claimed = problem_of(plan, "plan"), plan.certificate
    if any(stage.replicas > 1 or stage.recompute for stage in plan.stages):
        raise PlanError(
            "the plan replicates or recomputes stages, and its problem is about neither",
            where="plan: stages",
            remedy="plan again: the search over replicas proves its own bound",
        )
    found, certificate = partition(problem, time_limit=time_limit, seed=seed, progress=progress)
    if found.objective < claimed.bound_seconds * (1 - TOLERANCE):
        raise PlanError(
            f"bound {claimed.bound_seconds!r} is refuted: another partition takes "
            f"{found.objective!r}",
            where="plan: certificate.bound_seconds",
            remedy="make the plan again",
        )
    if certificate.bound_seconds < claimed.bound_seconds * (1 - TOLERANCE):
        raise PlanError(
            f"bound {claimed.bound_seconds!r} was not proved again: only "
            f"{certificate.bound_seconds!r} in {certificate.seconds:.1f} s",
            where="plan: certificate.bound_seconds",
            remedy="raise time_limit, or make the plan again",
        )
    bound = min(certificate.bound_seconds, claimed.objective_seconds)
    proved = replace(
        claimed, bound_seconds=bound, prover=certificate.prover, seconds=certificate.seconds
    )
    return replace(proved, status="optimal" if proved.gap == 0 else "feasible")
