"""``pdcompile dump``: the stages as source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdcompile.cli.options import Flags, Target, verb, written_to
from pdcompile.cli.output import Result
from pdcompile.files import capture_beside


@verb()
def dump(
    target: Target,
    flags: Flags,
    place: Annotated[Path, written_to("Where the files go.", "FOLDER")] = Path("stages"),
    torch: Annotated[
        bool,
        typer.Option(
            "--torch", help="Write train.py too, which trains with torch.distributed.pipelining."
        ),
    ] = False,
) -> Result:
    """Write one readable nn.Module a stage: stage_0.py, stage_1.py, and pipeline.py to run them.

    Read them, edit them, and run the folder (what was edited is never written over):

      pdcompile run TARGET --sources stages/ --allow-edited

    With --torch they run without pdcompile too: train.py trains three steps with torch's own
    schedule and exits 1 unless losses and weights equal those of plain PyTorch within a tolerance
    that it prints. Tied weights and skip connections are handled there; what torch would get wrong
    is refused by name.

    Examples:

      pdcompile dump examples/gpt.py:build --plan plan.json -o stages/

      pdcompile dump examples/gpt.py:build --cluster 1x2 --torch -o stages/

      torchrun --nproc-per-node=2 stages/train.py
    """
    from pdcompile.cli.options import compiled
    from pdcompile.passes.codegen import write
    from pdcompile.passes.export.torch_pipelining import refuse, unlike_torchs, with_script

    if torch and (given := flags.given().get("plan")):
        refuse(unlike_torchs(given))
    plan = flags.said.get("plan", place / "plan.json")
    workload, made = compiled(target, flags, capture_file=capture_beside(plan))
    sources, notes = made.sources, tuple[str, ...]()
    if torch:
        sources, notes = with_script(
            made.capture, made.plan, sources, workload.model, target, place
        )
    write(sources, place, model=workload.model)
    files = {name: text.count("\n") for name, text in sorted(sources.files.items())}
    shown = [f"{place / name}  {lines} lines" for name, lines in files.items()]
    shown += [f"note: {note}" for note in notes]
    document = {"status": "done", "folder": str(place), "lines": files, "notes": notes}
    return Result(document, shown)
