"""``pdcompile plan``: capture, measure, partition, prove."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pdcompile.cli import importing as imports
from pdcompile.cli.app import app
from pdcompile.cli.options import AsJson, PlanFlags, takes_flags
from pdcompile.files import capture_beside
from pdcompile.pass_runner import collecting_seldom


@app.command()
@takes_flags
def plan(
    target: imports.Target,
    flags: PlanFlags,
    imported: imports.ImportFlags,
    context: typer.Context,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write the plan to this file, and the captured ops beside it "
            "(FILE.capture.json), for dump and export.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a pipeline for TARGET and prove it.

    Nothing is trained. The model is captured, its ops are timed, the best cut is searched, the
    schedule is proved free of deadlock, and the generated stages are compared with the model.

    Examples:

      pdcompile plan examples/gpt.py:build --cluster 1x2 --memory "32 MB" -o plan.json

      pdcompile plan examples/unet.py:build --cluster cluster.toml --schedule 2bw --json

      pdcompile plan examples/gpt.py:build --cluster 2x4 --replicas any --recompute auto
      --schedule auto --max-staleness 1 -o plan.json

      pdcompile plan examples/gpt.py:build --cluster 1x2 --cut-at "blocks.*" --pin "tokens=0"

    With --import, TARGET is a problem that others published, and the objective is exactly that
    of their paper: the largest load of a device (device-placement), the slowest stage or
    transfer (pipedream), the slowest stage (piper). Needs no torch. Ctrl-C ends the search with
    the best plan so far. Exit code 3: no plan fits, or none was found in time.

      pdcompile plan --import device-placement bert24_inference.json --time-limit 60 --json

      pdcompile plan --import pipedream vgg16.txt --cluster 4x4 --bandwidth 10GB/s,1.25GB/s

      pdcompile plan --import piper bert32.json --devices 64 --memory 8GiB --batch 1920
      --bandwidth 25GiB/s
    """
    imports.check_options(imported.imported, context)
    if imported.imported is not None:
        imports.run(imported.imported, context.params, output=output, as_json=as_json)
        return
    from pdcompile.cli.options import compiled, words_of
    from pdcompile.cli.output import emit_json, stderr, stdout, write_text
    from pdcompile.report.plan_table import plan_report
    from pdcompile.report.solution_table import solution_of

    beside = None if output is None else capture_beside(output)
    _, result = compiled(target, flags, writes=output, as_json=as_json, capture_file=beside)
    made = replace(result.plan, command=(target, *words_of(flags)))
    if output is not None:
        write_text(output, made.to_json() + "\n")
    if as_json:
        verification = result.verification and json.loads(result.verification.to_json())
        with collecting_seldom():
            answer = solution_of(made).to_json()
            plan_json = json.loads(made.to_json())
            emit_json(answer | {"plan": plan_json, "verification": verification})
        return
    console = stdout()
    console.print(plan_report(made))
    console.print(result.proof.summary, markup=False)
    if result.verification is None or not result.verification.unverified:  # a note says that
        console.print(str(result.verification), markup=False)
    if output is not None:
        stderr().print(f"written: {output}", soft_wrap=True)
