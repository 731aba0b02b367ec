"""benchmarks/results/performance.md: the tables and the picture of all comparisons."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import median

import torch

from benchmarks.side_by_side.job import Figures
from benchmarks.side_by_side.launch import Outcome
from benchmarks.side_by_side.worker import ALONE, BASELINE, DDP, OURS, TIED
from pdcompile.passes.profile.cache import processor
from pdcompile.units import format_bytes

HEADS = (
    "",
    "ms a step",
    "fastest",
    "speed",
    "idle",
    "of its bound",
    "forecast",
    "sent",
    "memory",
    "Python",
)
READING = "## What these tables say"  # under this heading a person writes; it is kept
COLUMNS = 3  # of panels
SURE = 0.95  # how surely an interval holds the median, where there are rounds enough

INTRODUCTION = """\
# Training side by side

Written by `python benchmarks/runtime.py {arguments}` of what it measured here, slow links with
`--shape 100mbit` (torch {torch}, {processor}, {cores} cores). Where the load is above the number of
cores, other programs had most of the machine: compare inside a table then, by the fastest rounds.

Each table is of one run: all contestants live in the same processes and take turns, round by round,
so that a machine whose speed drifts is fair to all. All of them train the same model on the same
samples a step, in as many microbatches, with SGD, over gloo, one thread a process. Stages are cut
by pdcompile's planner, once for all schedules that have the same ones on a rank. Plans are made for
links as they were measured when the run began, while every rank sent to the next one.

- **ms a step**: median of the rounds; **fastest**: the round that other programs on the machine
  disturbed least. Of the ranks the slowest counts; the first step of a round, which fills streams
  again, does not.
- **speed**: times that of {baseline} (of DDP over slow links): median of the rounds' ratios, and
  the interval that holds it with a probability of 95 % (all rounds, where they are fewer than six).
- **idle**: 1 − (a step in one process) / (ranks × step): what schedule, messages and repeated work
  leave of the ranks' time.
- **of its bound**: the plan's simulated step with messages that take no time, over what it took.
- **forecast**: what the plan said before the first step, over the measured time.
- **sent**: bytes a step that the rank sends which sends most.
- **memory**: the most that a rank held, of all that torch's allocator gave out for this contestant.
- **Python**: CPU time of an instruction of pdcompile's interpreter without forward, loss, autograd,
  optimizer and gloo, mean of a step on the rank where it is longest; without waits, where layers
  wait otherwise. Real compute empties the caches that it runs from.

`stash`, `vsync` and `async` update after every microbatch; `replicas` is one stage with as many
replicas as ranks; under `auto` the planner chose schedule, replicas and cut, which the row names.
"""
EMULATED = """\
## Emulated compute

Every layer takes as long as it took when it was timed by itself (CPU seconds, one thread), most of
which it waits; its parameters, messages, gradients and updates are real. So there can be more ranks
than cores, while what they do beside waiting leaves the cores time."""
REAL = """\
## Real compute

Everything is computed. Two ranks share two cores and their caches, and whatever else runs there."""
SHAPED = """\
## Slow links

Each rank is in a network namespace of its own whose link is held to the named rate both ways
(`tc tbf`). Dense layers are computed; convolutions have their parameters and wait as long as in
PipeDream's published profiles, a sample. Bytes are counted on the interface, headers and all."""

