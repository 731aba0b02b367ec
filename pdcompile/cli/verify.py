"""``pdcompile verify``: do the stages compute what the model computes?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdcompile.cli.app import app
from pdcompile.cli.options import AsJson, Flags, Target, takes_flags


@app.command()
@takes_flags
def verify(
    target: Target,
    flags: Flags,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Use this plan instead of searching for one."),
    ] = None,
    sources: Annotated[
        Path | None,
        typer.Option("--sources", metavar="FOLDER", help="Use these stages, edited perhaps."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare one step of the stages with the model in plain PyTorch, in one process.

    Outputs, loss, every gradient and every buffer. Exit code 0: all equal.

    Example:

      pdcompile verify examples/gpt.py:build --plan plan.json --sources stages/
    """
    from pdcompile.cli.compiling import compiled, read_plan
    from pdcompile.cli.output import emit_json, stdout

    given = None if plan is None else read_plan(plan)
    _, result = compiled(
        target, flags, plan=given, sources=None if sources is None else str(sources), verify="full"
    )
    if as_json:
        emit_json({"status": "done", "verification": str(result.verification)})
    else:
        stdout().print(str(result.verification), markup=False)
