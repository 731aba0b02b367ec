"""Ideals: the sets of groups that a prefix of stages can hold, closed under predecessors.

A monotone assignment to N stages is a chain of N − 1 ideals (see `lattice`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.model import Model


def all_ideals(model: Model, limit: int, budget: Budget | None = None) -> list[int] | None:
    """Every ideal as a bit mask, smaller ones first; None when there are more than `limit`.

    Also None when the budget ends first.
    """
    before, after = lattice.neighbours(model.num_groups, model.arcs)
    return lattice.down_closed(before, after, limit, late=_late(budget))


def prefixes(model: Model, limit: int, seed: int, budget: Budget | None = None) -> list[int]:
    """Prefixes of several linear orders together, at most `limit`, the full set among them.

    Those of the given order are always there; a budget that ends keeps others out.
    """
    return lattice.prefixes(orders(model, seed), limit, late=_late(budget))


def orders(model: Model, seed: int) -> Iterator[list[int]]:
    """Topological orders: as given, early, late, depth first, cheapest cut, then random ones."""
    values = [
        ((flow.sources[0], *flow.sinks), flow.forward_bytes + flow.backward_bytes)
        for flow in model.flows
        if not flow.tied
    ]
    before, after = lattice.neighbours(model.num_groups, model.arcs)
    return lattice.orders(before, after, values, seed, rounds=6)


def _late(budget: Budget | None) -> Callable[[], bool]:
    return lambda: budget is not None and budget.late
