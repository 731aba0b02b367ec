"""Data of a report's page: made once from a plan, and embedded in the page as JSON.

Texts are finished: they have their units, and are plain text, never markup.  Seconds count from
the start of the timeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number; `tone` is "bad" where it says that something is wrong."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of finished texts; `numbers` says which columns are set to the right."""

    head: tuple[str, ...]
    numbers: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @staticmethod
    def of(table: Table, note: str = "") -> Grid:
        """A table of the terminal; columns that are set to the right hold numbers."""
        columns = table.columns
        return Grid(
            tuple(str(column.header) for column in columns),
            tuple(column.justify == "right" for column in columns),
            tuple(zip(*(map(str, one.cells) for one in columns), strict=True)),
            note,
        )


@dataclass(frozen=True, slots=True)
class Lane:
    """The compute of one rank.

    `bars`: (index into kinds, stage, minibatch, microbatch, number shown or −1, start, seconds).
    """

    rank: int
    measured: bool
    bars: tuple[tuple[int, int, int, int, int, float, float], ...]


@dataclass(frozen=True, slots=True)
class Lanes:
    """The timeline: predicted lanes, each followed by its measured one where there is a run."""

    kinds: tuple[str, ...]
    lanes: tuple[Lane, ...]
    seconds: float
    minibatches: tuple[tuple[int, float, float], ...]  # number, first start, last end
    shown: int  # the minibatch that the page opens with
    numbered: str


@dataclass(frozen=True, slots=True)
class MapNode:
    """Modules of one stage that the graph draws as one box, `row` from the top of its column."""

    stage: int
    row: int
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class MapEdge:
    """Values that go from one node to another; `label` is their size where they cross stages."""

    source: int
    target: int
    label: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ModelMap:
    """The model as a graph, a column a stage."""

    columns: tuple[tuple[str, str], ...]  # stage and ranks, what it holds
    nodes: tuple[MapNode, ...]
    edges: tuple[MapEdge, ...]
    note: str


@dataclass(frozen=True, slots=True)
class MemoryLane:
    """Memory of one rank: at its peak by group, and over time, as (second, bytes a group …)."""

    rank: int
    limit_bytes: int | None
    limit: str
    peak: str
    share: str
    over: bool
    peak_bytes: tuple[int, ...]
    points: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryLanes:
    """Memory of all ranks; curves of those that are nearest to their limits."""

    groups: tuple[str, ...]
    seconds: float
    lanes: tuple[MemoryLane, ...]
    ledger: Grid
    note: str = ""


@dataclass(frozen=True, slots=True)
class Strip:
    """One bar with words: `colour` names a meaning of the palette, `fraction` is of the whole."""

    label: str
    value: str
    fraction: float
    colour: str


@dataclass(frozen=True, slots=True)
class Strips:
    """Bars that compare, with a sentence."""

    sentence: str
    strips: tuple[Strip, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Binding:
    """Tables of `explain`; None of them where the plan has no problem."""

    sentence: str
    stages: Grid | None = None
    cuts: Grid | None = None


@dataclass(frozen=True, slots=True)
class PageData:
    """All of a report."""

    title: str
    subtitle: str
    tiles: tuple[Tile, ...]
    limits: tuple[str, ...]  # sentences: what limits the plan
    proof: str
    certificate: str
    timeline: Lanes
    critical: Strips
    model: ModelMap | None  # None where the plan has no problem
    stages: Grid
    memory: MemoryLanes
    traffic: Strips
    binding: Binding
    measured: Grid | None
    notes: tuple[str, ...]
    colours: dict[str, str]
    stage_colours: tuple[str, ...]