PAIRS = (
    (OURS + "gpipe", "torch GPipe"),
    (OURS + "1f1b", "torch 1F1B"),
    (OURS + "interleaved", "torch interleaved"),
    (OURS + "zb-h1", "torch zero bubble"),
    (OURS + "zb-v", "torch ZBV"),
    (OURS + "replicas", DDP),
    (TIED, OURS + "2bw"),
)
SECTIONS = (("emulated", EMULATED), ("real", REAL), ("shaped", SHAPED))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of values, as far from both ends, that holds the median surely enough."""
    listed, n = sorted(values), len(values)
    cut = 0
    while cut + 1 < n / 2:
        outside = 2 * sum(comb(n, k) for k in range(cut + 2)) / 2**n
        if 1 - outside < SURE:
            break
        cut += 1
    return listed[cut], listed[n - 1 - cut]


def ratios(outcome: Outcome, name: str, baseline: str) -> list[float]:
    """Speed by that of the baseline, round by round."""
    rank = outcome.of_rank[0]
    pairs = zip(rank[baseline].seconds, rank[name].seconds, strict=True)
    return [theirs / own for theirs, own in pairs]


def baseline_of(outcome: Outcome) -> str:
    names = outcome.of_rank[0]
    wanted = (BASELINE, DDP) if ALONE in names else (DDP, BASELINE)
    return next((name for name in wanted if name in names), next(iter(names)))


def cells(outcome: Outcome, name: str) -> list[str]:
    """A row of the table."""
    each: list[Figures] = [rank[name] for rank in outcome.of_rank]
    first = each[0]
    if first.refused:
        return [name, *[""] * (len(HEADS) - 1)]
    step = median(first.seconds)
    found = ratios(outcome, name, baseline_of(outcome))
    low, high = interval(found)
    alone = outcome.of_rank[0].get(ALONE)
    idle = 1 - median(alone.seconds) / (outcome.ranks * step) if alone else None
    python = max(one.python_seconds or 0.0 for one in each)
    label = f"{name} ({first.stages})" if name.endswith("auto") else name
    return [
        label,
        f"{1e3 * step:.0f}",
        f"{1e3 * min(first.seconds):.0f}",
        f"{median(found):.2f} ({low:.2f}–{high:.2f})",
        "" if idle is None or name == ALONE else f"{100 * idle:.0f} %",
        "" if first.bound_seconds is None else f"{100 * first.bound_seconds / step:.0f} %",
        "" if first.forecast_seconds is None else f"{100 * first.forecast_seconds / step:.0f} %",
        format_bytes(round(max(one.sent_bytes for one in each))),
        format_bytes(max(one.peak_bytes for one in each)) if first.peak_bytes else "",
        "" if first.python_seconds is None else f"{1e6 * python:.0f} us",
    ]


def remarks(outcome: Outcome) -> str:
    """Remarks on schedules beside torch's of the same name, and on pipelines' traffic beside
    DDP's."""
    rank, said = outcome.of_rank[0], []
    for own, other in PAIRS:
        if own in rank and other in rank and not rank[own].refused and not rank[other].refused:
            found = ratios(outcome, own, other)
            low, high = interval(found)
            said.append(f"{own} at {median(found):.2f} ({low:.2f}–{high:.2f}) of {other}'s speed")
    if ALONE not in rank and DDP in rank:
        most = {n: max(one[n].sent_bytes for one in outcome.of_rank) for n in rank}
        said += [
            f"{name} with {100 * (1 - sent / most[DDP]):.1f} % less traffic than DDP"
            for name, sent in most.items()
            if name != DDP
        ]
    return f"Round by round: {'; '.join(said)}." if said else ""


def section(outcome: Outcome) -> list[str]:
    """One comparison: its table, and who could not take part."""
    refused = {n: f.refused for n, f in outcome.of_rank[0].items() if f.refused}
    rows = [cells(outcome, n) for n in outcome.of_rank[0] if n not in refused]
    rule = "|---|" + "---:|" * (len(HEADS) - 1)
    about = f"{outcome.about} Took {outcome.seconds:.0f} s"
    about += f", at a load of {outcome.load:.0f}." if outcome.load else "."
    lines = [f"### {outcome.title}", "", about, "", f"| {' | '.join(HEADS)} |", rule]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", remarks(outcome)]
    for name, reason in refused.items():
        lines += ["", f"{name}: {' '.join(reason.split())}"]
    return [*lines, ""]


def written(
    kinds: Mapping[str, Sequence[Outcome]], picture: str, arguments: str, before: str = ""
) -> str:
    """The page; what a person has written under READING `before` stays."""
    said = INTRODUCTION.format(
        arguments=arguments, torch=torch.__version__, processor=processor(), cores=os.cpu_count(),
        baseline=BASELINE,
    )  # fmt: skip
    lines = [said, READING + before.partition(READING)[2].partition("\n![")[0].rstrip(), ""]
    lines += [f"![Speed of every contestant]({picture})", ""]
    for kind, text in SECTIONS:
        if kinds[kind]:
            lines += [text, ""]
            for outcome in kinds[kind]:
                lines += section(outcome)
    return "\n".join(lines)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """The speeds of all contestants, one panel a comparison."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = max(1, -(-len(outcomes) // COLUMNS))
    figure = Figure(figsize=(3.6 * COLUMNS, 4.2 * rows), layout="constrained")
    panels = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for panel in panels[len(outcomes) :]:
        panel.set_axis_off()
    for panel, outcome in zip(panels, outcomes, strict=False):
        baseline = baseline_of(outcome)
        names = [n for n, one in outcome.of_rank[0].items() if not one.refused][::-1]
        found = [ratios(outcome, name, baseline) for name in names]
        middle = [median(one) for one in found]
        ends = [interval(one) for one in found]
        spread = [
            [m - low for m, (low, _) in zip(middle, ends, strict=True)],
            [high - m for m, (_, high) in zip(middle, ends, strict=True)],
        ]
        colours = ["#2f9e5f" if name.startswith(OURS) else "#8f98a3" for name in names]
        panel.barh(names, middle, xerr=spread, color=colours, error_kw={"lw": 0.8})
        panel.axvline(1.0, color="black", lw=0.8, ls=":")
        panel.set_title(outcome.title, fontsize=9)
        panel.set_xlabel(f"speed, {baseline} = 1", fontsize=8)
        panel.tick_params(labelsize=7)
    FigureCanvasSVG(figure)
    figure.savefig(path, metadata={"Date": None})
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
