"""``pdcompile verify``: do the stages compute what the model computes?"""

from __future__ import annotations

from pdcompile.cli.options import Flags, Target, verb
from pdcompile.cli.output import EXIT_DIFFERENT, Result


@verb()
def verify(target: Target, flags: Flags) -> Result:
    """Compare the stages with the model in plain PyTorch, in one process, bit for bit.

    Compared are outputs, loss, the gradient of every parameter and every buffer, in training
    and in evaluation: two steps, each on a microbatch of its own, the second with updated
    weights and with the buffers that the first one wrote. A difference is named by the first
    op that computes something else, with your line and the line of the stage's file.

    Notes list what differs from one full-batch step on purpose: batch norm sees microbatches,
    a loss that is not linear in the batch, random numbers, and a loss_reduction that does not
    fit the loss.

    The source of every stage is also compared with the captured graph op by op. Of a model that is
    too large for this machine, or on the meta device, that is all.

    Exit codes: 0 all equal, 1 edited sources compute something else, 2 bad input, or generated
    stages that differ (please report that), 3 no plan within the limits.

    Examples:

      pdcompile verify examples/gpt.py:build --cluster 1x2

      pdcompile verify examples/gpt.py:build --sources stages/ --allow-edited
    """
    from rich.text import Text

    from pdcompile.cli.options import compiled

    _, made = compiled(target, flags, verify="full")
    found = made.verification
    assert found is not None, "verify='full' always compares"
    style = "bold red" if found.differences else "yellow" if found.unverified else "green"
    verdict, *rest = str(found).splitlines()
    shown = [Text(verdict, style=style), *map(Text, rest)]
    document = {
        "status": "done",
        "equal": not found.differences,
        "differences": len(found.differences),
        "first": found.places,
        "verification": found,
        "text": str(found),
    }
    return Result(document, shown, exit_code=EXIT_DIFFERENT if found.differences else 0)
