"""``pdcompile checkpoint show``: what a folder of checkpoints holds, and whether it is whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pdcompile.cli.options import AsJson


def show(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", show_default=False, help="What pipe.save wrote, or one of them."
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything, and compare it with its checksums.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the last checkpoint in FOLDER holds, stage by stage.

    With --verify every byte is read; the exit code is 2 where something is damaged.

    Example:

      pdcompile checkpoint show checkpoints --verify
    """
    from pdcompile.checkpoint.contents import open_checkpoint
    from pdcompile.checkpoint.folder import complete
    from pdcompile.cli.output import emit_json, stdout

    contents = open_checkpoint(folder)
    damaged = contents.verify() if verify else []
    document = described(contents)
    document["checkpoints"] = [place.name for place in complete(folder)]
    if verify:
        document["damaged"] = [f"{one.where}: {one.message}" for one in damaged]
        document["status"] = "damaged" if damaged else "whole"
    if as_json:
        emit_json(document)
    else:
        from pdcompile.report.checkpoint_table import checkpoint_report

        stdout().print(checkpoint_report(document), markup=False)
    if damaged:
        sys.exit(2)


def described(contents: Any) -> dict[str, Any]:
    """A checkpoint in words and numbers."""
    manifest = contents.manifest
    return {
        "checkpoint": str(contents.place),
        "minibatches": manifest.minibatches,
        "evaluations": manifest.evaluations,
        "schedule": manifest.schedule,
        "microbatches": manifest.microbatches,
        "ranks": manifest.ranks,
        "plan": manifest.plan,
        "optimizer": manifest.optimizer,
        "schedulers": [*contents.schedulers()],
        "bytes": manifest.num_bytes,
        "tied": [list(pair) for pair in manifest.aliases],
        "stages": [
            {
                "stage": stage.stage,
                "tensors": len(stage.weights.tensors),
                "weights_bytes": stage.weights.num_bytes,
                "optimizer_bytes": stage.optimizer.num_bytes if stage.optimizer else 0,
                "rest_bytes": sum(one.num_bytes for one in (*stage.replicas, stage.rest) if one),
                "weights": [*stage.older, stage.updates],
                "waiting": stage.waiting,
            }
            for stage in manifest.stages
        ],
    }
