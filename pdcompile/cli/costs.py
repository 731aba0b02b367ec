"""``pdcompile costs``: FLOPs and bytes of every op in closed form."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from pdcompile.cli.options import Target, verb
from pdcompile.cli.output import Result, as_written
from pdcompile.errors import ConfigError

_SIZES = "b=8,s=512"


@verb()
def costs(
    target: Target,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar=_SIZES, help="Give numbers for these sizes instead."),
    ] = None,
) -> Result:
    """FLOPs, bytes and saved activations of every op as formulas.

    b is the microbatch size, s the sequence length where the model has one. The model is
    captured at several sizes; nothing is computed. What follows no formula is a number of the
    example, and marked as concrete.

    Examples:

      pdcompile costs examples/gpt.py:build

      pdcompile costs examples/gpt.py:build --at b=8,s=32 --json
    """
    from pdcompile.workload import load_target

    sizes = {} if at is None else sizes_of(at)
    workload = load_target(target)
    inputs, expected = workload.example()

    from pdcompile.passes.costs.symbolic import symbolic_costs
    from pdcompile.report.progress import working

    with working("costs", "capturing at several sizes"):
        found = symbolic_costs(
            workload.model, inputs, example_target=expected, loss_fn=workload.loss_fn
        )
    found = found.at(**sizes) if sizes else found
    return Result(as_written(found), [str(found)])


def sizes_of(text: str) -> dict[str, int]:
    """``b=8,s=512`` as a dict.

    Raises:
        ConfigError: the text has another form.
    """
    found = re.fullmatch(r"b=([1-9]\d*)(?:, *s=([1-9]\d*))?", text.strip())
    if found is None:
        raise ConfigError(
            f"--at {text!r} does not give sizes", remedy=f"write them as {_SIZES}, or as b=8"
        )
    return {name: int(size) for name, size in zip("bs", found.groups(), strict=True) if size}
