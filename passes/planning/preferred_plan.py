"""The plan of `preferred_cuts`: its stages, its forecast, and what its certificate says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from pdcompile.cluster import Cluster
from pdcompile.ir.graph import OpGraph
from pdcompile.pass_runner import Listener
from pdcompile.passes.partition.alternatives import seconds_of
from pdcompile.passes.partition.space.pipelines import exceeds, limited
from pdcompile.passes.planning.branch_and_bound import DEFAULT_SECONDS, best_plan
from pdcompile.passes.planning.candidate_plan import candidate_plan, making_seconds
from pdcompile.passes.planning.memory_limits import has_room, with_scope
from pdcompile.passes.planning.preferred_cuts import (
    EQUAL,
    TOLERANCE,
    Preference,
    preference,
    searching,
)
from pdcompile.passes.planning.solved_problem import candidate_of, placed
from pdcompile.plan import Certificate, Plan, Training
from pdcompile.plan.embedded import plain
from pdcompile.problem import PartitionProblem
from pdcompile.problem.space import SearchSpace
from pdcompile.units import format_bytes, format_seconds

PREFERRING = (0.05, 0.2)  # of the time limit, to choose among plans that are almost as fast
LITTLE = 1.0  # seconds, in which a plan may always be made
WORTH = 0.03  # of a step: then one is made even if time is over


def best_preferred(
    graph_at: Callable[[int], OpGraph],
    problem_at: Callable[[int], PartitionProblem],
    cluster: Cluster,
    space: SearchSpace,
    training: Training,
    *,
    time_limit: float | None,
    tolerance: float | None,
    listener: Listener,
) -> Plan:
    """The preferred one of the best plans of a space, with a forecast whose ledgers keep limits.

    Arguments are those of `best_plan`; `tolerance` as for `preferred_plan`, None: the usual one.
    A plan with room is rehearsed when it has been chosen, so that one plan is, not two.
    """
    whole, began = DEFAULT_SECONDS if time_limit is None else time_limit, time.monotonic()
    least, most = (share * whole for share in PREFERRING)
    kept = min(most, max(least, searching(problem_at(space.microbatches[0]))))
    for certain in (False, True):
        plan = best_plan(
            graph_at, problem_at, cluster, space, training,
            time_limit=None if time_limit is None else time_limit - kept,
            seed=training.seed, listener=listener, certain=certain,
        )  # fmt: skip
        plan = preferred_plan(
            plan, graph_at(plan.training.num_microbatches), cluster,
            TOLERANCE if tolerance is None else tolerance,
            seconds=max(kept, whole - (time.monotonic() - began)),
        )  # fmt: skip
        plan = completed(plan, graph_at, cluster)
        if plan.forecast is None or not exceeds(plan.forecast.ledgers, cluster):
            break
    return plan


def completed(plan: Plan, graph_at: Callable[[int], OpGraph], cluster: Cluster) -> Plan:
    """The plan with a forecast, which its certificate mentions."""
    if plan.forecast is None and plan.problem is not None:
        graph, candidate = graph_at(plan.training.num_microbatches), candidate_of(plan)
        made = candidate_plan(graph, plan.problem, candidate, plan.training, cluster)
        plan = replace(plan, stages=made.stages, forecast=made.forecast, rehearsed=made.rehearsed)
    return with_scope(plan)


def preferred_plan(
    plan: Plan,
    graph: OpGraph,
    cluster: Cluster,
    tolerance: float,
    *,
    seconds: float = math.inf,
) -> Plan:
    """The plan that a person would choose among those within `tolerance` of a search's answer.

    Its bound stays what it is; its gap is that of its own objective.  A plan that is slower than
    the fastest found says so in its certificate, and what it saves in a note.

    Args:
        plan: without a forecast where it has room.
        graph: with the costs of the plan's microbatches.
        tolerance: of the fastest plan's objective; 0: the plan as it is.
        seconds: of wall time that it may take, about, rehearsals among it.
    """
    begin = time.monotonic()
    if tolerance <= 0 or len(plan.stages) < 2 or plan.problem is None:
        return plan
    found, claimed = placed(plan), plan.certificate.objective_seconds
    if not math.isclose(seconds_of(found), claimed, rel_tol=1e-6):
        return plan  # what the search went by is not what is compared here

    @cache
    def made(stage_of: tuple[int, ...]) -> Plan:
        if stage_of == tuple(found.stage_of) and plan.forecast is not None:
            return plan
        candidate = replace(candidate_of(plan), stage_of=stage_of)
        assert plan.problem is not None
        return candidate_plan(graph, plan.problem, candidate, plan.training, cluster)

    def fits(stage_of: tuple[int, ...]) -> bool:
        if not limited(cluster) or has_room(found.of(stage_of)):
            return True
        forecast = made(stage_of).forecast
        return forecast is None or not exceeds(forecast.ledgers, cluster)

    training, made_yet = plan.training, plan.forecast is not None
    best = preference(
        found, graph, tolerance,
        update=partial(training.update_seconds, versions=training.kind.stream),
        fits=fits,
        seconds=seconds if made_yet else seconds - making_seconds(graph, found.stage_of),
    )  # fmt: skip
    chosen, left = best.chosen, seconds - (time.monotonic() - begin)
    gain = max(best.shorter, 1 - chosen.seconds / claimed)
    if made_yet and gain < WORTH and making_seconds(graph, chosen.stage_of) > max(left, LITTLE):
        return plan
    if chosen.stage_of == tuple(found.stage_of):
        return plan
    new = made(chosen.stage_of)
    if new.forecast is not None and exceeds(new.forecast.ledgers, cluster):
        return plan
    notes = [*new.notes, *_of_search(plan, new, graph, cluster)]
    certificate = replace(plan.certificate, objective_seconds=chosen.seconds)
    if (certificate.fastest_seconds or 0.0) >= chosen.seconds:
        certificate = replace(certificate, fastest_seconds=None)
    certificate = replace(certificate, seconds=certificate.seconds + time.monotonic() - begin)
    if chosen.seconds > best.fastest.seconds * (1 + EQUAL):
        known = certificate.fastest_seconds or math.inf
        certificate = replace(certificate, fastest_seconds=min(known, best.fastest.seconds))
        notes.append(saving(best))
    certificate = _judged(certificate, optimal=plain(plan) or plan.certificate.status == "optimal")
    return replace(new, certificate=certificate, notes=tuple(notes), problem=plan.problem)


def _of_search(plan: Plan, new: Plan, graph: OpGraph, cluster: Cluster) -> list[str]:
    """Notes of the plan that say nothing of its cuts."""
    others = [note for note in plan.notes if note not in new.notes]
    if not others:
        return []
    assert plan.problem is not None
    own = candidate_plan(
        graph, plan.problem, candidate_of(plan), plan.training, cluster, rehearsed=False
    )
    return [note for note in others if note not in own.notes]


def _judged(certificate: Certificate, *, optimal: bool) -> Certificate:
    """The certificate with the status of its gap, where a gap of 0 is a proof at all."""
    bound = min(certificate.bound_seconds, certificate.objective_seconds)
    certificate = replace(certificate, bound_seconds=bound)
    proved = optimal and certificate.gap == 0
    return replace(certificate, status="optimal" if proved else "feasible")


def saving(found: Preference) -> str:
    """Costs and savings of a preferred plan, in one line."""
    fastest, chosen = found.fastest, found.chosen
    slower = 100 * (chosen.seconds / fastest.seconds - 1)
    parts = []
    if found.shorter > 0:
        parts.append(f"a step is {100 * found.shorter:.2g} % shorter once updates count")
    if chosen.divided < fastest.divided:
        modules = "module" if chosen.divided == 1 else "modules"
        where = f"cuts divide {chosen.divided} {modules} instead of {fastest.divided}"
        parts.append(where if chosen.divided else "cuts lie at borders of modules")
    if chosen.sent_bytes < fastest.sent_bytes:
        sent, more = format_bytes(chosen.sent_bytes), format_bytes(fastest.sent_bytes)
        same = "a little less than" if sent == more else f"{sent} instead of"
        parts.append(f"sends {same} {more} a step")
    return (
        f"{slower:.2g} % slower than the fastest plan found "
        f"({format_seconds(fastest.seconds)}): {'; '.join(parts)}; "
        "cut_tolerance=0 (--cut-tolerance 0) takes the fastest"
    )
