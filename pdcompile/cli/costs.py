"""``pdcompile costs``: FLOPs and bytes of every op in closed form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pdcompile.cli.app import app
from pdcompile.cli.options import AsJson, Target

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pdcompile.passes.costs.symbolic import SymbolicCosts

_SIZES = "b=8,s=512"


@app.command()
def costs(
    target: Target,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar=_SIZES, help="Give numbers for these sizes instead."),
    ] = None,
    as_json: AsJson = False,
) -> None:
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

    from pdcompile.cli.output import result, stdout
    from pdcompile.passes.costs.symbolic import symbolic_costs
    from pdcompile.report.progress import working

    with working("costs", "capturing at several sizes"):
        found = symbolic_costs(
            workload.model, inputs, example_target=expected, loss_fn=workload.loss_fn
        )
    if at is not None:
        found = found.at(**sizes)
    shown = (*_shown(stdout(), found), "\n".join(found.summary()))
    result(json.loads(found.to_json()), *shown, as_json=as_json)


def sizes_of(text: str) -> dict[str, int]:
    """``b=8,s=512`` as a dict.

    Raises:
        ConfigError: the text has another form.
    """
    from pdcompile.errors import ConfigError

    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in ("b", "s") or name in found or not number.isdecimal():
            raise ConfigError(
                f"--at {text!r} does not give sizes", remedy=f"write them as {_SIZES}, or as b=8"
            )
        found[name] = int(number)
    if "b" not in found:
        raise ConfigError(f"--at {text!r} gives no microbatch size", remedy=f"as in {_SIZES}")
    return found


def _rows(found: SymbolicCosts) -> list[tuple[str, ...]]:
    from pdcompile.passes.costs.symbolic import shown_bytes, shown_flops

    return [
        (
            op.name, " x ".join(map(str, op.shape)), shown_flops(op.flops),
            shown_bytes(op.output_bytes), shown_bytes(op.saved_bytes),
            "" if op.symbolic else "concrete",
        )
        for op in found.ops
    ]  # fmt: skip


def _shown(console: Console, found: SymbolicCosts) -> Iterator[RenderableType]:
    """A table where its lines fit, else a few lines for each op: formulas are not cut."""
    from rich.text import Text

    from pdcompile.report import labels

    rows = _rows(found)
    marked = any(row[-1] for row in rows)
    heads = ("op", "shape", ">forward", ">output", ">saved", *([""] if marked else []))
    table = labels.table(*heads)
    for row in rows:
        table.add_row(*map(Text, row[: len(heads)]))
    unbounded = console.options.update(width=10_000)
    if console.measure(table, options=unbounded).maximum <= console.width:
        yield table
        return
    for name, shape, flops, output, saved, mark in rows:
        yield f"{name}  {shape}{f'  {mark}' if mark else ''}"
        for line in (f"forward {flops}", f"output {output}", f"saved for backward {saved}"):
            yield f"    {line}"
