"""``pdcompile whatif``: plan again on other machines or with other options, and compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pdcompile.cli.options import Flags, Target, argument, compiled, verb, written_to
from pdcompile.cli.output import Result, as_written, write_text
from pdcompile.cluster import Cluster
from pdcompile.clusters import cluster_of
from pdcompile.errors import ConfigError, PlanError
from pdcompile.files import capture_beside
from pdcompile.plan import Plan
from pdcompile.problem.scenario import Scenario, changed_cluster

OF_FUNCTIONS = ("optimizer", "loss_reduction")  # options that may name code


@verb()
def whatif(
    target: Target,
    flags: Flags,
    machines: Scenario,
    plan: Annotated[
        Path | None, argument("PLAN", "The plan.json that it is compared with.")
    ] = None,
    output: Annotated[
        Path | None,
        written_to(
            "Write the new plan to this file, its capture and changed machines beside it "
            "(FILE.cluster.toml)."
        ),
    ] = None,
) -> Result:
    """Plan TARGET again on other machines or with other options, and compare.

    Options that are left out are those of the command that made PLAN, whatever their help says of
    defaults. Differences are shown as `pdcompile diff` does.

    Examples:

      pdcompile whatif examples/gpt.py:build plan.json --memory 24MB --recompute auto

      pdcompile whatif examples/gpt.py:build plan.json --bandwidth inter=12.5GB/s --devices 4x8

      pdcompile whatif examples/gpt.py:build plan.json --schedule 2bw -o other.json
    """
    from rich.text import Text

    from pdcompile.plan.diff import diff
    from pdcompile.report.diff_table import diff_report

    if plan is None:
        raise _alone(target)
    before = Plan.load(plan)
    flags, cluster, notes = _again(before, str(plan), target, flags, machines)
    more: dict[str, object] = {} if cluster is None else {"cluster": cluster}
    more |= {} if output is None else {"capture_file": capture_beside(output)}
    after = compiled(target, flags, verify="off", **more)[1].plan
    found = diff(before, replace(after, command=before.command))
    machines_file = None
    if output is not None:
        if cluster is not None:
            machines_file = output.with_name(f"{output.stem}.cluster.toml")
            write_text(machines_file, cluster.to_toml())
            flags = replace(flags, said={**flags.said, "cluster": str(machines_file)})
        after = replace(after, command=(target, *flags.words()))
        write_text(output, after.to_json() + "\n")
    document = {
        "status": after.certificate.status,
        "differences": found,
        "plan": as_written(after),
        "notes": notes,
    }
    report = diff_report(found, str(plan), str(output or "what if"))
    return Result(
        document, [report, *(Text(f"note: {note}") for note in notes)], [output, machines_file]
    )


def _alone(target: str) -> ConfigError:
    """Error for one argument, which may be the plan."""
    named, remedy = "PLAN", f"pdcompile whatif {target} plan.json"
    if target.endswith(".json"):
        command = Plan.load(target).command
        named, remedy = "TARGET", f"pdcompile whatif {command[0] if command else named} {target}"
    return ConfigError(f"{target} alone: {named} is missing", where=named, remedy=remedy)


def _again(
    plan: Plan, where: str, target: str, flags: Flags, machines: Scenario
) -> tuple[Flags, Cluster | None, tuple[str, ...]]:
    """The flags that made a plan with those that are said now, machines that no flag tells, and
    what had to be assumed of these.

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
    before = Flags.of_words(plan.command[1:], "plan")
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
        return Flags(said, "plan"), None, ()
    text = said.get("cluster", "auto")
    cluster = _devices(plan) if text == "auto" else cluster_of(text)
    cluster, notes = changed_cluster(cluster, machines)
    gone = ("cluster", "memory") if machines.memory else ("cluster",)
    kept = {name: value for name, value in said.items() if name not in gone}
    return Flags(kept, "plan"), cluster, notes


def _devices(plan: Plan) -> Cluster:
    """The cluster of a plan, with each part of a rank as a device."""
    cluster = plan.machines
    if cluster.parts is None:
        return cluster
    devices = tuple(one for one in cluster.devices for _ in range(cluster.parts.size))
    levels = (cluster.parts, *cluster.levels)
    return replace(cluster, devices=devices, levels=levels, parts=None)
