"""States of the chain: down-closed sets of nodes as bit masks, smaller ones first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdcompile.passes.partition import lattice
from pdcompile.passes.published.piper_model import MenuProblem


def all_ideals(problem: MenuProblem, limit: int) -> list[int] | None:
    """Every ideal, or None when there are more than `limit`."""
    return lattice.down_closed(*neighbours(problem), limit)


def orders(problem: MenuProblem, seed: int) -> list[list[int]]:
    """Topological orders: as in the file, early, late, depth first, cheapest cut, random ones."""
    values = [((edge.source, edge.target), edge.bytes) for edge in problem.edges]
    return list(lattice.orders(*neighbours(problem), values, seed, rounds=1))


def around(problem: MenuProblem, cuts: Iterable[int], order: Sequence[int], most: int) -> list[int]:
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
