"""``pdcompile diff``: what differs between two plan files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pdcompile.cli.options import argument, verb
from pdcompile.cli.output import Result
from pdcompile.plan import Plan


@verb()
def diff(
    a: Annotated[Path, argument("A", "A plan.json.")],
    b: Annotated[Path, argument("B", "Another one.")],
) -> Result:
    """Show what differs between two plans.

    Whether they are of one model, of the same costs and cluster; ops on another stage; schedule,
    machines, stages, traffic, forecast, memory and certificate. The exit code is 0 whether or
    not they differ. Needs no model and no torch.

    Example:

      pdcompile diff plan.json other.json
    """
    from pdcompile.jsonio import encode
    from pdcompile.plan.diff import diff as compared
    from pdcompile.report.diff_table import diff_report

    found = compared(Plan.load(a), Plan.load(b))
    document = {"status": "identical" if found.identical else "different", **encode(found)}
    return Result(document, [diff_report(found, str(a), str(b))])
