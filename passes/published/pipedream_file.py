"""ProfileGraph and HierarchyProblem: PipeDream's planning problem, as its files state it.

The model of 'PipeDream: Generalized Pipeline Parallelism for DNN Training' (SOSP 2019, section
3.1): stages are convex parts of the graph, each on several replicas, inside levels of bandwidth.

Its ``graph.txt`` profiles have node lines ``id -- description -- forward_compute_time=…,
backward_compute_time=…, activation_size=…, parameter_size=…[ -- stage_id=…]``, then edges
``\\tsource -- destination``.
The file's milliseconds become seconds; sizes are bytes of a whole minibatch.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pdcompile.errors import ConfigError, CostError

LARGEST = 1e18  # milliseconds or bytes: sums and products stay finite and exact enough
MAX_CHARACTERS = 64_000_000
MILLISECONDS = 1000.0
_NODE = re.compile(r"(\S+) -- (.*?) -- (\w+=.*?)(?: -- stage_id=\S*)?")
_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FORM = "write: id -- description -- " + ", ".join(f"{key}=…" for key in _KEYS)
MAX_WORKERS = 65_536  # of all levels together


@dataclass(frozen=True, slots=True)
class ProfileNode:
    """One measured layer; times in seconds and sizes in bytes, both of a whole minibatch."""

    id: str
    description: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float  # of all its outputs
    parameter_bytes: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class ProfileGraph:
    """A profile without its inputs and unused tuple entries, nodes in the file's order."""

    nodes: tuple[ProfileNode, ...]
    edges: tuple[tuple[int, int], ...]  # indices into nodes; acyclic, none twice
    dropped: tuple[str, ...] = ()  # ids that carry no cost and take no part


@dataclass(frozen=True, slots=True)
class HierarchyProblem:
    """A profile, and the cluster that it is to be laid out on.

    Levels are (count, bytes per second), innermost first: level 0 joins `count` workers, level 1
    joins `count` such groups, and so on.  Idle workers are always allowed.
    """

    graph: ProfileGraph
    levels: tuple[tuple[int, float], ...]
    straight: bool = False  # no replication on any level
    fewer: bool = False  # among plans of equal objective, one with the fewest workers
    memory_bytes: float | None = None  # of one worker; None: no limit
    activation_compression: float | None = 1.0  # divides boundary terms; None: they are ignored

    def __post_init__(self) -> None:
        """Raises ConfigError: a level, the memory or the ratio is no usable number."""
        if not self.levels:
            raise ConfigError("a cluster needs at least one level", where="levels")
        workers = 1
        for k, (count, bandwidth) in enumerate(self.levels):
            where = f"levels[{k}]"
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"{count!r} is no count of components", where=where)
            if not 0 < bandwidth < math.inf:
                raise ConfigError(f"{bandwidth!r} bytes/s is no bandwidth", where=where)
            workers *= count
        if workers > MAX_WORKERS:
            raise ConfigError(
                f"{workers} workers are more than {MAX_WORKERS}",
                where="levels",
                remedy="plan for a smaller cluster",
            )
        if self.memory_bytes is not None and not 0 < self.memory_bytes < math.inf:
            raise ConfigError(f"{self.memory_bytes!r} bytes is no memory limit", where="memory")
        ratio = self.activation_compression
        if ratio is not None and not 0 < ratio < math.inf:
            raise ConfigError(
                f"{ratio!r} is no compression ratio",
                where="activation compression",
                remedy="give a positive number (1 = none), or none to ignore the boundaries",
            )

    @property
    def workers(self) -> int:
        return math.prod(count for count, _ in self.levels)


def read(path: str | os.PathLike[str]) -> ProfileGraph:
    """The profile without what carries no cost: sources named ``Input…``, then ``__getitem__…``
    that nobody uses.

    Raises:
        CostError: the file cannot be read, a line has another form, a number is negative or not
            finite, an id is missing or repeated, there is a cycle, or nothing is left to place;
            names the line.
    """
    where = str(path)
    try:
        if os.path.getsize(path) > MAX_CHARACTERS:
            raise CostError(
                f"the file holds more than {MAX_CHARACTERS:,} bytes",
                where=where,
                remedy="give a graph.txt profile",
            )
        text = Path(path).read_text(encoding="utf-8")
    except OSError as wrong:
        reason = (wrong.strerror or "unreadable").lower()
        raise CostError(
            f"the file cannot be read: {reason}", where=where, remedy="check the path"
        ) from wrong
    except UnicodeDecodeError as wrong:
        raise CostError(
            "the file is no UTF-8 text", where=where, remedy="give a graph.txt profile"
        ) from wrong
    return parse(text, where=where)


