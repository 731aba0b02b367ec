"""Before and after under other limits, as tables and as a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdcompile import jsonio
from pdcompile.cluster import Cluster, Level
from pdcompile.passes.planning.whatif import SolvedScenario, Whatif
from pdcompile.report import labels
from pdcompile.report.explain_table import BINDS
from pdcompile.units import (
    format_bytes,
    format_rate,
    format_seconds,
)

MOST_STAGES = 16  # more are summed up
COSTS = (
    "note: costs are those of the plan; memory is that of the schedule's ledger, where activations "
    "and workspace of another cut are added up over ops, which a plan counts exactly"
)


def whatif_report(found: Whatif) -> Group:
    """The two sides next to each other, the new stages, and what has to be known of both."""
    parts: list[RenderableType] = [sides(found), Text(""), stages(found)]
    parts.append(Text(kept_text(found)))
    parts += [Text(f"note: {note}") for note in found.notes]
    parts.append(Text(COSTS))
    return Group(*parts)


def sides(found: Whatif) -> Table:
    """One row a fact; rows that say the same on both sides are kept where they matter."""
    table = labels.table("", "plan", "what if", "change")
    before, after = found.before, found.after
    pairs = [("schedule", _schedule(before), _schedule(after))]
    pairs += [("devices", _devices(before.cluster), _devices(after.cluster))]
    pairs += [("links", _links(before.cluster), _links(after.cluster))]
    pairs += [("in flight", _in_flight(before), _in_flight(after))]
    for label, old, new in pairs:
        table.add_row(label, old, new, "" if old == new else "changed")
    table.add_row(
        "time a step",
        format_seconds(before.step_seconds),
        format_seconds(after.step_seconds),
        labels.change(after.step_seconds, before.step_seconds),
        style="bold",
    )
    table.add_row(
        "throughput",
        f"{before.samples_per_second:,.4g} samples/s",
        f"{after.samples_per_second:,.4g} samples/s",
        labels.change(after.samples_per_second, before.samples_per_second),
    )
    table.add_row("proof", _proof(before), _proof(after))
    table.add_row("bound by", _binds(before), _binds(after))
    table.add_row("fullest stage", _fullest(before), _fullest(after))
    return table


def stages(found: Whatif) -> Table:
    """The new stages, beside what each held before where their number is the same."""
    after = found.after
    same = len(after.uses) == len(found.before.uses)
    held = ["held"] if same else []
    table = labels.table(">stage", *held, "would hold", ">compute", ">memory", "|bound by")
    shown = after.uses if len(after.uses) <= MOST_STAGES else after.uses[: MOST_STAGES - 1]
    for use in shown:
        row = [str(use.stage)]
        if same:
            row.append(holds(found.before, use.stage))
        row.append(holds(after, use.stage))
        memory = format_bytes(use.memory_bytes)
        row += [format_seconds(use.compute_seconds), memory, BINDS[use.binds]]
        table.add_row(*row, style="bold" if use.stage == after.bottleneck else None)
    if len(shown) < len(after.uses):
        table.add_row("…", *[""] * (len(table.columns) - 2), f"{len(after.uses)} in all")
    return table


def holds(state: SolvedScenario, stage: int) -> str:
    """Modules whose weights the stage holds; without weights, its first and last op."""
    items = [
        item for item, s in zip(state.problem.items, state.stage_of, strict=True) if s == stage
    ]
    users = {i for one in state.problem.shared if one.trainable for i in one.items}
    with_weights = [
        item.name.partition(":")[0]
        for i, (item, s) in enumerate(zip(state.problem.items, state.stage_of, strict=True))
        if s == stage and (item.parameter_bytes or i in users)
    ]
    return labels.modules(with_weights, [op for item in items for op in item.ops])


def kept_text(found: Whatif) -> str:
    """The plan's own cut under the changed limits, in a sentence."""
    after = found.after
    if len(after.uses) != len(found.before.uses):
        return f"the plan has {len(found.before.uses)} stages: every cut is new"
    if found.kept_seconds is None:
        return f"the plan's own cut would not do: {found.kept_broken[0]}"
    if after.stage_of == found.before.stage_of:
        return "the plan's own cut stays the best that was found"
    factor = 1 if after.flush else after.problem.num_microbatches
    seconds = found.kept_seconds * factor
    change = labels.change(seconds, after.step_seconds)
    return f"the plan's own cut would take {format_seconds(seconds)} a step ({change})"


