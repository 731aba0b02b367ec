"""States of Piper's search: down-closed sets of nodes as bit masks, smaller ones first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.published import linear_orders
from benchmarks.published.piper.menus import Floats, Items, Menu
from benchmarks.published.piper_model import MenuProblem
from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.lattice import members


class Space:
    """States, in an order in which larger ideals come later."""

    def __init__(self, problem: MenuProblem, masks: Sequence[int]) -> None:
        self.problem = problem
        self.masks = list(masks)
        self.has = np.zeros((len(masks), len(problem.nodes)))
        for i, mask in enumerate(masks):
            self.has[i, members(mask)] = 1.0
        self._at = {mask: i for i, mask in enumerate(masks)}
        self._covers: dict[int, list[int]] = {}
        _, after = neighbours(problem)
        self._gives = [sum(1 << u for u in children) for children in after]

    def covers(self, j: int) -> list[int]:
        """The states below j with no other state between."""
        found = self._covers.get(j)
        if found is None:
            found = self._covers[j] = self._largest_below(j)
        return found

    def inside(self, i: int, j: int) -> bool:
        """Is i below j?"""
        return i != j and not self.masks[i] & ~self.masks[j]

    def _largest_below(self, j: int) -> list[int]:
        mask = self.masks[j]
        tops = [v for v in members(mask) if not self._gives[v] & mask]
        near = [self._at.get(mask & ~(1 << v), -1) for v in tops]
        if -1 not in near:
            return near  # every ideal one node smaller is a state
        found: list[int] = []
        for h in range(j - 1, -1, -1):
            if self.inside(h, j) and not any(self.inside(h, other) for other in found):
                found.append(h)
        return found


def in_flight(problem: MenuProblem, widths: Sequence[int]) -> list[int]:
    """Microbatches in flight of each stage of a pipeline, from its widths."""
    later = 0
    found = []
    for width in reversed(widths):
        later += width
        found.append(-(-later // width))
    return found[::-1]


def options_of(space: Space, menu: Menu, i: int, j: int) -> list[Floats]:
    """Options of each node of j ∖ i: (seconds, moving, first) of its variants with all edges."""
    found = []
    for v in members(space.masks[j] & ~space.masks[i]):
        item = menu.items[v]
        assert item is not None
        options = entered(space.problem, item, space.masks[i])
        assert options is not None
        found.append(left(space.problem, item, options, space.masks[j]))
    return found


def entered(problem: MenuProblem, item: Items | None, before: int) -> Floats | None:
    if item is None:
        return None
    seconds = item.seconds
    for u, more in item.entering:
        if before >> u & 1:
            seconds = seconds + more / problem.bytes_per_second
    return np.stack([seconds, item.moving, item.first])


def left(problem: MenuProblem, item: Items, options: Floats, after: int) -> Floats:
    for w, more in item.leaving:
        if not after >> w & 1:
            options = options + np.stack([more / problem.bytes_per_second, more * 0, more * 0])
    return options


def all_ideals(problem: MenuProblem, limit: int) -> list[int] | None:
    """Every ideal, or None when there are more than `limit`."""
    return lattice.down_closed(*neighbours(problem), limit)


def orders_of(problem: MenuProblem, seed: int) -> list[list[int]]:
    """Topological orders: as in the file, early, late, depth first, cheapest cut, random ones."""
    values = [((edge.source, edge.target), edge.bytes) for edge in problem.edges]
    return list(linear_orders.orders(*neighbours(problem), values, seed, rounds=1))


def ideals_around(
    problem: MenuProblem, cuts: Iterable[int], order: Sequence[int], most: int
) -> list[int]:
    """Ideals near given ones: with the next nodes of `order`, or without the last ones."""
    before, after = neighbours(problem)
    needs = [sum(1 << u for u in parents) for parents in before]
    gives = [sum(1 << u for u in children) for children in after]
    found: set[int] = set()
    for cut in cuts:
        found.add(cut)
        larger = smaller = cut
        for _ in range(most):
            for v in order:
                if not larger >> v & 1 and needs[v] & ~larger == 0:
                    larger |= 1 << v
                    break
            for v in reversed(order):
                if smaller >> v & 1 and gives[v] & smaller == 0:
                    smaller &= ~(1 << v)
                    break
            found |= {larger, smaller}
    return lattice.smaller_first(found)


def neighbours(problem: MenuProblem) -> tuple[list[list[int]], list[list[int]]]:
    """(sources, targets) of every node."""
    ends = [(edge.source, edge.target) for edge in problem.edges]
    return lattice.neighbours(len(problem.nodes), ends)
