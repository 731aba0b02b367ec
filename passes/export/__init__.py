"""Plans for other people's runtimes: files, and what to know of them.

Each target is one row of `KINDS`, with a function from a `Subject` to an `Exported`.  What a target
would get wrong is refused by name.
"""

from __future__ import annotations

from pdcompile.passes.export.subject import Exported, Subject
from pdcompile.passes.export.targets import KINDS, check_plan

__all__ = ["KINDS", "Exported", "Subject", "check_plan", "export"]


def export(subject: Subject, to: str) -> Exported:
    """The files of one target, one of `KINDS`.

    Raises:
        ConfigError: the target cannot express this plan or model; names what, and what can.
    """
    return KINDS[to].make(subject)
