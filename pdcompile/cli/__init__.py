"""The command line, one file a verb."""

from __future__ import annotations

import atexit
import gc
import sys
import warnings
from contextlib import nullcontext
from importlib import import_module

from typer import Typer

from pdcompile.cli.app import ORDER, app
from pdcompile.cli.output import fail, json_alone, show_warning
from pdcompile.errors import PdcompileError

__all__ = ["app", "main"]

for verb in ORDER:  # each adds itself to the application
    import_module(f"pdcompile.cli.{verb}")


def main(
    arguments: list[str] | None = None, *, verbs: Typer = app, name: str = "pdcompile"
) -> None:
    """Run the command line, or that of other `verbs`, and exit.

    0: done, 2: bad input, 3: no plan within the limits, 130: interrupted.
    A `PdcompileError` is printed as its message, place and remedy; any other exception is a
    defect and keeps its traceback (exit code 1).
    """
    atexit.register(gc.freeze)  # else the interpreter's last collections take an import of torch
    given = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in given
    with json_alone() if as_json else nullcontext(), warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            verbs(given, prog_name=name)
        except PdcompileError as error:
            sys.exit(fail(error, as_json=as_json))
        except KeyboardInterrupt:
            sys.exit(130)
