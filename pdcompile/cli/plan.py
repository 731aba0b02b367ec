"""``pdcompile plan``: capture, measure, partition, prove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pdcompile.cli.app import app
from pdcompile.cli.options import AsJson, Flags, Target, takes_flags


@app.command()
@takes_flags
def plan(
    target: Target,
    flags: Flags,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the plan to this file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a pipeline for TARGET and prove it.

    Nothing is trained. The model is captured, its ops are timed, the best cut is searched, the
    schedule is proved free of deadlock, and the generated stages are compared with the model.

    Examples:

      pdcompile plan examples/gpt.py:build --cluster 1x2 --memory "32 MB" -o plan.json

      pdcompile plan examples/unet.py:build --cluster cluster.toml --schedule 2bw --json
    """
    from pdcompile.cli.compiling import compiled, write_text
    from pdcompile.cli.output import emit_json, stderr, stdout
    from pdcompile.report.plan_table import plan_report

    _, result = compiled(target, flags)
    if output is not None:
        write_text(output, result.plan.to_json() + "\n")
    if as_json:
        status = result.plan.certificate.status
        emit_json({"status": status, "plan": json.loads(result.plan.to_json())})
        return
    console = stdout()
    console.print(plan_report(result.plan))
    console.print(str(result.proof), markup=False, soft_wrap=True)
    console.print(str(result.verification), markup=False, soft_wrap=True)
    if output is not None:
        stderr().print(f"written: {output}", soft_wrap=True)
