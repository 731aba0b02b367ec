"""Entries of published files with their places, and what is refused in all of them alike."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from pdcompile.errors import CostError
from pdcompile.files import read_limited
from pdcompile.passes.partition.lattice import by_priority, neighbours

MAX_DEVICES = 65_536
SMALLEST = 1e-100  # a positive number below it has nothing to say beside any other


def content(path: str | os.PathLike[str]) -> bytes:
    """The file's bytes.

    Raises:
        CostError: it cannot be read.
    """
    try:
        return read_limited(path)
    except OSError as wrong:
        reason = (wrong.strerror or "unreadable").lower()
        raise CostError(
            f"the file cannot be read: {reason}", where=str(path), remedy="check the path"
        ) from wrong


class Place:
    """An object of a JSON file, with its place for error messages.

    `keys` names what the top of the file holds; numbers above `largest` are refused.
    """

    def __init__(
        self, data: Any, file: str, path: str = "", *, keys: str = "", largest: float
    ) -> None:
        self.file, self.path, self.largest = file, path, largest
        if not isinstance(data, dict):
            remedy = "write an object" + (f" with {keys}" if keys else "")
            raise CostError(f"{_short(data)} is not an object", where=self.where, remedy=remedy)
        self.data: dict[str, Any] = dict(data)

    @property
    def where(self) -> str:
        return f"{self.file}: {self.path}" if self.path else self.file

    def _child(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def wrong(self, key: str, message: str, remedy: str) -> CostError:
        return CostError(message, where=f"{self.file}: {self._child(key)}", remedy=remedy)

    def get(self, key: str) -> Any:
        if key not in self.data:
            raise CostError(f"key {key!r} is missing", where=self.where, remedy=f"add {key!r}")
        return self.data[key]

    def inside(self, key: str) -> Place:
        return Place(self.get(key), self.file, self._child(key), largest=self.largest)

    def each(self, key: str, name: str | None = None) -> list[Place]:
        """The objects of a list; `name` is shown instead of .key."""
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, f"{_short(value)} is not a list", "write a list of objects")
        shown = self._child(key) if name is None else f"{self.path}{name}"
        return [
            Place(item, self.file, f"{shown}[{i}]", largest=self.largest)
            for i, item in enumerate(value)
        ]

    def nodes(self) -> list[Place]:
        """The objects under "nodes", at least one."""
        places = self.each("nodes")
        if not places:
            raise self.wrong("nodes", "there is no node", "add the graph's nodes")
        return places

    def number(self, key: str, default: float | None = None) -> float:
        value = default if default is not None and key not in self.data else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"{_short(value)} is not a number", "write a number")
        if not 0 <= value <= self.largest:  # also refuses NaN
            raise self.wrong(
                key,
                f"{_short(value)} is not between 0 and {self.largest:g}",
                "write what was measured, in one unit everywhere",
            )
        return float(value) if value >= SMALLEST else 0.0

    def limit(self, key: str) -> float:
        """A positive number; null or infinity: unlimited."""
        value = self.get(key)
        if value is None or value == math.inf:
            return math.inf
        if not self.number(key):
            raise self.wrong(key, "0 is not a limit", "write a positive number, or null for none")
        return float(value)

    def count(self, key: str, least: int, most: int) -> int:
        value = self.get(key)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not least <= value <= most:
            raise self.wrong(
                key,
                f"{_short(value)} is not a whole number from {least} to {most}",
                "write how many there are",
            )
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if value not in (0, 1) or isinstance(value, float):
            raise self.wrong(key, f"{_short(value)} is neither 0 nor 1", "write true or false")
        return bool(value)

    def name(self, key: str, *, empty: bool = False) -> int | str:
        value = self.get(key)
        empty = empty or value != ""
        if isinstance(value, bool) or not isinstance(value, int | str) or not empty:
            raise self.wrong(
                key, f"{_short(value)} is not a name", "write a whole number or a text"
            )
        return value

    def ends(self, index: dict[Any, int], kind: type = object) -> tuple[int, int]:
        """The numbers of the nodes that an edge names; `kind` str: as texts."""
        found = []
        for key in ("sourceId", "destId"):
            name = self.name(key, empty=True)
            position = index.get(str(name) if kind is str else name)
            if position is None:
                raise self.wrong(key, f"there is no node with id {name!r}", "add it to nodes")
            found.append(position)
        return found[0], found[1]


def numbered(ids: Iterable[Hashable], file: str) -> dict[Any, int]:
    """The position of every node by its id; a repeated one is refused."""
    index: dict[Any, int] = {}
    for i, name in enumerate(ids):
        if index.setdefault(name, i) != i:
            raise CostError(
                f"id {name!r} appears twice",
                where=f"{file}: nodes[{index[name]}] and nodes[{i}]",
                remedy="give every node its own id",
            )
    return index


def refuse_cycles(names: Sequence[str], arcs: Iterable[tuple[int, int]], where: str) -> None:
    """Raises CostError: the arcs have a cycle, which is named."""
    before, after = neighbours(len(names), arcs)
    done = set(by_priority(before, after, range(len(names))))
    if len(done) == len(names):
        return
    # Every node that is left has a predecessor that is left: walking back ends in a circle.
    walk: dict[int, None] = {}
    v = next(v for v in range(len(names)) if v not in done)
    while v not in walk:
        walk[v] = None
        v = next(u for u in before[v] if u not in done)
    path = list(walk)
    circle = [names[u] for u in [v, *reversed(path[path.index(v) :])]]
    text = " -> ".join(circle if len(circle) <= 12 else [*circle[:6], "…", *circle[-5:]])
    raise CostError(
        f"the edges form a cycle: {text}",
        where=where,
        remedy="remove one of these edges; a graph of operators has no cycles",
    )


def _short(data: Any) -> str:
    text = "null" if data is None else repr(data)
    return text if len(text) <= 60 else text[:57] + "..."
