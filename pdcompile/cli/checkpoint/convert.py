"""``pdcompile checkpoint convert``: the weights of a checkpoint as plain safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdcompile.cli.options import AsJson


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            show_default=False,
            help="What pipe.save wrote, or torch.distributed.checkpoint.save.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            show_default=False,
            help="A .safetensors file, or a folder for several with their index.",
        ),
    ],
    prefix: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Of names in a torch.distributed.checkpoint: only these, without it (model.).",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Write the weights in FOLDER as plain safetensors, under the model's names.

    transformers reads them (from_pretrained, with the model's config.json beside them), and so
    does --weights. Of tied parameters there is one.

    Examples:

      pdcompile checkpoint convert checkpoints -o model.safetensors

      pdcompile checkpoint convert dcp_folder --prefix model. -o model/
    """
    from pdcompile.checkpoint.conversion import convert as converted
    from pdcompile.cli.output import emit_json, stdout

    names = converted(source, output, prefix)
    if as_json:
        emit_json({"status": "done", "output": str(output), "tensors": len(names)})
    else:
        stdout().print(f"{len(names)} tensors in {output}", markup=False)
