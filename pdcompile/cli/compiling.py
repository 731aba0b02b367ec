"""From a target to a compiled plan: what `plan`, `dump` and `verify` have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pdcompile.errors import ConfigError
from pdcompile.steps import collecting_seldom

if TYPE_CHECKING:
    from pdcompile.cli.options import Flags, GivenPlan
    from pdcompile.compiled import Compiled
    from pdcompile.workload import Workload


def compiled(
    target: str, flags: Flags, given: GivenPlan | None = None, **more: object
) -> tuple[Workload, Compiled]:
    """Load the target and run every pass on it, with a bar or lines on stderr.

    Raises:
        PdcompileError: whatever the target or a pass refuses.
    """
    from pdcompile.workload import load_target

    flags.check()
    if given is not None:
        flags, files = given.apply(flags)
        more |= files
    # As many threads as torchrun gives a process: the times are to be those of a run.  Read when
    # torch is imported, which the target does.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with collecting_seldom():
        workload = load_target(target)
        options = flags.to_options(workload, progress=True, **more)
        inputs, expected = workload.example()

        # The compiler is imported last: a mistake in the target is reported at once.
        from pdcompile import driver
        from pdcompile.batch import example_call

    flat = example_call(workload.model, inputs, expected)
    return workload, driver.build(workload.model, flat, options)


def write_text(path: Path, text: str) -> None:
    """Write a result, parents included.

    Raises:
        ConfigError: it cannot be written, with the system's reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the file: {error.strerror}",
            where=str(path),
            remedy="choose another place with -o",
        ) from error
