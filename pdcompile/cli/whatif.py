"""``pdcompile whatif``: plan again on other machines or with other options, and compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pdcompile.cli.options import Flags, Target, argument, compiled, verb, written_to
from pdcompile.cli.output import Result, as_written, write_text
from pdcompile.cluster import Cluster
from pdcompile.clusters import cluster_of
from pdcompile.errors import ConfigError, PlanError
from pdcompile.files import capture_beside
from pdcompile.plan import Plan
from pdcompile.problem.scenario import Scenario, changed_cluster

OF_MACHINES = ("cluster", "memory")
OF_FUNCTIONS = ("optimizer", "loss_reduction")  # options that may name code


@verb()
def whatif(
    target: Target,
    plan: Annotated[Path, argument("PLAN", "The plan.json that it is compared with.")],
    flags: Flags,
    machines: Scenario,
    output: Annotated[
        Path | None,
        written_to("Write the new plan to this file, and changed machines beside it (FILE.toml)."),
    ] = None,
) -> Result:
    """Plan TARGET again on other machines or with other options, and compare.

    Options that are left out are those of the command that made PLAN. The ops are those of the
    capture beside PLAN, which is not made again; differences are shown as `pdcompile diff` does.

    Examples:

      pdcompile whatif examples/gpt.py:build plan.json --memory 24MB --recompute auto

      pdcompile whatif examples/gpt.py:build plan.json --bandwidth inter=12.5GB/s --devices 4x8

      pdcompile whatif examples/gpt.py:build plan.json --schedule 2bw -o other.json
    """
    from rich.text import Text

    from pdcompile.plan.diff import diff
    from pdcompile.report.diff_table import diff_report

    before = Plan.load(plan)
    flags, more, notes = _again(before, str(plan), target, flags, machines)
    _, made = compiled(
        target, flags, capture_file=capture_beside(plan), like=before, verify="off", **more
    )
    after = made.plan
    if output is not None:
        if changed := more.get("cluster"):
            file = output.with_suffix(".toml")
            write_text(file, changed.to_toml())
            flags = flags.with_said(cluster=str(file))
        after = replace(after, command=(target, *flags.words()))
        write_text(output, after.to_json() + "\n")
    found = diff(before, after)
    document = {
        "status": after.certificate.status,
        "differences": found,
        "plan": as_written(after),
        "notes": notes,
    }
    report = diff_report(found, str(plan), str(output or "what if"))
    return Result(document, [report, *(Text(f"note: {note}") for note in notes)], [output])


def _again(
    plan: Plan, where: str, target: str, flags: Flags, machines: Scenario
) -> tuple[Flags, dict[str, Any], tuple[str, ...]]:
    """The flags that made a plan with those that are said now, and machines that no flag tells.

    Raises:
        PlanError: it does not tell the command that made it.
        ConfigError: its command names code in another file than the target's.
    """
    if not plan.command:
        raise PlanError(
            "the plan does not tell the command that made it, and so not its options",
            where=f"{where}: command",
            remedy="make it with pdcompile plan; or plan with other options in Python, save both, "
            "and compare them: pdcompile diff a.json b.json",
        )
    before = Flags.of_words(plan.command[1:])
    for name, text in before.items():
        file = text.rpartition(":")[0] if name in OF_FUNCTIONS else ""
        if file and name not in flags.said and file != target.rpartition(":")[0]:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"the plan was made with {option} {text}, and code is not run because a plan names "
                "it",
                where=option,
                remedy=f"give it again: {option} {text}",
            )
    said = {**before, **flags.said}
    if not machines.changes:
        return Flags(said, "plan"), {}, ()
    text = said.get("cluster", "auto")
    cluster = Cluster.from_toml(plan.cluster, where=where) if text == "auto" else cluster_of(text)
    if "memory" in said and machines.memory is None:
        machines = replace(machines, memory=said["memory"])
    cluster, notes = changed_cluster(cluster, machines)
    kept = {name: value for name, value in said.items() if name not in OF_MACHINES}
    return Flags(kept, "plan"), {"cluster": cluster}, notes
