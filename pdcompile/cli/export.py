"""``pdcompile export``: a plan for somebody else's runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdcompile.cli.options import Target, verb, written_to
from pdcompile.cli.output import Result


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
) -> Result:
    """Write a plan for torch.distributed.pipelining, torchtitan, Megatron-LM or Accelerate.

    They place whole modules: plan with cuts between these (--cut-at "blocks.*").

    torch-pipelining: the stages as source, and train.py, which trains three steps with torch's own
    schedule and exits 1 unless losses and weights equal those of plain PyTorch within a tolerance
    that it prints. Tied weights and skip connections are handled there.

    torchtitan: parallelism.toml with the module names of each stage. megatron: arguments.txt with
    --pipeline-model-parallel-layout. accelerate: device_map.json. What a target would get wrong, it
    refuses by name.

    Examples:

      pdcompile plan gpt.py:build --cluster 1x2 --cut-at "blocks.*" -o plan.json

      pdcompile export gpt.py:build --plan plan.json --to torch-pipelining -o exported/

      torchrun --nproc-per-node=2 exported/train.py

      pdcompile export gpt.py:build --plan plan.json --to accelerate -o exported/
    """
    import os

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from pdcompile.export import export as exported

    found = exported(plan, target, to=to, folder=output, progress=True)
    shown = [str(output / name) for name in found.files]
    shown += [f"note: {note}" for note in found.notes]
    document = {
        "status": "done",
        "folder": str(found.folder),
        "files": found.files,
        "notes": found.notes,
    }
    return Result(document, shown)
