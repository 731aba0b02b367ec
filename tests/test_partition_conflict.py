"""Conflicts are the smallest there are and relaxations the least: against brute force."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition import conflict as module
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.conflict import Oracle, conflict, keeping, limits_of, listed
from pdcompile.passes.partition.infeasible import least_memory, memory_cost
from pdcompile.plan.evaluate import memory, violations
from pdcompile.problem import PartitionProblem, StageLimits, Wish
from tests.helpers.problems import chain_problem, random_problem


def assignments(problem: PartitionProblem) -> Iterator[tuple[int, ...]]:
    stages = range(len(problem.stages))
    for stage_of in itertools.product(stages, repeat=len(problem.items)):
        if not violations(problem, stage_of):
            yield stage_of


def fewest(problem: PartitionProblem) -> int:
    """Limits in the smallest conflict, by asking about every set of limits."""
    limits = limits_of(problem)
    for size in range(len(limits) + 1):
        for chosen in itertools.combinations(limits, size):
            if next(assignments(keeping(problem, chosen)), None) is None:
                return size
    raise AssertionError("the problem is feasible")


def impossible(seed: int) -> PartitionProblem | None:
    """A small random problem with too many wishes and too little memory, if it has no answer."""
    r = random.Random(seed)
    problem = random_problem(seed, 4)
    n, stages = len(problem.items), len(problem.stages)
    pairs = list(itertools.combinations(range(n), 2))
    places = list(itertools.product(range(n), range(stages)))
    problem = replace(
        problem,
        stages=tuple(
            replace(stage, memory_bytes=r.choice((None, r.randint(5, 60))))
            for stage in problem.stages
        ),
        pins=tuple(r.sample(places, r.choice((0, 0, 1, 2)) if len(places) > 1 else 0)),
        forbidden=tuple(r.sample(places, r.choice((0, 0, 1)))),
        apart=tuple(r.sample(pairs, min(len(pairs), r.choice((0, 0, 1, 2))))),
        together=tuple(r.sample(pairs, min(len(pairs), r.choice((0, 0, 1))))),
        max_stages=r.choice((None, None, 1, 2)),
        allow_empty=r.random() < 0.5,
    )
    return problem if next(assignments(problem), None) is None else None


def infeasible(count: int, start: int) -> Iterator[PartitionProblem]:
    found = (problem for seed in itertools.count(start) if (problem := impossible(seed)))
    return itertools.islice(found, count)


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(4))
def test_no_smaller_conflict_by_brute_force(block: int) -> None:
    for problem in infeasible(25, 1000 * block):
        found = conflict(problem, Oracle(Budget(60)))
        assert found.smallest
        assert len(found.limits) == fewest(problem)
        assert next(assignments(keeping(problem, found.limits)), None) is None
        for without in found.helps:
            rest = [limit for limit in limits_of(problem) if limit not in without]
            assert next(assignments(keeping(problem, rest)), None) is not None
        with pytest.raises(InfeasibleError) as caught:
            partition(problem)
        assert listed(found.limits) in caught.value.message
        assert caught.value.remedy


def test_least_memory_by_brute_force() -> None:
    compared = 0
    for problem in infeasible(150, 50_000):
        limited = [s for s, stage in enumerate(problem.stages) if stage.memory_bytes is not None]
        if not limited:
            continue
        oracle = Oracle(Budget(60))
        least, enough, proved = least_memory(problem, oracle)
        free = problem.with_memory(dict.fromkeys(limited))
        all_of = [memory(problem, one) for one in assignments(free)]
        assert proved
        if not all_of:
            assert enough is None
            continue
        assert least == enough == min(max(one[s] for s in limited) for one in all_of)
        s = limited[0]
        alone = problem.with_memory({s: None})
        stage_of, proved = oracle.least(alone, memory_cost({s}))
        expected = min((memory(problem, one)[s] for one in assignments(alone)), default=None)
        assert (None if stage_of is None else memory(problem, stage_of)[s]) == expected
        compared += 1
    assert compared > 25


def test_without_the_dynamic_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few ideals allowed, CP-SAT has to answer, and finds the same."""
    monkeypatch.setattr(module, "MAX_IDEALS", 3)
    for problem in infeasible(15, 90_000):
        found = conflict(problem, Oracle(Budget(60)))
        assert found.smallest
        assert len(found.limits) == fewest(problem)
        limited = [s for s, stage in enumerate(problem.stages) if stage.memory_bytes is not None]
        if not limited:
            continue
        least, enough, _ = least_memory(problem, Oracle(Budget(60)))
        free = problem.with_memory(dict.fromkeys(limited))
        best = min(
            (max(memory(problem, one)[s] for s in limited) for one in assignments(free)),
            default=None,
        )
        assert (best is None) == (enough is None)
        if best is not None and enough is not None:
            assert least <= best <= enough <= best * 1.002 + 1


def test_wishes_are_named_in_the_words_of_who_asked() -> None:
    """Two pins of one wish are one limit; a pin that no wish lists is a limit of its own."""
    problem = replace(
        chain_problem([1.0] * 4, 2),
        pins=((0, 1), (1, 1), (3, 0)),
        wishes=(Wish("Pin('encoder', 1)", pins=((0, 1), (1, 1))),),
    )
    with pytest.raises(InfeasibleError) as caught:
        partition(problem)
    assert "Pin('encoder', 1) and 'layer3' pinned to stage 0" in caught.value.message or (
        "Pin('encoder', 1) and something on each of 2 stages" in caught.value.message
    )
    assert "leave out Pin('encoder', 1)" in (caught.value.remedy or "")
    assert not violations(keeping(problem, limits_of(problem)[1:2]), (0, 0, 0, 0))


def test_out_of_time_is_said() -> None:
    problem = chain_problem([1.0] * 4, 2, size=0)
    small = tuple(replace(stage, memory_bytes=0) for stage in problem.stages)
    items = tuple(replace(item, saved_bytes=1) for item in problem.items)
    found = conflict(replace(problem, stages=small, items=items), Oracle(Budget(0)))
    assert not found.minimal
    assert not found.smallest
    assert len(found.limits) == 3


@pytest.mark.parametrize(
    ("memory_of", "text"),
    [
        ((10, 10, 10), "the 10 B of memory of each of stages 0–2"),
        (
            (10, 20, 20),
            "the 10 B of memory of stage 0 and the 20 B of memory of each of stages 1–2",
        ),
        ((10, None, 10), "the 10 B of memory of stage 0 and the 10 B of memory of stage 2"),
    ],
)
def test_stages_are_listed_in_runs(memory_of: tuple[int | None, ...], text: str) -> None:
    stages = tuple(StageLimits(memory_bytes=size) for size in memory_of)
    problem = replace(chain_problem([1.0] * 3, 3), stages=stages, allow_empty=True)
    assert listed(limits_of(problem)) == text
