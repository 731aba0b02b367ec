"""Account of what a verb would do, without capturing, measuring, planning or writing anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from pdcompile.options import Options
    from pdcompile.workload import Workload


def intended(workload: Workload, options: Options, inputs: Any, expected: Any) -> list[str]:
    """One line for each pass, in their order.

    Raises:
        PdcompileError: what the passes would refuse before they begin.
    """
    from pdcompile.batch import example_call
    from pdcompile.driver import resolved
    from pdcompile.units import format_bytes

    model = workload.model
    flat = example_call(model, inputs, expected)
    options, layout, chosen = resolved(model, flat, options, None)
    parameters = list(model.parameters())
    size = sum(one.numel() * one.element_size() for one in parameters)
    on_meta = ", on the meta device" if any(one.is_meta for one in parameters) else ""
    training = chosen.training
    given = options.plan is not None
    kept = options.capture_file if given else None
    return [
        f"model: {type(model).__name__}, {format_bytes(size)} of parameters{on_meta}",
        f"minibatch: {layout.size} samples in {training.num_microbatches} microbatches",
        f"machines: {len(chosen.cluster.devices)} devices, {chosen.num_stages} stages",
        f"schedule: {'chosen by the planner' if options.schedule == 'auto' else training.schedule}",
        f"capture: {'anew' if kept is None else f'that in {kept}, or anew'}",
        f"costs: {'those of the plan' if given else _shown(options.costs)}",
        f"plan: {'the given one' if given else 'searched'}",
        f"stages: {options.sources or 'generated'}, compared with the model: {options.verify}",
    ]


def show(lines: list[str], writes: Path | None, *, as_json: bool) -> NoReturn:
    """Print the lines, and end the verb."""
    from pdcompile.cli.output import result

    lines = [*lines, f"written: {writes if writes is not None else 'nothing'}"]
    result({"status": "dry run", "would": lines}, "\n".join(lines), as_json=as_json)
    raise typer.Exit


def _shown(costs: Any) -> str:
    return costs if isinstance(costs, str) else type(costs).__name__
