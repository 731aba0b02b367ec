"""Limits that conflict, and changes that are enough: against brute force."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition import partition, search
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.space.no_plan import keeping, limits_of, no_assignment
from pdcompile.problem import PartitionProblem, Wish
from pdcompile.problem.constraints import smallest_conflict
from tests.helpers.problems import chain_problem, random_problem, violations


def assignments(problem: PartitionProblem) -> Iterator[tuple[int, ...]]:
    stages = range(len(problem.stages))
    for stage_of in itertools.product(stages, repeat=len(problem.items)):
        if not violations(problem, stage_of):
            yield stage_of


def solvable(problem: PartitionProblem) -> bool:
    return next(assignments(problem), None) is not None


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
        apart=tuple(r.sample(pairs, min(len(pairs), r.choice((0, 0, 1, 2))))),
        together=tuple(r.sample(pairs, min(len(pairs), r.choice((0, 0, 1))))),
    )
    return None if solvable(problem) else problem


def infeasible(count: int, start: int) -> Iterator[PartitionProblem]:
    found = (problem for seed in itertools.count(start) if (problem := impossible(seed)))
    return itertools.islice(found, count)


def check(problem: PartitionProblem) -> None:
    """Check that what the refusal names cannot hold together, each part of it can, and its remedies
    do."""
    limits = limits_of(problem)
    with pytest.raises(InfeasibleError) as caught:
        partition(problem)
    refused = caught.value
    assert refused.remedy
    if not solvable(keeping(problem, ())):  # there are fewer items than stages
        assert f"{len(problem.stages)} stages for " in refused.message
        return
    named = refused.message.rpartition(": ")[2]
    core = smallest_conflict(limits, lambda chosen: solvable(keeping(problem, chosen)))
    assert " and ".join(limit.text for limit in core) == named
    assert not solvable(keeping(problem, core))
    for without in core:
        assert solvable(keeping(problem, [limit for limit in core if limit != without]))
    for fewer in itertools.combinations(limits, len(core) - 1):
        assert solvable(keeping(problem, fewer))
    for remedy in refused.others:
        if not remedy.startswith("leave out "):
            continue  # of what shows without a search
        gone = remedy.removeprefix("leave out ").split(" and ")
        rest = [limit for limit in limits if limit.text not in gone]
        assert len(rest) < len(limits)
        assert solvable(keeping(problem, rest))


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(4))
def test_conflicts_by_brute_force(block: int) -> None:
    for problem in infeasible(25, 1000 * block):
        check(problem)


def test_without_the_dynamic_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """CP-SAT has to answer with few ideals allowed, and finds the same."""
    monkeypatch.setattr(search, "MAX_IDEALS", 3)
    for problem in infeasible(15, 90_000):
        check(problem)


def test_wishes_are_named_in_the_words_of_who_asked() -> None:
    """Two pins of one wish are one limit; a pin that no wish lists is a limit of its own."""
    problem = replace(
        chain_problem([1.0] * 5, 2),
        pins=((1, 1), (2, 1), (3, 0)),
        wishes=(Wish("Pin('encoder', 1)", pins=((1, 1), (2, 1))),),
    )
    with pytest.raises(InfeasibleError) as caught:
        partition(problem)
    assert "together: Pin('encoder', 1) and pins (3, 0)" in caught.value.message
    assert "leave out Pin('encoder', 1)" in (caught.value.remedy or "")
    assert not violations(keeping(problem, limits_of(problem)[1:2]), (0, 0, 0, 0, 1))


def test_out_of_time_is_said() -> None:
    problem = chain_problem([1.0] * 4, 2, size=0, pins=((0, 0),))
    small = tuple(replace(stage, memory_bytes=0) for stage in problem.stages)
    items = tuple(replace(item, saved_bytes=1) for item in problem.items)
    budget = Budget(60)
    budget.stop()
    refused = no_assignment(replace(problem, stages=small, items=items), budget)
    assert "not found in time" in refused.message
