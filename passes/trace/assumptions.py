"""Assumptions: the choices that one attempt at a capture is made under, as data.

An attempt that the model refutes raises `Refuted` with the assumptions for the next attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeAlias

from pdcompile.errors import TraceError
from pdcompile.passes.trace.refusals import SizeByValues

Site = tuple[tuple[CodeType, int], ...]  # a place in the running Python: frames up to the module
# A number that Python made of sizes: (value, dimension), (function, *numbers), or a plain number.
Made: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Expected:
    """The only value with which the model goes on, and the error it raises with the other one."""

    value: bool
    otherwise: str

    def text(self, visits: int) -> str:
        """The error that the model raises; its text is known for the first visit in a run only."""
        return self.otherwise if visits == 1 else self.otherwise.partition(":")[0]


@dataclass(slots=True)
class Trial:
    """A run that takes `value` for the first read at `site`; `begun` once it has got there."""

    site: Site
    value: bool
    begun: bool = False
    ops: int = 0


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The choices that one attempt is made under.

    opaque: paths of modules that become one op each, with the refusal that is the reason.
    reads: the value with which the model goes on, by place of the read; None where both do.
    trial: the value that is being tried, to find that out.
    rewritten: buffers that some call writes, so that their numbers are not constants.
    sizes_vary: modes in which sizes that depend on values are made up.
    refusal: the refusal that led to made-up sizes.
    one_size: the capture may be for the microbatch size alone.
    drawing: functions that draw from numpy's or Python's generator: (module, name in it).
    """

    opaque: Mapping[str, TraceError] = field(default_factory=dict)
    reads: Mapping[Site, Expected | None] = field(default_factory=dict)
    trial: Trial | None = None
    rewritten: frozenset[str] = frozenset()
    sizes_vary: frozenset[bool] = frozenset()
    refusal: SizeByValues | None = None
    one_size: bool = False
    drawing: frozenset[tuple[str, str]] = frozenset()


class Refuted(Exception):
    """Raised where the model is not as assumed; `instead` holds the next assumptions."""

    def __init__(self, instead: Assumptions) -> None:
        super().__init__()
        self.instead = instead


class Undecided(Refuted):
    """Raised where the model reads a value at a place where both have yet to be tried, from which
    the next assumptions follow."""

    def __init__(self, site: Site) -> None:
        Exception.__init__(self)
        self.site = site


@dataclass(slots=True)
class Findings:
    """Facts that the runs of one recording found.

    holds_for: for each line that asked for a value of the inputs, or for something of the process
        (a rank, the time), that the recording holds for the answer alone.
    constants: buffers whose numbers are taken as constants.
    written: buffers that are written.
    rounded: notes on what eager may round otherwise.
    answers: of comparisons and hashes of sizes.
    assigned: the line that assigned to each attribute first: (id of module, name) -> source.
    """

    holds_for: dict[str, str] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    rounded: set[str] = field(default_factory=set)
    answers: dict[Made, Any] = field(default_factory=dict)
    assigned: dict[tuple[int, str], str] = field(default_factory=dict)
