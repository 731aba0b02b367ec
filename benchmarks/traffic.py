"""Bytes that a step sends, beside the least that its cut implies: nothing goes twice.

    python benchmarks/traffic.py [--write benchmarks/results/performance.md]

Each model is planned on four stages of one rank with 1F1B and four microbatches, and its proved
programs are simulated.  The least is counted from the cut alone: each tensor that a later stage
reads goes there once a microbatch, and comes back once as a gradient where there is one; of a
weight on several stages one sum of gradients and one copy of the new weight go from stage to stage
once a step, however many microbatches there are.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import models
import torch

from pdcompile.batch import example_call
from pdcompile.compiled import Compiled
from pdcompile.driver import build
from pdcompile.options import Options
from pdcompile.passes.simulate import simulate
from pdcompile.plan import Plan
from pdcompile.schedule import Kind, Phase

MODELS = ("gpt2", "t5", "bert", "llama", "unet", "mixtral")
STAGES = MICROBATCHES = 4
MARKS = "<!-- traffic -->", "<!-- end of traffic -->"


def compiled(name: str) -> Compiled:
    """A model on four stages, from estimated costs."""
    torch.manual_seed(0)
    one = models.MODELS[name](2 * MICROBATCHES)
    one.model.train()
    options = Options(
        loss_fn=one.loss_fn, stages=STAGES, cluster=f"1x{STAGES}", microbatches=MICROBATCHES,
        costs="estimated", verify="off", time_limit=5, progress=False,
    )  # fmt: skip
    return build(one.model, example_call(one.model, one.inputs, one.target), options, None)


def sent(plan: Plan) -> Counter[str]:
    """Bytes of all sends of one step, by what they carry."""
    found: Counter[str] = Counter()
    for column in simulate(plan).programs[-1].columns:
        for one in column:
            if one.action.phase is Phase.SEND:
                tied = one.action.kind in (Kind.TIED, Kind.WEIGHT)
                table = plan.tied if tied else plan.edges
                found["tied" if tied else "values"] += table[one.edge].bytes
    return found


def least(made: Compiled) -> Counter[str]:
    """Bytes that the cut implies: each memory that crosses once there, and once back."""
    plan, graph = made.plan, made.capture.train
    there: dict[tuple[str, int], int] = {}  # by memory and reading stage
    back: dict[tuple[str, int], int] = {}
    for edge in plan.edges:
        memory = graph.values[edge.value].storage
        for stage in edge.targets:
            key = str(memory), stage
            there[key] = max(there.get(key, 0), edge.bytes)
            if edge.gradient:
                back[key] = max(back.get(key, 0), edge.bytes)
    values = plan.training.num_microbatches * (sum(there.values()) + sum(back.values()))
    tied = sum(2 * one.bytes * (len(one.stages) - 1) for one in plan.tied)
    return Counter(values=values, tied=tied)


def main() -> None:
    """Prints the table, and writes it between its marks in a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="the page to write the table into")
    page = parser.parse_args().write
    lines = [
        "| model | values of microbatches | least | tied weights | least | tied weights, a sum a "
        "microbatch |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in MODELS:
        made = compiled(name)
        ours, bound = sent(made.plan), least(made)
        each = sum((1 + MICROBATCHES) * one.bytes * (len(one.stages) - 1) for one in made.plan.tied)
        cells = [ours["values"], bound["values"], ours["tied"], bound["tied"], each]
        lines.append(f"| {name} | {' | '.join(amount(one) for one in cells)} |")
        print(lines[-1], flush=True)
    if page is not None:
        before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        table = "\n".join([MARKS[0], "", *lines, "", MARKS[1]])
        page.write_text(before + table + after, encoding="utf-8")


def amount(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size else "–"


if __name__ == "__main__":
    main()
