"""``pdcompile explain``: a plan file as tables."""

from __future__ import annotations

import json

from pdcompile.cli.app import app
from pdcompile.cli.options import AsJson, PlanFile


@app.command()
def explain(plan: PlanFile, as_json: AsJson = False) -> None:
    """Show a plan: stages, times, memory against limits, traffic, certificate.

    The file is checked while it is read, so this also tells whether an edited plan still makes
    sense. Needs no model and no torch.

    Example:

      pdcompile explain plan.json
    """
    from pdcompile.cli.compiling import read_plan
    from pdcompile.cli.output import emit_json, stdout
    from pdcompile.report.plan_table import plan_report

    loaded = read_plan(plan)
    if as_json:
        emit_json({"status": loaded.certificate.status, "plan": json.loads(loaded.to_json())})
    else:
        stdout().print(plan_report(loaded))
