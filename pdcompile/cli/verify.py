"""``pdcompile verify``: do the stages compute what the model computes?"""

from __future__ import annotations

import typer

from pdcompile.cli.app import app
from pdcompile.cli.options import (
    AllowEdited,
    AsJson,
    Flags,
    GivenPlan,
    GivenSources,
    Target,
    takes_flags,
)


@app.command()
@takes_flags
def verify(
    target: Target,
    flags: Flags,
    plan: GivenPlan = None,
    sources: GivenSources = None,
    allow_edited: AllowEdited = False,
    as_json: AsJson = False,
) -> None:
    """Compare one step of the stages with the model in plain PyTorch, in one process.

    Outputs, loss, every gradient and every buffer. Exit codes: 0 all equal, 1 edited
    sources compute something else (the text says where).

    Example:

      pdcompile verify examples/gpt.py:build --plan plan.json --sources stages/
    """
    from pdcompile.cli.compiling import compiled, plan_given
    from pdcompile.cli.output import EXIT_DIFFERENT, emit_json, stdout

    given = plan_given(plan, sources)
    _, result = compiled(
        target,
        flags.following(given),
        plan=given,
        sources=None if sources is None else str(sources),
        allow_edited=allow_edited,
        verify="full",
    )
    found = result.verification
    differences = 0 if found is None else len(found.differences)
    if as_json:
        emit_json({"status": "done", "verification": str(found), "differences": differences})
    else:
        stdout().print(str(found), markup=False)
    if differences:
        raise typer.Exit(EXIT_DIFFERENT)
