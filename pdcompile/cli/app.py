"""The application that the verbs add themselves to, and its front page."""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import pdcompile

# The order in which a person meets them.
ORDER = (
    "plan", "explain", "diff", "whatif", "simulate", "schedule", "dump", "verify", "run",
    "checkpoint", "costs", "doctor", "probe",
)  # fmt: skip


class Verbs(TyperGroup):
    """Lists the verbs in `ORDER`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    name="pdcompile",
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def unwrapped(text: str) -> str:
    """Paragraphs as one line each, which the terminal's width then breaks; examples stay."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in paragraphs)


def _version(asked: bool) -> None:
    """Reads what is installed, so that torch need not be imported."""
    if asked:
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "is not installed"
        typer.echo(f"pdcompile {pdcompile.__version__}, torch {torch}")
        raise typer.Exit


@app.callback()
def front(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Print the versions of this and torch.",
        ),
    ] = False,
) -> None:
    """Compile an ordinary PyTorch model into a pipeline that is proved before it runs.

    A TARGET is [bold]file.py:function[/] or [bold]package.module:function[/]; the function
    returns a pdcompile.Workload (model, example inputs, loss function, batches).

    Exit codes: 0 done, 1 edited stages differ (verify), 2 bad input, 3 no plan within the
    limits (there is none, or none was found).  --json prints exactly one JSON object on stdout;
    progress and messages go to stderr.
    """


assert app.registered_callback is not None
app.registered_callback.help = unwrapped(front.__doc__ or "")
