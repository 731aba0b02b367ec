"""PipeDream's planning problem: its data, the reader of its files, and the price of a plan.

The model of 'PipeDream: Generalized Pipeline Parallelism for DNN Training' (SOSP 2019, section
3.1): stages are convex parts of the graph, each on several replicas, inside levels of bandwidth.

``graph.txt`` profiles have node lines ``id -- description -- forward_compute_time=…,
backward_compute_time=…, activation_size=…, parameter_size=…[ -- stage_id=…]``, then edges
``\\tsource -- destination``.  The file's milliseconds become seconds; sizes are bytes of a whole
minibatch.

`evaluate` shares nothing with the search: its own graph walk, sets instead of masks, exact sums.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.published.reading import content, refuse_cycles
from benchmarks.published.solution import LevelSolution
from pdcompile.errors import ConfigError, CostError, PlanError

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
        """Raises ConfigError: a level, the memory or the ratio is not a usable number."""
        if not self.levels:
            raise ConfigError("a cluster needs at least one level", where="levels")
        workers = 1
        for k, (count, bandwidth) in enumerate(self.levels):
            where = f"levels[{k}]"
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"{count!r} is not a count of components", where=where)
            if not 0 < bandwidth < math.inf:
                raise ConfigError(f"{bandwidth!r} bytes/s is not a bandwidth", where=where)
            workers *= count
        if workers > MAX_WORKERS:
            raise ConfigError(
                f"{workers} workers are more than {MAX_WORKERS}",
                where="levels",
                remedy="plan for a smaller cluster",
            )
        if self.memory_bytes is not None and not 0 < self.memory_bytes < math.inf:
            raise ConfigError(f"{self.memory_bytes!r} bytes is not a memory limit", where="memory")
        ratio = self.activation_compression
        if ratio is not None and not 0 < ratio < math.inf:
            raise ConfigError(
                f"{ratio!r} is not a compression ratio",
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
    raw = content(path)
    if len(raw) > MAX_CHARACTERS:
        raise CostError(
            f"the file holds more than {MAX_CHARACTERS:,} bytes",
            where=where,
            remedy="give a graph.txt profile",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as wrong:
        raise CostError(
            "the file is not UTF-8 text", where=where, remedy="give a graph.txt profile"
        ) from wrong
    return parse(text, where=where)


def parse(text: str, *, where: str) -> ProfileGraph:
    """Profile from the file's text; `where` is its name.  Raises as `read` does."""
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
        raise CostError("the line is not an edge", where=place, remedy="write: \\tsource -- target")
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
    refuse_cycles([node.id for node in kept], edges, where)
    return ProfileGraph(tuple(kept), edges, tuple(n for n in nodes if n in dropped))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A stage of the innermost level, in pipeline order over the whole network."""

    members: tuple[str, ...]
    replicas: int  # of all levels together
    replicas_per_level: tuple[int, ...]  # outermost first
    compute_seconds: float  # of one replica, for a minibatch
    activation_bytes: float
    parameter_bytes: float
    in_flight: int  # minibatches whose activations and weights a replica holds

    @property
    def memory_bytes(self) -> float:
        return self.in_flight * (self.activation_bytes + self.parameter_bytes)


@dataclass(frozen=True, slots=True)
class PipedreamCost:
    """The plan's bottleneck, seconds per minibatch, its leaves and the workers they take."""

    objective: float
    leaves: tuple[Leaf, ...]

    @property
    def workers(self) -> int:
        return sum(leaf.replicas for leaf in self.leaves)


def evaluate(problem: HierarchyProblem, stages: Sequence[LevelSolution]) -> PipedreamCost:
    """Price nested stages, outermost first, over all levels (with one level: without `inner`).

    Raises:
        PlanError: the stages are no plan for this problem: a node is missing or on two stages,
            an edge points backwards, a level has too many components, or a worker too little
            memory.
    """
    return _PlanCheck(problem).plan(tuple(stages))


