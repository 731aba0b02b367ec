"""``pdcompile explain``: a plan file as tables, and why it is as it is."""

from __future__ import annotations

import json
from typing import Any

from pdcompile.cli.app import app
from pdcompile.cli.options import AsJson, PlanFile
from pdcompile.plan import Plan


@app.command()
def explain(
    plan: PlanFile,
    as_json: AsJson = False,
) -> None:
    """Show a plan, what binds each stage, and what the next-best cut would cost.

    Stages, times, memory against limits, traffic, certificate; then for each stage what it is
    bound by, for each cut the cheapest other one, and the commands that tell what is gained without
    each limit and constraint. The file is checked while it is read, so this also tells whether an
    edited plan still makes sense. Needs no model and no torch.

    Example:

      pdcompile explain plan.json
    """  # fmt: skip
    from pdcompile.cli.output import emit_json, stdout
    from pdcompile.errors import PlanError
    from pdcompile.jsonio import encode
    from pdcompile.report.plan_table import plan_report
    from pdcompile.report.progress import working

    loaded = Plan.load(plan)
    document: dict[str, Any] = {
        "status": loaded.certificate.status,
        "plan": json.loads(loaded.to_json()),
    }
    console = stdout()
    if not as_json:
        console.print(plan_report(loaded))
    try:
        from pdcompile.passes.planning.explain import explain as explained

        with working("explaining", "other cuts"):
            found = explained(loaded, where=str(plan))
    except PlanError as error:
        # The plan itself is sound: show the tables, and say what cannot be explained.
        if as_json:
            document |= {"explanation": None, "missing": f"{error.message}; {error.remedy}"}
            emit_json(document)
            return
        console.print(f"note: cannot explain what binds: {error.message}")
        console.print(f"  where: {error.where}\n  remedy: {error.remedy}")
        return
    if as_json:
        emit_json(document | {"explanation": encode(found)})
    else:
        from pdcompile.report.explain_table import explain_report

        console.print(explain_report(found))
        for one in found.commands:  # which can be pasted, and are never broken
            console.print(one, soft_wrap=True)
