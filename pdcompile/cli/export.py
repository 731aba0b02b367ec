"""``pdcompile export``: a plan for somebody else's runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdcompile.cli.options import Target, verb, written_to
from pdcompile.cli.output import Result

if TYPE_CHECKING:
    from pdcompile.export import Export


@verb()
def export(
    target: Target,
    plan: Annotated[
        Path,
        typer.Option(metavar="FILE", show_default=False, help="plan.json, made by `plan -o`."),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="RUNTIME",
            help="torch-pipelining, torchtitan, megatron or accelerate.",
        ),
    ],
    output: Annotated[Path, written_to("Where the files go.", "FOLDER")] = Path("exported"),
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="Of the search for cuts between modules; default: 20."
        ),
    ] = None,
) -> Result:
    """Write a plan for torch.distributed.pipelining, torchtitan, Megatron-LM or Accelerate.

    They place whole modules, so the cuts are rounded to borders of modules first: the plan's own
    problem, with its costs and limits, is solved again with that constraint. What it costs is
    printed in percent of the plan's objective; 0 % where the cuts lie there already.

    torch-pipelining: the stages as source, and train.py, which trains three steps with torch's own
    schedule and exits 1 unless losses and weights equal those of plain PyTorch within a tolerance
    that it prints. Tied weights and skip connections are handled there.

    torchtitan: parallelism.toml with the module names of each stage. megatron: arguments.txt with
    --pipeline-model-parallel-layout. accelerate: device_map.json. What a target would get wrong, it
    refuses by name.

    Examples:

      pdcompile plan gpt.py:build --cluster 1x2 -o plan.json

      pdcompile export gpt.py:build --plan plan.json --to torch-pipelining -o exported/

      torchrun --nproc-per-node=2 exported/train.py

      pdcompile export gpt.py:build --plan plan.json --to accelerate -o exported/
    """
    import os

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from pdcompile.export import export as exported

    found = exported(plan, target, to=to, folder=output, time_limit=time_limit, progress=True)
    shown = [cost_line(found), *(str(output / name) for name in found.files)]
    shown += [f"note: {note}" for note in found.notes]
    document = {
        "status": "done",
        "folder": str(found.folder),
        "files": found.files,
        "rounded": found.rounding.moved,
        "percent": found.percent,
        "before_seconds": found.rounding.before_seconds,
        "after_seconds": found.rounding.after_seconds,
        "notes": found.notes,
    }
    return Result(document, shown)


def cost_line(found: Export) -> str:
    """Cost of rounding, with both objectives."""
    from pdcompile.units import format_seconds

    rounding = found.rounding
    if not rounding.moved:
        return "cuts lie between modules already: rounding costs 0 %"
    before, after = rounding.before_seconds, rounding.after_seconds
    flush = rounding.after.training.kind.objective == "flush"
    each = "a step" if flush else "a microbatch"
    shown = f"{rounding.percent:+.2g}" if abs(rounding.percent) >= 0.005 else "0"
    return (
        f"cuts between modules cost {shown} %: {format_seconds(after)} {each} "
        f"instead of {format_seconds(before)}, by the costs in the plan"
    )
