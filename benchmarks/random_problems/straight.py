"""Random straight pipelines: at most 8 items on at most 4 stages, with every feature.

Three ways must agree on objective and feasibility: the dynamic program over ideals, the integer
program, and brute force, which is written here from the problem's definition and the evaluator.
`partition`, which uses all of them together, is the fourth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition import partition
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import (
    Holding,
    Item,
    Partition,
    PartitionProblem,
    SharedParameter,
    StageLimits,
    Traffic,
)
from random_problems.provers import by_ideals, by_integer_program

AGREE = 1e-5  # relative, the integer rounding that an answer may have
Shape = Literal["chain", "skips", "dag"]
Pair = tuple[int, int]


def drawn(family: str, seed: int) -> PartitionProblem:
    """A problem of the family; the same one for the same seed."""
    r = random.Random(f"{family} {seed}")
    shape: Shape = "chain" if family == "chain" else r.choice(("skips", "dag"))
    # Four stages of eight items are many assignments for brute force: fewer of those.
    n = r.choice((1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8))
    num_stages = min(n, r.randint(1, 4 if n < 7 or shape == "chain" else 3))
    problem = PartitionProblem(
        items=tuple(_item(r, i) for i in range(n)),
        traffic=_traffic(r, n, shape),
        stages=(StageLimits(),) * num_stages,
        **_held(r, num_stages),
        num_microbatches=r.randint(1, 6),
        objective="flush" if r.random() < 0.5 else "bottleneck",
    )
    r.random()  # unused: seeds that tests name keep their problems
    if family in ("links", "shared", "mixed"):
        problem = replace(problem, stages=tuple(_stage(r, family) for _ in problem.stages))
    if family in ("shared", "mixed"):
        problem = replace(problem, shared=_shared(r, n))
    if family == "memory" or (family == "mixed" and r.random() < 0.5):
        problem = _tight(r, problem)
    if family == "constraints" or (family == "mixed" and r.random() < 0.5):
        problem = _constrained(r, problem)
    return problem


def compare(family: str, seed: int) -> tuple[bool, str]:
    """(feasible, who disagrees in words, "" when nobody does)."""
    problem = drawn(family, seed)
    best = brute_force(problem)
    texts = []
    answers = {"ideals": by_ideals(problem), "integer program": by_integer_program(problem)}
    try:
        found, certificate = partition(problem)
        answers["together"] = found, certificate.bound_seconds
    except InfeasibleError:
        answers["together"] = None
    for name, answer in answers.items():
        if text := _difference(problem, answer, best):
            texts.append(f"{name}: {text}")
    return best is not None, "; ".join(texts)


def _difference(
    problem: PartitionProblem, answer: tuple[Partition, float] | None, best: float | None
) -> str:
    if answer is None or best is None:
        same = (answer is None) == (best is None)
        return "" if same else f"{'no plan' if answer is None else 'a plan'}, brute force {best}"
    found, bound = answer
    if any(Evaluation(problem, found.stage_of).violations()):
        return f"{found.stage_of} is not allowed"
    if not math.isclose(found.objective, best, rel_tol=AGREE, abs_tol=1e-12):
        return f"{found.objective!r}, brute force {best!r}"
    if bound > best * (1 + 1e-9) + 1e-12:
        return f"bound {bound!r} above the optimum {best!r}"
    if bound < best * (1 - AGREE) - 1e-12:
        return f"bound {bound!r} leaves a gap to {best!r}"
    return ""


def brute_force(problem: PartitionProblem) -> float | None:
    """The optimum by trying every assignment; None when none is allowed.

    What makes an assignment worse than the best so far whatever else is true (the seconds of its
    busiest device) is not simulated.
    """
    best: float | None = None
    times = problem.num_microbatches if problem.objective == "flush" else 1
    for stage_of in assignments(problem):
        if best is not None:
            busy = [0.0] * len(problem.stages)
            for item, s in zip(problem.items, stage_of, strict=True):
                busy[s] += item.forward_seconds + item.backward_seconds
            if max(t / st.speed for t, st in zip(busy, problem.stages, strict=True)) * times > best:
                continue
        if not any(Evaluation(problem, stage_of).violations()):
            objective = Evaluation(problem, stage_of).partition().objective
            best = objective if best is None else min(best, objective)
    return best


def assignments(problem: PartitionProblem) -> Iterator[tuple[int, ...]]:
    """Every assignment that keeps the order of the data, item by item."""
    before: list[list[int]] = [[] for _ in problem.items]
    for value in problem.traffic:
        for consumer in value.consumers:
            before[consumer].append(value.producer)
    for a, b in problem.order:
        before[b].append(a)
    stack: list[tuple[int, ...]] = [()]
    while stack:
        chosen = stack.pop()
        i = len(chosen)
        if i == len(problem.items):
            yield chosen
            continue
        least = max((chosen[a] for a in before[i]), default=0)
        stack += [(*chosen, s) for s in range(least, len(problem.stages))]


def _item(r: random.Random, i: int) -> Item:
    parameters = r.randint(0, 10)
    return Item(
        f"item{i}",
        (f"op{i}",),
        r.choice((0, 1, r.random() * 3)),
        r.choice((0, 2, r.random() * 3)),
        parameters,
        r.choice((parameters, r.randint(0, parameters))),
        r.randint(0, 5),
        r.choice((0, r.randint(0, 5))),
    )


def _traffic(r: random.Random, n: int, shape: Shape) -> tuple[Traffic, ...]:
    found = []
    for i in range(n - 1):
        consumers = tuple(
            j
            for j in range(i + 1, n)
            if (j == i + 1 and shape != "dag") or (shape != "chain" and r.random() < 0.35)
        )
        if consumers:
            size = r.randint(0, 6)
            back = r.choice((0, size, r.randint(1, 6)))
            found.append(Traffic(f"op{i}", i, consumers, size, back))
    return tuple(found)


def _stage(r: random.Random, family: str) -> StageLimits:
    plain = family == "shared"
    return StageLimits(
        speed=1.0 if plain else r.choice((1.0, 1.0, 2.0, 0.7)),
        bytes_per_second=r.choice((math.inf, 1.0, 5.0, 2.0)),
        full_duplex=plain or r.random() < 0.6,
        latency_seconds=r.choice((0.0, 0.0, 0.5)),
    )


def _held(r: random.Random, num_stages: int) -> dict[str, Any]:
    depth = [num_stages - s for s in range(num_stages)]
    in_flight = r.choice(
        ((), tuple(depth), (r.randint(1, 6),) * num_stages, tuple(2 * d - 1 for d in depth))
    )
    factors = r.choice((1, 2)), 1, r.choice((0.0, 2.0, 0.5))
    each = (Holding(*factors, count, count) for count in in_flight or (1,) * num_stages)
    return {"in_flight": in_flight, "holdings": tuple(each)}


def _shared(r: random.Random, n: int) -> tuple[SharedParameter, ...]:
    return tuple(
        SharedParameter(
            f"w{k}",
            r.randint(1, 5),
            r.random() < 0.7,
            tuple(sorted(r.sample(range(n), r.randint(2, min(3, n))))),
        )
        for k in range(r.choice((1, 1, 2)) if n > 1 else 0)
    )


def _tight(r: random.Random, problem: PartitionProblem) -> PartitionProblem:
    """Limits near what some random assignment needs: often it just fits, often nothing does."""
    num_stages = len(problem.stages)
    cuts = sorted(r.randint(0, len(problem.items)) for _ in range(num_stages - 1))
    stage_of = [sum(i >= cut for cut in cuts) for i in range(len(problem.items))]
    needed = Evaluation(problem, stage_of).partition().memory_bytes
    alike = max(needed) if r.random() < 0.5 else None
    factor = r.choice((1.0, 1.0, 1.0, 0.97, 0.8, 1.2))
    stages = []
    for stage, need in zip(problem.stages, needed, strict=True):
        limit = int((alike or need) * factor) + r.choice((0, 0, -1, 1))
        free = r.random() < 0.1
        stages.append(stage if free else replace(stage, memory_bytes=max(0, limit)))
    return replace(problem, stages=tuple(stages))


def _constrained(r: random.Random, problem: PartitionProblem) -> PartitionProblem:
    n, num_stages = len(problem.items), len(problem.stages)
    pairs = [(a, b) for b in range(n) for a in range(b)]
    places = [(i, s) for i in range(n) for s in range(num_stages)]

    def some(
        entries: list[tuple[int, int]], counts: tuple[int, ...]
    ) -> tuple[tuple[int, int], ...]:
        return tuple(r.sample(entries, min(len(entries), r.choice(counts))))

    return replace(
        problem,
        pins=some(places, (0, 0, 0, 1, 2)),
        together=some(pairs, (0, 0, 0, 1)),
        apart=some(pairs, (0, 0, 0, 1, 2)),
        order=some(pairs, (0, 0, 1)),
    )


def _family(name: str) -> Callable[[int], tuple[bool, str]]:
    return lambda seed: compare(name, seed)


FAMILIES = {
    name: _family(name)
    for name in ("chain", "skips", "links", "shared", "memory", "constraints", "mixed")
}
