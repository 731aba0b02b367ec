"""``pdcompile checkpoint``: look at checkpoints, and turn them into plain safetensors files."""

from __future__ import annotations

import typer

from pdcompile.cli.app import app
from pdcompile.cli.checkpoint.convert import convert
from pdcompile.cli.checkpoint.show import show

group = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Look at the checkpoints of a training, and turn them into plain safetensors files.\n\n"
    "Example:\n\n  pdcompile checkpoint show checkpoints --verify",
)
group.command()(show)
group.command()(convert)
app.add_typer(group, name="checkpoint")