def parse(text: str, *, where: str) -> ProfileGraph:
    """From the file's text; `where` is its name.  Raises as `read` does."""
    nodes: dict[str, ProfileNode] = {}
    ends: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{where}:{number}"
        if not line.strip():
            continue
        if line[0] == "\t":
            ends.setdefault(_edge(line, place), number)
        else:
            node = _node(line, place)
            if node.id in nodes:
                raise CostError(
                    f"id {node.id!r} appears twice",
                    where=place,
                    remedy="give every node its own id",
                )
            nodes[node.id] = node
    for ids, number in ends.items():
        for name in ids:
            if name not in nodes:
                raise CostError(
                    f"there is no node with id {name!r}",
                    where=f"{where}:{number}",
                    remedy="add its line, or take the edge out",
                )
    return _graph(nodes, list(ends), where)


def _node(line: str, place: str) -> ProfileNode:
    found = _NODE.fullmatch(line.rstrip())
    if found is None:
        raise CostError("the line is neither a node nor an edge", where=place, remedy=_FORM)
    name, description, facts = found.groups()
    values: dict[str, str] = {}
    for part in facts.split(", "):
        key, _, value = part.partition("=")
        if key in values:
            raise CostError(f"{key} appears twice", where=place, remedy=_FORM)
        values[key] = value
    missing = [key for key in _KEYS if key not in values]
    if missing:
        raise CostError(f"{missing[0]} is missing", where=place, remedy=_FORM)
    forward, backward, parameters = (
        _number(values[key], key, place) for key in (_KEYS[0], _KEYS[1], _KEYS[3])
    )
    return ProfileNode(
        id=name,
        description=description,
        forward_seconds=forward / MILLISECONDS,
        backward_seconds=backward / MILLISECONDS,
        activation_bytes=_sizes(values["activation_size"], place),
        parameter_bytes=parameters,
    )


def _sizes(text: str, place: str) -> float:
    """One size, or ``[a; b; c]`` of a tuple, which is summed."""
    if not text.startswith("["):
        return _number(text, "activation_size", place)
    if not text.endswith("]"):
        raise CostError("activation_size has no closing bracket", where=place, remedy=_FORM)
    inside = text[1:-1].strip()
    parts = inside.split(";") if inside else []
    return math.fsum(_number(part.strip(), "activation_size", place) for part in parts)


def _number(text: str, key: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LARGEST or "_" in text:
        raise CostError(
            f"{key} is {text!r}", where=place, remedy=f"give a number from 0 to {LARGEST:g}"
        )
    return value


def _edge(line: str, place: str) -> tuple[str, str]:
    source, _, target = line.strip().partition(" -- ")
    if not source or not target or " " in source or " " in target:
        raise CostError("the line is no edge", where=place, remedy="write: \\tsource -- target")
    if source == target:
        raise CostError(f"{source!r} feeds itself", where=place, remedy="take the edge out")
    return source, target


def _graph(nodes: dict[str, ProfileNode], ends: list[tuple[str, str]], where: str) -> ProfileGraph:
    fed = {target for _, target in ends}
    dropped = {
        name
        for name, node in nodes.items()
        if name not in fed and node.description.startswith("Input")
    }
    ends = [pair for pair in ends if pair[0] not in dropped]
    # One round, as in the original: an entry that only fed unused entries stays.
    used = {source for source, _ in ends}
    dropped |= {
        name
        for name, node in nodes.items()
        if name not in used and name not in dropped and node.description.startswith("__getitem__")
    }
    kept = [node for name, node in nodes.items() if name not in dropped]
    if not kept:
        raise CostError(
            "there is no node to place", where=where, remedy="add the lines of the layers"
        )
    index = {node.id: k for k, node in enumerate(kept)}
    edges = tuple((index[a], index[b]) for a, b in ends if b not in dropped)
    _refuse_cycles(kept, edges, where)
    return ProfileGraph(tuple(kept), edges, tuple(n for n in nodes if n in dropped))


def _refuse_cycles(
    nodes: list[ProfileNode], edges: tuple[tuple[int, int], ...], where: str
) -> None:
    after: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)
    for source, target in edges:
        after[source].append(target)
        waiting[target] += 1
    ready = [v for v, count in enumerate(waiting) if not count]
    for v in ready:
        for u in after[v]:
            waiting[u] -= 1
            if not waiting[u]:
                ready.append(u)
    if len(ready) == len(nodes):
        return
    left = [v for v, count in enumerate(waiting) if count]
    before = {u: v for v in left for u in after[v] if waiting[u]}
    walk, seen = left[0], set[int]()
    while walk not in seen:  # every node that is left has a predecessor that is left
        seen.add(walk)
        walk = before[walk]
    circle, step = [walk], before[walk]
    while step != walk:
        circle.append(step)
        step = before[step]
    names = " → ".join(nodes[v].id for v in [walk, *reversed(circle)])
    raise CostError(f"there is a cycle: {names}", where=where, remedy="take one of its edges out")
