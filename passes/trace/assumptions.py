"""Assumptions: what an attempt to capture a model takes for granted, as data.

An attempt that the model refutes raises `Refuted` with the assumptions to go on with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import CodeType

from pdcompile.errors import TraceError
from pdcompile.passes.trace.refusals import SizeByValues

Site = tuple[tuple[CodeType, int], ...]  # where in the running Python: frames up to the module
Key = tuple[str, int, Site, int]  # module path, its call, where in it, how many times before


@dataclass(frozen=True, slots=True)
class Decision:
    """A branch on a value that only a run can tell, and the op that reads it as a bool."""

    key: Key
    op: str


@dataclass(frozen=True, slots=True)
class Expected:
    """The only value with which the model goes on, and what it raises with the other one."""

    value: bool
    otherwise: str

    def text(self, visits: int) -> str:
        """What the model raises; its words are known of the first visit in a run only."""
        return self.otherwise if visits == 1 else self.otherwise.partition(":")[0]


@dataclass(slots=True)
class Trial:
    """A run that takes `value` for the first read at `site`; `begun`: it has come there."""

    site: Site
    value: bool
    begun: bool = False
    ops: int = 0


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What one attempt takes for granted.

    opaque: paths of modules that become one op each, with the refusal that each is kept for.
    reads: what comes of a value that Python reads, by place; None where both ways go on.
    trial: the outcome that is being tried, to find that out.
    loops: choices by values that Python loops through.
    one_way: branches whose two ways do not fit into one graph.
    rewritten: buffers that some call writes, so that their numbers are no constants.
    sizes_vary: modes in which sizes that depend on values are made up.
    sizes_of_example: such sizes are the example's, where nobody can do without them.
    refusal, first_refusal: why sizes are made up, and why they are the example's.
    one_size: the capture may be of the microbatch size alone.
    short_cuts: where the model looks into its inputs for one, the capture holds for the example.
    watched_draws: generators are compared at every op, to name the line that uses one.
    """

    opaque: Mapping[str, TraceError] = field(default_factory=dict)
    reads: Mapping[Site, Expected | None] = field(default_factory=dict)
    trial: Trial | None = None
    loops: frozenset[Site] = frozenset()
    one_way: frozenset[Site] = frozenset()
    rewritten: frozenset[str] = frozenset()
    sizes_vary: frozenset[bool] = frozenset()
    sizes_of_example: bool = False
    refusal: SizeByValues | None = None
    first_refusal: SizeByValues | None = None
    one_size: bool = False
    short_cuts: bool = False
    watched_draws: bool = False

    def with_opaque(self, opaque: Mapping[str, TraceError]) -> Assumptions:
        """The same with other opaque modules, and nothing assumed of sizes yet."""
        return replace(
            self, opaque=opaque, sizes_vary=frozenset(), sizes_of_example=False,
            refusal=None, first_refusal=None,
        )  # fmt: skip

    def after_size(self, error: SizeByValues, training: bool) -> Assumptions | None:
        """What to assume next where a size depends on values; None where all was tried."""
        if training not in self.sizes_vary:
            return replace(self, sizes_vary=self.sizes_vary | {training}, refusal=error)
        if not self.sizes_of_example:
            return replace(
                self, sizes_vary=frozenset(), sizes_of_example=True, refusal=None,
                first_refusal=error,
            )  # fmt: skip
        return None


class Refuted(Exception):
    """The model is not as assumed; `instead` is what to assume now."""

    def __init__(self, instead: Assumptions) -> None:
        super().__init__()
        self.instead = instead


@dataclass(slots=True)
class Findings:
    """What the runs of one recording came across.

    specialised: line to the value that it has in the example.
    sized: lines where a size is the example's.
    constants: buffers whose numbers are taken as constants.
    written: buffers that are written.
    asked_of_inputs: the model would look into its inputs for a short cut.
    transformed: torch.func was used, whose calls tell the modes apart.
    """

    specialised: dict[str, str] = field(default_factory=dict)
    sized: dict[str, None] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    asked_of_inputs: bool = False
    transformed: bool = False
