"""``pdcompile whatif``: the problem inside a plan, solved again under other limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pdcompile.cli.options import PlanFile, verb
from pdcompile.cli.output import Result, write_text
from pdcompile.plan import Plan
from pdcompile.problem.scenario import Scenario

CHANGED = "changed.toml"  # the changed machines, where nobody has written them to a file yet
SHOWN = ("training", "cluster", "stages", "certificate", "forecast")  # of each side, as JSON
COSTS = (
    "costs are those of the plan; a step is the objective's, without updates; memory is that of "
    "the schedule's ledger, where activations and workspace of another cut are added up over ops, "
    "which a plan counts exactly"
)


@verb()
def whatif(
    plan: PlanFile,
    flags: Scenario,
    write_cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the changed cluster, for `pdcompile plan --cluster FILE`."
        ),
    ] = None,
) -> Result:
    """What would the best plan be on other machines or with another schedule?

    The problem that the planner solved is in the plan file; it is solved again under the changed
    limits, and compared as `pdcompile diff` does. Costs are those of the plan. No plan is written:
    its stages would need the model, and the command that makes it is printed. Needs no model and
    no torch.

    Examples:

      pdcompile whatif plan.json --memory 24GB --bandwidth inter=12.5GB/s --devices 4x8

      pdcompile whatif plan.json --schedule 2bw --json
    """  # fmt: skip
    from rich.text import Text

    from pdcompile.passes.planning.whatif import command
    from pdcompile.passes.planning.whatif import whatif as answered
    from pdcompile.plan.diff import diff
    from pdcompile.report.diff_table import diff_report
    from pdcompile.report.progress import compiling

    loaded = Plan.load(plan)
    with compiling(lines=True, title="solving") as listener:
        listener.starts("again")
        before, after, notes = answered(loaded, flags, progress=listener.found, where=str(plan))
    if write_cluster is not None:
        write_text(write_cluster, after.cluster)
    output = str(plan.with_name(f"{plan.stem}.whatif.json"))  # and this plan stays
    line = command(loaded, after, flags, output, str(write_cluster or CHANGED))
    notes += tuple(_about_command(loaded, after, line))
    found = diff(before, after)
    sides = {"before": before, "after": after}
    document = {
        "status": after.certificate.status,
        "differences": found,
        **{side: {name: getattr(one, name) for name in SHOWN} for side, one in sides.items()},
        "notes": notes,
        "command": line,
    }
    shown = [Text(f"note: {note}") for note in (*notes, COSTS)]
    report = diff_report(found, str(plan), "what if", "objective")
    last = f"to get this plan: {line}"
    return Result(document, [report, *shown, last], [write_cluster])


def _about_command(plan: Plan, after: Plan, line: str) -> Iterator[str]:
    if CHANGED in line:
        yield f"--write-cluster {CHANGED} makes that file"
    if plan.training.batch_size != after.training.batch_size:
        yield f"TARGET has to give minibatches of {after.training.batch_size} samples"
    if not plan.command:
        yield (
            "the plan does not tell the command that made it: give the options, optimizer and "
            "costs that it was made with"
        )
