"""Plans for other people's runtimes: what is exported, and what comes of it.

What a target would get wrong is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from pdcompile.batch import FlatCall
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Sources
from pdcompile.plan import Plan


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a script's model and data: a function of a file, by its path from the script, or of
    an importable module."""

    place: str
    function: str
    is_file: bool

    def __str__(self) -> str:
        return f"{self.place}:{self.function}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A captured model and a plan whose cuts lie between its parts.

    Args:
        capture: as planned, of training and evaluation.
        sources: generated of it.
        source: for scripts.
        model, call: as given to the capture, with their values.
    """

    capture: Capture
    plan: Plan
    sources: Sources
    source: Source
    model: nn.Module
    call: FlatCall


@dataclass(frozen=True, slots=True)
class Exported:
    """Text files by name, and notes for the reader."""

    files: Mapping[str, str]
    notes: tuple[str, ...] = ()


def refused(to: str, message: str, remedy: str) -> ConfigError:
    """The error for what a target cannot express."""
    return ConfigError(message, where=f"--to {to}", remedy=remedy)
