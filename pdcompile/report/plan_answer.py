"""A plan of our own in the form in which imported problems are answered."""

from __future__ import annotations

from pdcompile.plan import Plan
from pdcompile.problem.answer import Answer, StageAnswer


def answer_of(plan: Plan) -> Answer:
    """The certificate and the stages; members are op names, in topological order.

    The objective is in seconds, of a step for schedules that flush and of a microbatch
    otherwise; `seconds` is the time of the search alone.
    """
    certificate = plan.certificate
    memory = plan.forecast.ledgers if plan.forecast is not None else ()
    return Answer(
        status=certificate.status,
        objective=certificate.objective_seconds,
        bound=certificate.bound_seconds,
        prover=certificate.prover,
        seconds=certificate.seconds,
        scope=certificate.scope,
        stages=tuple(
            StageAnswer(
                stage.ops,
                stage.replicas,
                {
                    "ranks": list(stage.ranks),
                    "forward_seconds": stage.forward_seconds,
                    "backward_seconds": stage.backward_seconds,
                }
                | (
                    {"memory_bytes": max(memory[rank].total_bytes for rank in stage.ranks)}
                    if memory and stage.ranks
                    else {}
                ),
            )
            for stage in plan.stages
        ),
    )