def document(found: Whatif, line: str, notes: Sequence[str]) -> dict[str, Any]:
    """The JSON form: both sides, the kept cut, notes and the command."""
    return {
        "status": found.after.status,
        "before": _side(found.before),
        "after": _side(found.after),
        "kept": {"objective_seconds": found.kept_seconds, "broken": list(found.kept_broken)},
        "notes": [*found.notes, *notes],
        "command": line,
    }


def _side(state: SolvedScenario) -> dict[str, Any]:
    return {
        "status": state.status,
        "schedule": state.training.schedule,
        "num_microbatches": state.training.num_microbatches,
        "batch_size": state.training.batch_size,
        "objective": state.problem.objective,
        "objective_seconds": state.objective_seconds,
        "bound_seconds": state.bound_seconds,
        "gap": state.gap,
        "prover": state.prover,
        "step_seconds": state.step_seconds,
        "samples_per_second": state.samples_per_second,
        "bottleneck": state.bottleneck,
        "cluster": state.cluster.to_toml(),
        "stages": [
            jsonio.encode(use)
            | {
                "ops": [
                    op
                    for item, s in zip(state.problem.items, state.stage_of, strict=True)
                    if s == use.stage
                    for op in item.ops
                ]
            }
            for use in state.uses
        ],
    }


def _schedule(state: SolvedScenario) -> str:
    training = state.training
    return f"{training.schedule}, {training.batch_size} samples in {training.num_microbatches}"


def _devices(cluster: Cluster) -> str:
    sizes = "x".join(str(level.size) for level in reversed(cluster.levels))
    limits = {device.memory_bytes for device in cluster.devices}
    speeds = {device.speed for device in cluster.devices}
    text = f"{sizes}, " + " / ".join(
        "no memory limit" if limit is None else f"{format_bytes(limit)} each"
        for limit in sorted(limits, key=lambda one: (one is None, one))
    )
    return text if speeds == {1.0} else text + ", speed " + " / ".join(f"{s:g}" for s in speeds)


def _links(cluster: Cluster) -> str:
    def one(level: Level) -> str:
        late = f" + {format_seconds(level.latency_seconds)}" if level.latency_seconds else ""
        return f"{level.name} {format_rate(level.bytes_per_second)}{late}"

    return "\n".join(one(level) for level in cluster.levels)


def _in_flight(state: SolvedScenario) -> str:
    counts = state.problem.memory.in_flight
    if len(counts) > MOST_STAGES // 2:
        return f"{counts[0]} … {counts[-1]}"
    return ", ".join(map(str, counts))


def _proof(state: SolvedScenario) -> str:
    if state.status == "optimal":
        return f"optimal, by {state.prover}"
    return f"gap {100 * state.gap:.2g} %, bound by {state.prover}"


def _binds(state: SolvedScenario) -> str:
    use = state.uses[state.bottleneck]
    return f"stage {use.stage}: {BINDS[use.binds]}"


def _fullest(state: SolvedScenario) -> str:
    def share(stage: int) -> float:
        use = state.uses[stage]
        return use.memory_bytes / use.limit_bytes if use.limit_bytes else 0.0

    if any(use.limit_bytes for use in state.uses):
        use = state.uses[max(range(len(state.uses)), key=share)]
        share_text = f" ({100 * share(use.stage):.0f} %)" if use.limit_bytes else ""
        return f"stage {use.stage}: {format_bytes(use.memory_bytes)}{share_text}"
    use = max(state.uses, key=lambda one: one.memory_bytes)
    return f"stage {use.stage}: {format_bytes(use.memory_bytes)}"
