"""Cuts: the down-closed sets of a profile after which a pipeline may be cut.

A set is an integer, bit v for node v of the topological order.  A pipeline of convex stages is
a chain of such sets, so a search over all of them covers every pipeline ('PipeDream', SOSP
2019, section 3.1, whose own optimizer only visits those that its walk over antichains finds).
Where they are too many, `Pool` chooses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import or_

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.chain_program import membership as unpacked
from benchmarks.published.linear_orders import Link, down_closed, orders
from benchmarks.published.pipedream_model import ProfileGraph
from pdcompile.passes.partition.lattice import by_priority, members, neighbours, reachable

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Dag:
    """A profile in topological order: sets of nodes as bit masks, amounts as arrays."""

    order: tuple[int, ...]  # [node here] -> index in the profile
    before: tuple[int, ...]  # direct predecessors
    after: tuple[int, ...]  # direct successors
    ancestors: tuple[int, ...]
    descendants: tuple[int, ...]
    seconds: Floats
    parameters: Floats  # bytes
    activations: Floats  # bytes
    exposed: tuple[int, ...]  # ancestors with a consumer that is neither v nor above it

    @property
    def size(self) -> int:
        return len(self.order)

    @property
    def everything(self) -> int:
        return (1 << self.size) - 1

    def lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """(before, after) as lists of nodes."""
        return [members(mask) for mask in self.before], [members(mask) for mask in self.after]

    def boundary(self, down_set: int) -> float:
        """Bytes that PipeDream counts at the cut after `down_set`.

        Its antichain is the set's maximal nodes, augmented by every ancestor of one of them that
        feeds a node outside that one's own history, whether or not that node is in the set.
        """
        counted = 0
        for v in members(down_set):
            if not self.after[v] & down_set:
                counted |= self.exposed[v] | 1 << v
        return math.fsum(self.activations[v] for v in members(counted))


def dag_of(graph: ProfileGraph) -> Dag:
    """The profile's nodes in a topological order that keeps the file's order where it can."""
    size = len(graph.nodes)
    order = by_priority(*neighbours(size, graph.edges), range(size))
    place = {v: k for k, v in enumerate(order)}
    successors = [0] * size
    predecessors = [0] * size
    for source, target in graph.edges:
        successors[place[source]] |= 1 << place[target]
        predecessors[place[target]] |= 1 << place[source]
    ancestors = reachable([members(mask) for mask in predecessors], from_end=False)
    descendants = reachable([members(mask) for mask in successors], from_end=True)
    exposed = [
        sum(1 << u for u in members(ancestors[v]) if successors[u] & ~(ancestors[v] | 1 << v))
        for v in range(size)
    ]
    nodes = [graph.nodes[v] for v in order]
    return Dag(
        order=tuple(order),
        before=tuple(predecessors),
        after=tuple(successors),
        ancestors=tuple(ancestors),
        descendants=tuple(descendants),
        seconds=np.array([node.seconds for node in nodes]),
        parameters=np.array([node.parameter_bytes for node in nodes]),
        activations=np.array([node.activation_bytes for node in nodes]),
        exposed=tuple(exposed),
    )


@dataclass(frozen=True, slots=True)
class Lattice:
    """Down-closed sets, the empty one first, and what adding one node leads to."""

    sets: tuple[int, ...]
    add: NDArray[np.int32]  # [set, node] -> set with that node; −1 where it cannot be added
    boundary: Floats
    eager: tuple[int, ...]  # nodes that are in every set but the empty one that may hold them


def eager_nodes(dag: Dag, *, memory: bool) -> tuple[int, ...]:
    """Nodes that some optimal plan runs as early as it can, so that no cut needs to go before.

    A node without time and parameters can go to the earliest stage that has all its inputs, on
    every level at once: stages keep their times, and the cuts stay a chain.  No boundary grows
    when (a) neither the node nor any ancestor that it augments has bytes, or (b) all its inputs
    feed nothing else and have together at least its bytes: they are maximal before, hence
    counted, and no longer after, and what the node augments, one of them augmented already.
    Where memory counts, only nodes without activation move: (a).
    """
    found = []
    for v in range(dag.size):
        if dag.seconds[v] or dag.parameters[v]:
            continue
        inputs = list(members(dag.before[v]))
        light = not dag.activations[v] and not any(
            dag.activations[u] for u in members(dag.exposed[v])
        )
        only = all(dag.after[u] == 1 << v for u in inputs)
        sums = math.fsum(dag.activations[u] for u in inputs)
        if light or (not memory and inputs and only and sums >= dag.activations[v]):
            found.append(v)
    return tuple(found)


def lattice_of(dag: Dag, limit: int, *, memory: bool) -> Lattice | None:
    """All down-closed sets that `eager_nodes` leaves, or None when there are more than `limit`."""
    eager = eager_nodes(dag, memory=memory)
    links: list[Link] = []
    pull = sum(1 << v for v in eager)
    sets = down_closed(*dag.lists(), limit, eager=pull, links=links)
    if sets is None:
        return None
    add = np.full((len(sets), dag.size), -1, np.int32)
    steps = np.array(links, np.int64).reshape(-1, 3)
    add[steps[:, 0], steps[:, 1]] = steps[:, 2]
    boundary = np.array([dag.boundary(down_set) for down_set in sets])
    return Lattice(tuple(sets), add, boundary, eager)


def undominated(dag: Dag, lattice: Lattice, *, memory: bool) -> list[int]:
    """Down-closed sets among which some optimal plan makes all its cuts, on every level.

    For a node v without time and parameters (and, where memory counts, without activation), the
    map "add v where it can be added" grows with its argument, as does "take v out where nothing
    above it is in" (eager nodes go in and out along with v).  Applied to all cuts of a plan it
    gives a chain again, whose stages have the same times and parameters.  So when it maps the
    sets that are left into themselves and raises no boundary, only its images are needed.  A
    stage that it empties is dropped, which frees workers, and makes a later stage the first one,
    whose terms are the smaller ones.
    """
    free = (dag.seconds == 0) & (dag.parameters == 0)
    if memory:
        free &= dag.activations == 0
    bytes_at = lattice.boundary
    last = lattice.sets.index(dag.everything)
    alive = np.ones(len(lattice.sets), bool)
    changed = True
    while changed:
        changed = False
        for v in np.flatnonzero(free):
            without = np.flatnonzero(lattice.add[:, v] >= 0)
            having = lattice.add[without, v]
            # The empty set stays: every chain starts with it.
            some = alive[without] & (without != 0)
            if some.any() and _maps(alive, bytes_at, without[some], having[some]):
                alive[without[some]] = False
                changed = True
            some = alive[having] & (having != last)
            if some.any() and _maps(alive, bytes_at, having[some], without[some]):
                alive[having[some]] = False
                changed = True
    return [down_set for down_set, kept in zip(lattice.sets, alive, strict=True) if kept]


def _maps(
    alive: NDArray[np.bool_], bytes_at: Floats, source: NDArray[np.int64], image: NDArray[np.int64]
) -> bool:
    return bool(alive[image].all() and (bytes_at[image] <= bytes_at[source]).all())


@dataclass(frozen=True, slots=True)
class CutSegments:
    """Amounts between two cuts i ⊂ j, for the recursion: state 0 is empty, the last is everything.

    `seconds` is inf where state i is no proper subset of state j; the other amounts are 0 there.
    """

    seconds: Floats  # [i, j]
    parameters: Floats  # [i, j], bytes
    held: Floats  # [i, j], bytes of activations and parameters together
    cut: Floats  # [i], bytes at the boundary; 0 at the two ends


def arrange(dag: Dag, sets: Iterable[int]) -> list[int]:
    """The sets in an order in which subsets come first, by work and then by number of nodes."""
    distinct = set(sets) | {0, dag.everything}
    inside = membership(dag, list(distinct))
    work = inside @ dag.seconds
    key = {s: (float(w), s.bit_count(), s) for s, w in zip(distinct, work, strict=True)}
    # Work summed in another order may differ in its last digits: the counts decide first there.
    ordered = sorted(distinct, key=lambda s: key[s])
    position = 0
    scale = float(dag.seconds.sum()) * 1e-12
    while position < len(ordered):
        end = position + 1
        while end < len(ordered) and key[ordered[end]][0] - key[ordered[end - 1]][0] <= scale:
            end += 1
        ordered[position:end] = sorted(ordered[position:end], key=lambda s: (s.bit_count(), s))
        position = end
    return ordered


def membership(dag: Dag, sets: Sequence[int]) -> Floats:
    """[set, node] -> 1 where the node is in the set."""
    return unpacked(sets, dag.size).astype(np.float64)


def segments_of(dag: Dag, sets: Sequence[int]) -> CutSegments:
    """Amounts of all segments between `sets`, which `arrange` has put into order."""
    inside = membership(dag, sets)
    apart = inside.astype(np.float32) @ (1 - inside).astype(np.float32).T
    nested = np.triu(apart == 0, 1)
    amounts = []
    for weights in (dag.seconds, dag.parameters, dag.activations + dag.parameters):
        sums = inside @ weights
        amounts.append(np.where(nested, np.maximum(sums[None, :] - sums[:, None], 0), 0))
    cut = np.array([dag.boundary(s) for s in sets])
    cut[[0, -1]] = 0
    amounts[0][~nested] = np.inf
    return CutSegments(amounts[0], amounts[1], amounts[2], cut)


ROUND = 1.2e9  # nanoseconds of one core that one search may take, roughly
MOST = 1500  # states in one search


class Pool:
    """States of several linear orders, then also those around the cuts of the best plan."""

    def __init__(self, dag: Dag, price: Callable[[int], float], seed: int) -> None:
        self.dag = dag
        self.random = random.Random(seed)
        self.size = MOST
        while self.size > 40 and price(self.size) > ROUND:
            self.size = self.size * 9 // 10
        self._bytes: dict[int, float] = {}
        values = [
            ((v, *members(mask)), float(dag.activations[v])) for v, mask in enumerate(dag.after)
        ]
        lines = orders(*dag.lists(), values, seed, rounds=1)
        chains = (list(accumulate((1 << v for v in line), or_)) for line in lines)
        self.chains = sorted(chains, key=self._crossing)
        self.tried = 0
        self.near: list[int] = []  # around the incumbent's cuts, nearest first
        self.seen: set[int] = set()
        self.reach = 1

    def states(self) -> list[int]:
        """Sets for the next search, at most `size`."""
        chosen = dict.fromkeys([0, self.dag.everything])
        for down_set in self.near[: self.size * 2 // 3]:
            chosen[down_set] = None
        # One order as a whole: its sets all hold one another, and stages of it exist at any size.
        room = self.size - len(chosen)
        for down_set in self._spread(self.chains[0], room // 2):
            chosen[down_set] = None
        chains = [s for chain in self.chains for s in chain if s not in chosen]
        for down_set in self._spread(chains, self.size - len(chosen)):
            chosen[down_set] = None
        return list(chosen)

    def other_order(self) -> list[int] | None:
        """The sets of an order that was not yet searched alone, for when nothing was found."""
        if self.tried == len(self.chains):
            return None
        chain = self.chains[self.tried]
        self.tried += 1
        return self._spread(chain, self.size)

    def refine(self, cuts: Iterable[int], *, better: bool) -> bool:
        """Look closer at the cuts of the latest plan; False when there is nothing new to see."""
        self.reach = 1 if better else self.reach + 1
        around = dict.fromkeys(cuts)
        frontier = list(around)
        share = max(8, self.size // (2 * len(frontier) + 1))
        for cut in frontier:
            around.update(dict.fromkeys(self._neighbours(cut, share)))
        fresh = [s for s in around if s not in self.seen]
        self.seen.update(fresh)
        self.near = list(around)
        return bool(fresh) and self.reach <= 3

    def _neighbours(self, cut: int, share: int) -> list[int]:
        """Sets that differ by a few nodes, and by a node with all that must come with it."""
        found: dict[int, None] = {}
        layer = [cut]
        for _ in range(self.reach + 1):
            wider = []
            for down_set in layer:
                for v in self._ready(down_set):
                    wider.append(down_set | 1 << v)
                for v in members(down_set):
                    if not self.dag.after[v] & down_set:
                        wider.append(down_set & ~(1 << v))
            layer = [s for s in dict.fromkeys(wider) if s not in found]
            if len(layer) > share:
                layer = self.random.sample(layer, share)
            found.update(dict.fromkeys(layer))
        jumps = []
        for v in range(self.dag.size):
            if cut >> v & 1:
                jumps.append(cut & ~(self.dag.descendants[v] | 1 << v))
            else:
                jumps.append(cut | self.dag.ancestors[v] | 1 << v)
        jumps.sort(key=lambda s: ((s ^ cut).bit_count(), s))
        found.update(dict.fromkeys(jumps[: share // 2]))
        return list(found)

    def _ready(self, down_set: int) -> list[int]:
        return [
            v
            for v in range(self.dag.size)
            if not down_set >> v & 1 and not self.dag.before[v] & ~down_set
        ]

    def _spread(self, sets: list[int], count: int) -> list[int]:
        """Sets, at most `count`, evenly over the work, the smallest boundaries first."""
        distinct = list(dict.fromkeys(sets))
        if count <= 0:
            return []
        if len(distinct) <= count:
            return distinct
        work = membership(self.dag, distinct) @ self.dag.seconds
        total = max(float(self.dag.seconds.sum()), 1e-300)
        bins: list[list[int]] = [[] for _ in range(max(1, count // 3))]
        for at in np.argsort(work, kind="stable"):
            place = min(len(bins) - 1, int(work[at] / total * len(bins)))
            bins[place].append(distinct[at])
        for sets_here in bins:
            sets_here.sort(key=self._boundary)
        chosen: list[int] = []
        rank = 0
        while len(chosen) < count:
            chosen.extend(b[rank] for b in bins if rank < len(b))
            rank += 1
        return chosen[:count]

    def _crossing(self, chain: list[int]) -> float:
        """Bytes at the boundaries of an order, on average over its work."""
        work = np.diff(membership(self.dag, [0, *chain]) @ self.dag.seconds)
        return float(work @ np.array([self._boundary(s) for s in chain]))

    def _boundary(self, down_set: int) -> float:
        known = self._bytes.get(down_set)
        if known is None:
            known = self._bytes[down_set] = self.dag.boundary(down_set)
        return known
