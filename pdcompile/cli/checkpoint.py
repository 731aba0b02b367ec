"""``pdcompile checkpoint``: look at checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdcompile.cli.app import app
from pdcompile.cli.options import argument, verb
from pdcompile.cli.output import EXIT_BAD_INPUT, Result
from pdcompile.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

CheckpointFolder = Annotated[Path, argument("FOLDER", "What pipe.save wrote, or one of them.")]
group = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Look at the checkpoints of a training.\n\nExample:\n\n"
    "  pdcompile checkpoint show checkpoints --verify",
)
app.add_typer(group, name="checkpoint")


@verb(group)
def show(
    folder: CheckpointFolder,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything, and compare it with its checksums.")
    ] = False,
) -> Result:
    """Show what the last checkpoint in FOLDER holds, stage by stage.

    With --verify every byte is read; the exit code is 2 where something is damaged.

    Example:

      pdcompile checkpoint show checkpoints --verify
    """
    from pdcompile.checkpoint.contents import open_checkpoint
    from pdcompile.checkpoint.folder import complete

    contents = open_checkpoint(folder)
    damaged = contents.verify() if verify else []
    document = described(contents)
    document["checkpoints"] = [place.name for place in complete(folder)]
    if verify:
        document["damaged"] = [f"{one.where}: {one.message}" for one in damaged]
        document["status"] = "damaged" if damaged else "whole"
    exit_code = EXIT_BAD_INPUT if damaged else 0
    return Result(document, checkpoint_report(document), exit_code=exit_code)


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
                "weights_bytes": sizes.pop(""),
                "optimizer_bytes": sizes.pop("-optimizer", 0),
                "rest_bytes": sum(sizes.values()),
                "weights": [*stage.older, stage.updates],
                "waiting": stage.waiting,
            }
            for stage in manifest.stages
            for sizes in [{file.ending: file.num_bytes for file in stage.files}]
        ],
    }


def checkpoint_report(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The parts of `pdcompile checkpoint show`, of the document that --json prints."""
    from pdcompile.report import labels

    yield (
        f"{document['checkpoint']}: {document['minibatches']} minibatches, "
        f"{format_bytes(document['bytes'])}"
    )
    yield (
        f"saved under {document['schedule']} with {document['microbatches']} microbatches on "
        f"{document['ranks']} ranks, {document['optimizer'] or 'no optimizer'}"
        + "".join(f", scheduler {name}" for name in document["schedulers"])
    )
    kinds = ("weights", "optimizer", "rest")
    table = labels.table(">stage", ">tensors", *(f">{kind}" for kind in kinds), "weights of update")
    for stage in document["stages"]:
        waits = f", gradients of {stage['waiting']} wait" if stage["waiting"] else ""
        sizes = (format_bytes(stage[f"{kind}_bytes"]) for kind in kinds)
        versions = ", ".join(map(str, stage["weights"])) + waits
        table.add_row(str(stage["stage"]), str(stage["tensors"]), *sizes, versions)
    yield table
    yield from (f"tied: {name} is {first}" for name, first in document["tied"])
    if len(document["checkpoints"]) > 1:
        yield f"in this folder: {', '.join(document['checkpoints'])}"
    if "damaged" in document:
        damaged = [f"damaged: {one}" for one in document["damaged"]]
        yield from damaged or ["every byte is as written"]