class _PlanCheck:
    def __init__(self, problem: HierarchyProblem) -> None:
        self.problem = problem
        nodes = problem.graph.nodes
        self.node = {node.id: node for node in nodes}
        self.consumers: dict[str, set[str]] = {node.id: set() for node in nodes}
        self.producers: dict[str, set[str]] = {node.id: set() for node in nodes}
        for source, target in problem.graph.edges:
            self.consumers[nodes[source].id].add(nodes[target].id)
            self.producers[nodes[target].id].add(nodes[source].id)

    def plan(self, stages: tuple[LevelSolution, ...]) -> PipedreamCost:
        top = len(self.problem.levels) - 1
        objective = self._pipeline(stages, set(), set(self.node), top)
        flat: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
        self._flatten(stages, (), flat)
        workers = [math.prod(per_level) for _, per_level in flat]
        leaves = []
        for s, (names, per_level) in enumerate(flat):
            # Warm-up of 1F1B with replicas (SOSP 2019, section 3.2): this stage and all behind
            # it work at once, spread over this stage's replicas.
            in_flight = -(-sum(workers[s:]) // workers[s])
            leaf = Leaf(
                members=names,
                replicas=workers[s],
                replicas_per_level=per_level,
                compute_seconds=self._sum(names, "seconds"),
                activation_bytes=self._sum(names, "activation_bytes"),
                parameter_bytes=self._sum(names, "parameter_bytes"),
                in_flight=in_flight,
            )
            limit = self.problem.memory_bytes
            if limit is not None and leaf.memory_bytes > limit:
                raise PlanError(
                    f"stage {s} needs {leaf.memory_bytes:.0f} bytes, and a worker has {limit:.0f}",
                    where=f"stages[{s}]",
                )
            leaves.append(leaf)
        return PipedreamCost(objective, tuple(leaves))

    def _pipeline(
        self, stages: tuple[LevelSolution, ...], before: set[str], inside: set[str], depth: int
    ) -> float:
        """Seconds of one component of level `depth` that runs `inside` after `before`."""
        count, bandwidth = self.problem.levels[depth]
        within = math.prod(n for n, _ in self.problem.levels[:depth])
        if not stages:
            raise PlanError("there is no stage", where=f"level {depth}")
        if any(type(s.replicas) is not int or s.replicas < 1 for s in stages):
            raise PlanError("a stage has no replica", where=f"level {depth}")
        if sum(stage.replicas for stage in stages) > count:
            raise PlanError(f"more than {count} components are used", where=f"level {depth}")
        if self.problem.straight and any(stage.replicas > 1 for stage in stages):
            raise PlanError("a straight pipeline has no replicas", where=f"level {depth}")
        covered = [str(name) for stage in stages for name in stage.members]
        if len(covered) != len(set(covered)) or set(covered) != inside:
            raise PlanError("the stages do not hold every node once", where=f"level {depth}")
        worst = 0.0
        done = set(before)
        entry = 0.0
        for place, stage in enumerate(stages):
            names = {str(name) for name in stage.members}
            if not names:
                raise PlanError("a stage is empty", where=f"level {depth}")
            start, done = set(done), done | names
            late = [n for n in names if not self.producers[n] <= done]
            if late:
                raise PlanError(f"{min(late)!r} runs before its inputs", where=f"level {depth}")
            if depth:
                alone = self._pipeline(stage.inner, start, names, depth - 1)
            elif stage.inner:
                raise PlanError("there are more levels than the cluster has", where="level 0")
            else:
                alone = self._sum(stage.members, "seconds")
            m = stage.replicas
            reduced = 4 * (m - 1) * self._sum(stage.members, "parameter_bytes") / (bandwidth * m)
            if place == 0:
                reduced /= within  # a component's workers share the first stage's exchange
            exit_bytes = self._boundary(done)
            worst = max(worst, (alone + reduced) / m)
            ratio = self.problem.activation_compression
            if place and ratio is not None:
                worst = max(worst, 2 * max(entry, exit_bytes) / (bandwidth * m) / ratio)
            entry = exit_bytes
        return worst

    def _boundary(self, done: set[str]) -> float:
        """Bytes at the cut after `done`: its maximal nodes, and what they augment."""
        if len(done) == len(self.node):
            return 0.0
        counted = set()
        for name in done:
            if self.consumers[name] & done:
                continue
            history = {name}
            stack = [name]
            while stack:
                for producer in self.producers[stack.pop()]:
                    if producer not in history:
                        history.add(producer)
                        stack.append(producer)
            counted.add(name)
            counted |= {n for n in history - {name} if not self.consumers[n] <= history}
        return math.fsum(self.node[name].activation_bytes for name in counted)

    def _sum(self, names: Sequence[int | str], amount: str) -> float:
        return math.fsum(getattr(self.node[str(name)], amount) for name in names)

    def _flatten(
        self,
        stages: tuple[LevelSolution, ...],
        above: tuple[int, ...],
        found: list[tuple[tuple[str, ...], tuple[int, ...]]],
    ) -> None:
        for stage in stages:
            here = (*above, stage.replicas)
            if stage.inner:
                self._flatten(stage.inner, here, found)
            else:
                found.append((tuple(str(name) for name in stage.members), here))
