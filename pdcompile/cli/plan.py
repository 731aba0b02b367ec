"""``pdcompile plan``: capture, measure, partition, prove."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pdcompile.cli.options import Flags, Target, verb, written_to
from pdcompile.cli.output import Result, as_written, write_text
from pdcompile.files import capture_beside


@verb()
def plan(
    target: Target,
    flags: Flags,
    output: Annotated[
        Path | None,
        written_to(
            "Write the plan to this file, and the captured ops beside it (FILE.capture.json), for "
            "dump.",
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
    certificate = made.certificate
    document = {
        "status": certificate.status,
        # of a step for schedules that flush, else of a microbatch
        "objective": certificate.objective_seconds,
        "bound": certificate.bound_seconds,
        "gap": certificate.gap,
        "seconds": certificate.seconds,  # of the search alone
        "prover": certificate.prover,
        "scope": certificate.scope,
        "plan": as_written(made),
        "verification": result.verification,
    }
    return Result(document, [plan_report(made), *texts], [output])
