"""Each prover alone: what the sweep holds against each other and against brute force.

`partition` uses the dynamic program, enumeration and CP-SAT together, so that a mistake of one
could hide behind another; here each has to find, prove or refute by itself.
"""

from __future__ import annotations

import sys

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.answer import validate
from pdcompile.passes.partition.bounds import bounding_cost
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.chains import groups_of, straight_chains
from pdcompile.passes.partition.model import all_ideals, build
from pdcompile.passes.partition.search import Search, find_any, prove, run_program
from pdcompile.passes.partition.segments import Segments
from pdcompile.problem import Partition, PartitionProblem


def by_ideals(problem: PartitionProblem) -> tuple[Partition, float] | None:
    """(optimum, bound in seconds) by the dynamic program over all ideals; None: infeasible.

    Where its costs are bounds only (values with several consumers, flush schedules), every
    chain of ideals that they leave is evaluated.  For small problems.
    """
    search = _begin(problem)
    if search is None:
        return None
    ideals = all_ideals(search.model, sys.maxsize) or []
    segments = Segments(search.model, ideals, complete=True)
    run_program(search, segments, None)
    if not search.proved:
        _evaluate_all(search, segments)
    return _end(search)


def _evaluate_all(search: Search, segments: Segments) -> None:
    """Evaluates every assignment that the bound leaves."""
    chains = straight_chains(segments, bounding_cost(segments), keep=True)
    chains.solve()
    for _, chain in chains.enumerate(lambda: search.upper * (1 - 1e-9)):
        search.offer(groups_of(segments, chain))
    if search.best is None:
        search.impossible = True
        return
    search.prove(search.upper * (1 - 1e-9), "brute force over what the bound leaves")


def by_integer_program(problem: PartitionProblem) -> tuple[Partition, float] | None:
    """(optimum, bound in seconds) by CP-SAT without any start; None: infeasible."""
    search = _begin(problem)
    if search is None:
        return None
    find_any(search)
    if search.best is not None:
        prove(search)
    return _end(search)


def _begin(problem: PartitionProblem) -> Search | None:
    validate(problem)
    try:
        return Search(problem, build(problem), Budget())
    except InfeasibleError:
        return None


def _end(search: Search) -> tuple[Partition, float] | None:
    if search.best is None:
        assert search.impossible
        return None
    return search.best, min(search.bound, search.upper)
