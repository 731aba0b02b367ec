"""Plans for other people's runtimes: what is exported, and what comes of it.

What a target would get wrong is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from pdcompile.batch import FlatCall
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Sources
from pdcompile.plan import Plan

#: text files by name, and notes for the reader
Exported: TypeAlias = tuple[Mapping[str, str], Iterable[str]]
#: what a target would get wrong, and what to do instead
Refusal: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Subject:
    """A captured model and a plan whose cuts lie between its parts.

    Args:
        capture: as planned, of training and evaluation.
        sources: generated of it.
        target: of the model and its data, as a script imports it: a file by its path from there.
        model, call: as given to the capture, with their values.
    """

    capture: Capture
    plan: Plan
    sources: Sources
    target: str
    model: nn.Module
    call: FlatCall
