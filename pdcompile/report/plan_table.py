"""A plan as tables: stages, memory, traffic, forecast, certificate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdcompile.plan import Certificate, MemoryLedger, Plan
from pdcompile.problem import BY_RULE, ONE_GROUP
from pdcompile.report import labels
from pdcompile.report.labels import Terminal, counted
from pdcompile.schedule.registry import name_of
from pdcompile.units import format_bytes, format_count, format_rate, format_seconds

LEDGER_LINES = tuple(
    (name, name.removesuffix("_bytes").replace("_", " ")) for name in MemoryLedger.__slots__
)

SHORT = {
    "gradients": "grads", "optimizer": "optim.", "activations": "activ.", "workspace": "work",
    "temporaries": "temp.",
}  # fmt: skip
MOST_COLUMNS = 77  # of the lines; with more, headings are short, and numbers have no space


def explain(plan: Plan, *, width: int = 100) -> str:
    """The tables of `plan_report` as text of at most `width` columns."""
    file = StringIO()
    terminal = Terminal(file=file, width=width, force_terminal=False, no_color=True)
    terminal.print(plan_report(plan))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def plan_report(plan: Plan) -> Group:
    """Stages, memory, forecast, certificate and notes, one below the other."""
    parts: list[RenderableType] = [headline(plan), stage_table(plan)]
    if plan.forecast is not None:
        parts += [memory_table(plan), *_on_host(plan), forecast_line(plan)]
    parts.append(certificate_line(plan))
    parts += [alternatives_table(plan)] if plan.alternatives else []
    parts += [Text(f"note: {note}") for note in plan.notes]
    return Group(*parts)


def headline(plan: Plan) -> Text:
    training = plan.training
    text = Text.assemble((name_of(training.schedule), "bold"))
    divided = f" of {plan.parts_in_words} by {training.split}" if training.parts != 1 else ""
    text.append(
        f": {counted(len(plan.stages), 'stage')}{divided} on "
        f"{counted(plan.num_processes, 'rank')}, "
        f"minibatches of {counted(training.batch_size, 'sample')} "
        f"in {counted(training.num_microbatches, 'microbatch', 'microbatches')}"
    )
    if BY_RULE in plan.certificate.scope:
        text.append(" (by rule)")
    if training.max_grad_norm is not None:
        text.append(f", gradients clipped to norm {training.max_grad_norm:g}")
    if training.loss_scaling:
        text.append(", losses scaled for float16")
    if training.linear_lr_scaling:
        text.append(", learning rates in proportion to replicas")
    if any(stage.home_bytes for stage in plan.stages):
        text.append(", each weight updated by one replica")
    return text


def stage_table(plan: Plan) -> Table:
    """One row a stage; times are per microbatch, in flight counts microbatches."""
    several = plan.training.parts != 1 or any(stage.replicas > 1 for stage in plan.stages)
    ranks = "ranks" if several else "rank"
    numbers = (">ops", ">parameters", ">forward", ">backward", ">in flight", ">sends")
    recomputed = any(stage.recompute for stage in plan.stages)
    table = labels.table(">stage", ranks, "*holds", *numbers, *[">recomputes"] * recomputed)
    for stage in plan.stages:
        table.add_row(
            str(stage.index),
            labels.ranks(plan.processes_of(*stage.ranks)),
            labels.modules(stage.parameters, stage.ops),
            str(len(stage.ops)),
            format_bytes(stage.parameter_bytes),
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds),
            str(in_flight(plan, stage.index)),
            _sends(plan, stage.index),
            *["yes" if stage.recompute else "no"] * recomputed,
        )
    return table


def in_flight(plan: Plan, stage: int) -> int:
    """Microbatches that a replica of the stage holds at most (warm-up depth plus one)."""
    if plan.training.warmup:
        return plan.spec.in_flight(stage)
    return -(-plan.training.num_microbatches // plan.stages[stage].replicas)


def alternatives_table(plan: Plan) -> Table:
    """One row a choice: its next-best value, by the fastest plan that was tried with it."""
    table = labels.table("choice", "|here", "|next best tried", ">a step", ">change")
    own = plan.certificate.objective_seconds * plan.training.scale
    for one in plan.alternatives:
        change = f"{round(100 * (one.step_seconds / own - 1), 6):+.3g} %" if own else "-"
        table.add_row(one.choice, one.own, one.value, format_seconds(one.step_seconds), change)
    return table


def _sends(plan: Plan, stage: int) -> str:
    """Bytes that leave the stage per microbatch, values forwards and gradients backwards."""
    total = 0
    for edge in plan.edges:
        if edge.source == stage:
            total += edge.bytes * len(edge.targets)
        if edge.gradient and stage in edge.targets:
            total += edge.bytes
    return format_bytes(total) if total else "-"


def fullest(plan: Plan) -> list[int]:
    """Ranks of a plan with a forecast, nearest to their memory limits first, then by bytes."""

    def fullness(rank: int) -> tuple[float, int]:
        total = plan.ledgers[rank].total_bytes
        return total / (plan.machines.devices[rank].memory_bytes or math.inf), total

    return sorted(range(len(plan.ledgers)), key=fullness, reverse=True)


def memory_table(plan: Plan) -> Table:
    """The memory of each rank at its peak, line by line, against its limit."""
    used = [line for line in LEDGER_LINES if any(getattr(one, line[0]) for one in plan.ledgers)]
    many = sum(max(len(label), 7) + 1 for _, label in used) > MOST_COLUMNS  # of a hundred

    def number(count: int) -> str:
        return format_bytes(count).replace(" ", "" if many else " ")

    headings = (SHORT.get(label, label) if many else label for _, label in used)
    table = labels.table("|memory", *(f">{name}" for name in (*headings, "total", "limit")))
    table.padding = (0, 1, 0, 0)
    table.columns[-2].style = "bold"
    for column in table.columns[1:]:
        column.min_width = len("17.4 MB") - many
    for rank, ledger in enumerate(plan.ledgers):
        limit = plan.machines.devices[rank].memory_bytes
        table.add_row(
            f"{'ranks' if plan.parts_of_rank[rank] > 1 else 'rank'} "
            f"{labels.ranks(plan.processes_of(rank))}",
            *(number(getattr(ledger, name)) for name, _ in used),
            number(ledger.total_bytes),
            "none" if limit is None else number(limit),
            style="red" if limit is not None and ledger.total_bytes > limit else None,
        )
    return table


def _on_host(plan: Plan) -> Iterator[Text]:
    """A line on the memory of the host that ranks need, where weights rest there."""
    if plan.host_bytes:
        held = f"{format_bytes(plan.host_bytes)} of weights, gradients and optimizer states"
        rates = sorted({one.host_rate for one in plan.machines.devices})
        each = " to ".join(dict.fromkeys(map(format_rate, (rates[0], rates[-1]))))
        yield Text(f"in pinned memory of the host, beside these: {held}, copied at {each}")


def forecast_line(plan: Plan) -> Text:
    forecast = plan.forecast
    assert forecast is not None
    sent = " + ".join(format_bytes(count) for count in forecast.sent_bytes)
    if len(forecast.sent_bytes) > 4:
        sent = f"{format_bytes(sum(forecast.sent_bytes))} over all ranks"
    source = f" from {plan.costs}" if plan.costs else ""
    alone = plan.num_ranks > 1 and plan.machines.in_process
    turns = "; of stages side by side: in one process they take turns" if alone else ""
    return Text(
        f"forecast{source}: {format_seconds(forecast.step_seconds)} a step, "
        f"{format_count(forecast.samples_per_second)} samples/s, "
        f"{100 * forecast.bubble:.1f} % idle, sent per step {sent}{turns}"
    )


def _fastest(certificate: Certificate) -> str:
    """The share of the gap that its cuts are worth, if another plan is faster."""
    fastest = certificate.fastest_seconds
    if fastest is None:
        return ""
    gap = replace(certificate, objective_seconds=fastest).gap
    known = f"a gap of {100 * gap:.2g} %" if gap else "which is proved optimal"
    return f" (the fastest plan found takes {format_seconds(fastest)}, {known})"


def in_words(scope: str) -> str:
    """Plans that a certificate speaks of, and reasons why they are not all plans."""
    parts = scope.split("; ")
    why = [part.removeprefix(ONE_GROUP) for part in parts if part.startswith(ONE_GROUP)]
    plans = [part for part in parts if not part.startswith(ONE_GROUP)]
    reasons = f". Ops share a group, and so a stage, for: {'; '.join(why)}" if why else ""
    return f"all plans with {'; '.join(plans)}{reasons}"


def certificate_line(plan: Plan) -> Text:
    """Objective, bound, gap, prover, scope and seconds, as one sentence."""
    certificate = plan.certificate
    what = "a step" if plan.training.kind.drains else "a microbatch"
    text = Text("certificate: ")
    text.append(
        certificate.status, style="bold green" if certificate.status == "optimal" else "bold yellow"
    )
    text.append(
        f", {format_seconds(certificate.objective_seconds)} {what}, "
        f"lower bound {format_seconds(certificate.bound_seconds)}, "
        f"gap {100 * certificate.gap:.2g} %{_fastest(certificate)}; by {certificate.prover} "
        f"in {format_seconds(certificate.seconds)}, among {in_words(certificate.scope)}"
    )
    return text
