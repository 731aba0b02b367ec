"""Random placement problems on which each prover alone must agree with brute force.

The problems of `placement`, with more colours, more CPUs and more devices than groups; the
dynamic program over all ideals runs without any known placement, and CP-SAT knows only one that
nothing can exceed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from benchmarks.published.placement import place
from benchmarks.published.placement.ideal_program import all_ideals, best_chain
from benchmarks.published.placement.node_groups import grouped
from benchmarks.published.placement.placements import Placement, objective
from benchmarks.published.placement.threshold_program import prove
from benchmarks.published.placement_model import LoadProblem, PlacementProblem
from pdcompile.passes.partition.budget import Budget
from random_problems import placement

AGREE = placement.AGREE


def drawn(seed: int) -> PlacementProblem:
    r = random.Random(seed)
    problem = placement.drawn(seed)
    shared = [r.randrange(4) for _ in problem.nodes]
    nodes = tuple(
        replace(
            node,
            color=f"shared {shared[i]}" if r.random() < 0.2 else node.color,
            seconds=_whole(node.seconds) if r.random() < 0.5 else node.seconds,
        )
        for i, node in enumerate(problem.nodes)
    )
    accelerators, cpus = problem.classes
    if len({node.color for node in nodes}) <= 4:
        accelerators = replace(accelerators, count=r.choice((accelerators.count, 0, 4)))
    cpus = replace(cpus, count=r.choice((cpus.count, cpus.count, 0, 1)))
    return replace(problem, nodes=nodes, classes=(accelerators, cpus))


def _whole(seconds: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(float(round(s)) if math.isfinite(s) else s for s in seconds)


def ideals_alone(groups: LoadProblem) -> float:
    found = all_ideals(groups, 10_000)
    chain = best_chain(groups, found, Budget()) if found is not None else None
    if chain is None or chain.placement is None:
        return math.inf
    return objective(groups, chain.placement)


def integer_program_alone(groups: LoadProblem) -> float:
    """Solve the integer program, from an upper bound that holds for every placement."""
    finite = [max((s for s in row if s < math.inf), default=0.0) for row in groups.seconds]
    best = [math.inf]

    def offer(found: Placement) -> float:
        value = objective(groups, found)
        best[0] = min(best[0], value)
        return value

    beyond = 1.01 * (math.fsum(finite) + math.fsum(groups.costs)) + 1.0
    prove(groups, beyond, budget=Budget(), offer=offer)
    return best[0]


def compare(seed: int) -> tuple[bool, str]:
    """(feasible, who differs from brute force in words, "" when nobody does)."""
    problem = drawn(seed)
    if not any(kind.count for kind in problem.classes):
        status = place(problem).status
        return False, "" if status == "infeasible" else f"{status} without devices"
    best = placement.brute_force(problem)
    groups = grouped(problem)
    answer = place(problem)
    found = {
        "place": math.inf if answer.objective is None else answer.objective,
        "ideals": ideals_alone(groups),
        "CP-SAT": integer_program_alone(groups),
    }
    wrong = [
        f"{name}: {value}"
        for name, value in found.items()
        if (value != best if math.isinf(best) else not abs(value - best) <= AGREE * best)
    ]
    if answer.status != ("infeasible" if math.isinf(best) else "optimal"):
        wrong.append(f"place says {answer.status}")
    return math.isfinite(best), f"{', '.join(wrong)} instead of {best}" if wrong else ""


FAMILIES: dict[str, Callable[[int], tuple[bool, str]]] = {"placement-each": compare}
