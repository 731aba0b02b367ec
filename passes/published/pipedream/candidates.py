"""Candidates: states worth a search when there are too many down-closed sets to take them all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np

from pdcompile.passes.partition.lattice import members
from pdcompile.passes.published.pipedream.states import Dag, membership

ROUND = 1.2e9  # nanoseconds of one core that one search may take, roughly
MOST = 1500  # states in one search
ORDERS = 6


class Pool:
    """States of several linear orders, then also those around the cuts of the best plan."""

    def __init__(self, dag: Dag, price: Callable[[int], float], seed: int) -> None:
        self.dag = dag
        self.random = random.Random(seed)
        self.size = MOST
        while self.size > 40 and price(self.size) > ROUND:
            self.size = self.size * 9 // 10
        self._bytes: dict[int, float] = {}
        self.chains = sorted((self._chain(kind) for kind in range(ORDERS)), key=self._crossing)
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
        """At most `count` sets, evenly over the work, the smallest boundaries first."""
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

    def _chain(self, kind: int) -> list[int]:
        """The prefixes of one linear order: the file's, depth first, or fewest open bytes."""
        dag = self.dag
        down_set, found = 0, []
        ready = [v for v in range(dag.size) if not dag.before[v]]
        recent = dict.fromkeys(ready, 0)
        while ready:
            if kind == 0:
                v = min(ready)
            elif kind == 1:
                v = max(ready, key=lambda u: (recent[u], -u))
            else:
                noise = 0.0 if kind == 2 else 0.5
                v = min(ready, key=lambda u: (self._opened(down_set, u, noise), -recent[u], u))
            ready.remove(v)
            down_set |= 1 << v
            found.append(down_set)
            for u in members(dag.after[v]):
                if not dag.before[u] & ~down_set:
                    ready.append(u)
                    recent[u] = len(found)
        return found

    def _opened(self, down_set: int, v: int, noise: float) -> float:
        """Bytes that running v next keeps, less those that it lets go."""
        dag = self.dag
        change = float(dag.activations[v]) if dag.after[v] else 0.0
        larger = down_set | 1 << v
        for u in members(dag.before[v]):
            if not dag.after[u] & ~larger:
                change -= float(dag.activations[u])
        return change * (1 + noise * self.random.uniform(-1, 1)) if noise else change
