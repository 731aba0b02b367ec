"""``pdcompile dump``: the stages as source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pdcompile.cli.options import Flags, Target, verb, written_to
from pdcompile.cli.output import Result
from pdcompile.files import capture_beside


@verb()
def dump(
    target: Target,
    flags: Flags,
    output: Annotated[Path, written_to("Where the files go.", "FOLDER")] = Path("stages"),
) -> Result:
    """Write one readable nn.Module a stage: stage_0.py, stage_1.py, and pipeline.py to run them.

    Read them, edit them, and run the folder (what was edited is never written over):

      pdcompile run TARGET --sources stages/ --allow-edited

    Example:

      pdcompile dump examples/gpt.py:build --plan plan.json -o stages/
    """
    from pdcompile.cli.options import compiled

    plan = flags.said.get("plan", output / "plan.json")
    workload, made = compiled(target, flags, capture_file=capture_beside(plan))
    made.dump(str(output), workload.model)
    files = {name: text.count("\n") for name, text in sorted(made.sources.files.items())}
    shown = (f"{output / name}  {lines} lines" for name, lines in files.items())
    document = {"status": "done", "folder": str(output), "lines": files}
    return Result(document, shown)
