"""``pdcompile explain``: a plan file as tables, and why it is as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdcompile.cli.options import PlanFile, verb
from pdcompile.cli.output import Result, as_written
from pdcompile.plan import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb()
def explain(plan: PlanFile) -> Result:
    """Show a plan, what binds each stage, and what crosses each cut.

    Stages, times, memory against limits, traffic, certificate; then for each stage what it is
    bound by, for each cut what crosses it, and the commands that tell what is gained without each
    limit and constraint. The file is checked while it is read, so this also tells whether an
    edited plan still makes sense. Needs no model and no torch.

    Example:

      pdcompile explain plan.json
    """
    from rich.text import Text

    from pdcompile.errors import PlanError
    from pdcompile.passes.planning.explain import explain as explained
    from pdcompile.report.explain_table import explain_report
    from pdcompile.report.plan_table import plan_report
    from pdcompile.report.progress import working

    loaded = Plan.load(plan)
    document: dict[str, Any] = {"status": loaded.certificate.status, "plan": as_written(loaded)}
    shown: list[RenderableType] = [plan_report(loaded)]
    try:
        with working("explaining", "what binds"):
            found = explained(loaded, where=str(plan))
    except PlanError as error:
        # The plan itself is sound: show the tables, and say what cannot be explained.
        document |= {"explanation": None, "missing": f"{error.message}; {error.remedy}"}
        shown.append(Text(f"note: cannot explain what binds: {error.message}"))
        shown.append(Text(f"  where: {error.where}\n  remedy: {error.remedy}"))
    else:
        document["explanation"] = found
        shown += [explain_report(found), *found.commands]  # which can be pasted
    return Result(document, shown)
