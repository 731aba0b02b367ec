"""``pdcompile plan``: capture, measure, partition, prove."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pdcompile.cli.options import Flags, Target, verb, written_to
from pdcompile.cli.output import Result, write_text
from pdcompile.files import capture_beside

if TYPE_CHECKING:
    from pdcompile.plan import Plan


@verb()
def plan(
    target: Target,
    flags: Flags,
    output: Annotated[
        Path | None,
        written_to(
            "Write the plan to this file, and the captured ops beside it (FILE.capture.json), for "
            "dump and export.",
        ),
    ] = None,
) -> Result:
    """Plan a pipeline for TARGET and prove it.

    Nothing is trained. The model is captured, its ops are timed, the best cut is searched, the
    schedule is proved free of deadlock, and the generated stages are compared with the model.

    Examples:

      pdcompile plan examples/gpt.py:build --cluster 1x2 --memory "32 MB" -o plan.json

      pdcompile plan examples/unet.py:build --cluster cluster.toml --schedule 2bw --json

      pdcompile plan examples/gpt.py:build --cluster 2x4 --replicas any --recompute auto
      --schedule auto --max-staleness 1 -o plan.json

      pdcompile plan examples/gpt.py:build --cluster 1x2 --cut-at "blocks.*" --pin "tokens=0"
    """
    from rich.text import Text

    from pdcompile.cli.options import compiled
    from pdcompile.report.plan_table import plan_report

    beside = None if output is None else capture_beside(output)
    _, result = compiled(target, flags, capture_file=beside)
    made = replace(result.plan, command=(target, *flags.words()))
    if output is not None:
        write_text(output, made.to_json() + "\n")
    texts = (Text(str(one)) for one in (result.proof.summary, result.verification))
    document = summary(made) | {"plan": made, "verification": result.verification}
    return Result(document, [plan_report(made), *texts], [output])


def summary(plan: Plan) -> dict[str, Any]:
    """The certificate and the stages, of which members are names of ops in topological order.

    Seconds of objective and bound are those of a step for schedules that flush, and of a
    microbatch otherwise; `seconds` is the time of the search alone.
    """
    certificate = plan.certificate
    memory = plan.forecast.ledgers if plan.forecast is not None else ()
    stages = []
    for stage in plan.stages:
        stages.append(
            {
                "members": list(stage.ops),
                "replicas": stage.replicas,
                "ranks": list(stage.ranks),
                "forward_seconds": stage.forward_seconds,
                "backward_seconds": stage.backward_seconds,
            }
        )
        if memory and stage.ranks:
            stages[-1]["memory_bytes"] = max(memory[rank].total_bytes for rank in stage.ranks)
    return {
        "status": certificate.status,
        "objective": certificate.objective_seconds,
        "bound": certificate.bound_seconds,
        "gap": certificate.gap,
        "seconds": certificate.seconds,
        "prover": certificate.prover,
        "scope": certificate.scope,
        "stages": stages,
    }
