"""What the search knows of memory, against the formula of an assignment."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.improve.moves import _Priced, move_groups
from pdcompile.passes.partition.improve.needs import Needs
from pdcompile.passes.partition.model import Model, build
from pdcompile.passes.partition.path.beside import MOST, Beside, heaviest_path
from pdcompile.passes.partition.path.interval_bytes import IntervalBytes
from pdcompile.passes.partition.search import Search, solve
from pdcompile.passes.partition.segments import Segments
from pdcompile.plan.evaluate import measure, memory, violations
from pdcompile.problem import Item, MemoryRule, PartitionProblem, StageLimits, Traffic
from tests.helpers.problems import brute_force, chain_problem
from tests.test_partition_path_bounds import blocks, branched, ratios


def tight(seed: int) -> PartitionProblem:
    """Branches beside a chain with everything that takes memory; limits that some cuts keep."""
    r = random.Random(seed)
    problem = blocks(seed) if r.random() < 0.4 else branched(seed)
    items = []
    for item in problem.items:
        size = r.choice((0, 0, r.randint(0, 9)))
        trained = size if r.random() < 0.8 else r.randint(0, size)
        items.append(
            replace(item, parameter_bytes=size, trainable_bytes=trained,
                    workspace_bytes=r.choice((0, r.randint(0, 20))))
        )  # fmt: skip
    count, m = len(problem.stages), problem.num_microbatches
    in_flight = tuple(min(m, count - s) for s in range(count))
    rule = replace(
        problem.memory,
        versions=r.choice((1, 2)),
        in_flight=problem.memory.in_flight or in_flight,
        received=tuple(n + 1 for n in in_flight),
        returned=(2,) * (count - 1) + (1,),
    )
    problem = replace(problem, items=tuple(items), memory=rule)
    held = sorted(max(memory(problem, one)) for one in some(problem, r, 20))
    limit = held[len(held) // 3]
    limits = tuple(replace(one, memory_bytes=limit) for one in problem.stages)
    return replace(problem, stages=limits)


def some(problem: PartitionProblem, r: random.Random, count: int) -> Iterator[tuple[int, ...]]:
    """Assignments that keep the order of items, most with something on every stage."""
    last, n = len(problem.stages) - 1, len(problem.items)
    for _ in range(count):
        stages = sorted(r.randint(0, last) for _ in range(n))
        if n > last and r.random() < 0.8:
            cuts = sorted(r.sample(range(1, n), last))
            stages = [sum(i >= cut for cut in cuts) for i in range(n)]
        for t in problem.traffic:  # some leave the row, as far as their readers let them
            stages[t.producer] = r.randint(
                max((stages[a.producer] for a in problem.traffic if t.producer in a.consumers),
                    default=0),
                min(stages[c] for c in t.consumers),
            )  # fmt: skip
        yield tuple(stages)


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(4))
def test_bytes_of_many_assignments_are_those_of_each(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        problem = tight(seed)
        model, r = build(problem), random.Random(seed)
        every = [one for one in some(problem, r, 8) if groups_of(model, one) is not None]
        stages = np.array([groups_of(model, one) for one in every]).reshape(-1, model.num_groups)
        due = np.array([memory(problem, one) for one in every]).reshape(-1, model.num_stages)
        needs = Needs(model)
        assert needs.of(stages) == pytest.approx(due, abs=1)
        over = np.maximum(due / [stage.memory_bytes or 1 for stage in problem.stages] - 1, 0)
        assert needs.excess(stages) == pytest.approx(over.sum(1), abs=1e-9 + 1 / due.max())


def groups_of(model: Model, stage_of: tuple[int, ...]) -> tuple[int, ...] | None:
    """Stages of groups, where their items are on one each."""
    held = [{stage_of[i] for i in own} for own in model.members]
    return tuple(min(one) for one in held) if all(len(one) == 1 for one in held) else None


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(4))
def test_a_stage_needs_no_less_than_its_interval_and_has_no_more_work(block: int) -> None:
    near = compared = more = 0
    for seed in range(100 * block, 100 * block + 100):
        problem = tight(seed)
        model, r = build(problem), random.Random(seed)
        beside = Beside.of(model, heaviest_path(model), MOST)
        if beside is None:
            continue
        work = np.array(model.forward) + np.array(model.backward)
        numbers = [int(beside.low[v]) for v in np.flatnonzero(beside.low == beside.high)]
        path = [int(v) for v in np.flatnonzero(beside.low == beside.high)]
        for one in some(problem, r, 12):
            stages = groups_of(model, one)
            if stages is None or any(stages[a] > stages[b] for a, b in model.arcs):
                continue
            kept, held, end = not violations(problem, one), memory(problem, one), 0
            used = {stages[v] for v in path}
            for s in range(model.num_stages):
                begin, own = end, [n for n, v in zip(numbers, path, strict=True) if stages[v] == s]
                end = max([begin, *own])
                if begin == end:
                    continue
                for every in (True, False) if len(used) == model.num_stages else (False,):
                    needed = IntervalBytes(beside, every)
                    branch = needed.of_branches(s)[begin, end]
                    least = needed.least(s)[begin, end] + branch
                    more += branch > 0
                    assert least <= held[s] + 1, f"seed {seed}: {one}, stage {s}"
                    near += least > 0.8 * held[s]
                    compared += 1
                    if kept:
                        most = needed.most(s, work)[begin, end]
                        done = sum(work[v] for v in range(model.num_groups) if stages[v] == s)
                        assert done <= most * (1 + 1e-9) + 1e-12, f"seed {seed}: {one}, stage {s}"
    assert compared > 200
    assert near > compared / 4
    assert more > compared / 50


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 12))]
)
def test_bounds_stay_below_the_optimum_under_memory_limits(block: int, fast: bool) -> None:
    count = 20 if fast else 60
    found = ratios(tight(seed) for seed in range(60 * block, 60 * block + count))
    assert len(found) > count // 3
    assert sum(ratio > 0.9 for ratio in found) > count // 12


def test_work_that_memory_has_no_room_for_is_elsewhere() -> None:
    """Of a branch beside a boundary, the stage before it holds no more than fits beside its own."""
    items = [Item("a", ("a",), 1.0, 1.0, 5, 5), Item("z", ("z",), 2.0, 2.0, 1, 1)]
    branch = [Item(f"b{n}", (f"b{n}",), 1.0, 1.0, 4, 4) for n in range(3)]
    traffic = [Traffic("a", 0, (1, 2, 3, 4), 1, 1)]
    traffic += [Traffic(f"b{n}", 1 + n, (4,), 1, 1) for n in range(3)]
    limits = (StageLimits(memory_bytes=45), StageLimits())
    rule = MemoryRule(in_flight=(1, 1))
    problem = PartitionProblem(
        (items[0], *branch, items[1]), tuple(traffic), limits, memory=rule, objective="flush"
    )
    model = build(problem)
    beside = Beside.of(model, (0, 4), MOST)
    assert beside is not None
    needed = IntervalBytes(beside, every=True)
    work = np.array(model.forward) + np.array(model.backward)
    assert needed.least(0)[0, 1] == 20  # four times its parameters
    assert needed.most(0, work)[0, 1] == pytest.approx(2 + 2 * 25.5 / 16)  # to half a byte


def test_memory_that_lacks_on_the_way_is_priced() -> None:
    chain = chain_problem([1.0] * 10, 2, num_microbatches=4, objective="flush")
    items = tuple(replace(item, parameter_bytes=100, trainable_bytes=100) for item in chain.items)
    slow, even = (0,) * 3 + (1,) * 7, (0,) * 5 + (1,) * 5
    problem = replace(chain, items=items)
    first, last = memory(problem, even)[0], memory(problem, slow)[1]
    limits = StageLimits(memory_bytes=first - first // 50), StageLimits(memory_bytes=last)
    problem = replace(problem, stages=limits)
    due = [measure(problem, one).objective for one in (slow, even)]
    both, priced = np.array([slow, even]), _Priced(build(problem))
    found = priced.first(both, np.array([due[0] * 0.9, due[0]]))
    assert found is not None
    stages, seconds, lacking = found
    assert (tuple(stages), lacking) == (even, True)
    assert seconds == pytest.approx(due[1] * 1.2, rel=0.01)  # 2 % lack
    assert priced.first(both[1:], np.array([due[1] * 1.1])) is None
    found = priced.first(both, np.array([due[0], due[0]]))
    assert found is not None
    assert (tuple(found[0]), found[2]) == (slow, False)
    assert found[1] == pytest.approx(due[0])


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(30))
def test_searches_under_memory_limits_end_between_bound_and_optimum(seed: int) -> None:
    problem = tight(1000 + seed)
    best = brute_force(problem)
    if best is None:
        return
    with Budget(20) as budget:
        search = solve(problem, budget)
    assert search.upper == pytest.approx(best, rel=1e-6)
    assert search.bound <= best * (1 + 1e-9)


def test_full_stages_hand_on_what_does_not_fit() -> None:
    """The first stages are as full as may be, with one item that the last has room for: it gets
    there only if each of them hands on as much."""
    chain = chain_problem([1.0] * 40, 5, num_microbatches=10, objective="flush")
    items = tuple(replace(item, parameter_bytes=9, trainable_bytes=9) for item in chain.items)
    problem = replace(chain, items=items)
    begin = (0,) * 12 + (1,) * 9 + (2,) * 9 + (3,) * 9 + (4,)
    even = tuple(s for s in range(5) for _ in range(8))
    limits = tuple(StageLimits(memory_bytes=n) for n in memory(problem, begin)[:4])
    problem = replace(problem, stages=(*limits, StageLimits()))
    model = build(problem)
    with Budget(20) as budget:
        search = Search(problem, model, budget)
        search.offer(begin)
        before, best = search.upper, measure(problem, even).objective
        move_groups(search, Segments.build(model, []))
    assert search.upper <= best * (1 + 1e-9) < before


def test_a_stage_that_begins_in_a_branch_has_the_cheapest_of_it() -> None:
    """Its group with what comes for that, or what comes from it, for each microbatch in flight."""
    names = ("a", "c", "d", "z", "branch")
    saved = {"a": 2, "c": 2, "d": 2, "z": 2, "branch": 3}
    items = [Item(n, (n,), 1.0, 2.0, 0, 0, saved[n]) for n in names]
    for from_branch, expected in ((9, 5 + 3), (6, 6)):
        traffic = (
            Traffic("a", 0, (1, 4), 5, 5),
            Traffic("c", 1, (2,), 4, 4),
            Traffic("d", 2, (3,), 4, 4),
            Traffic("branch", 4, (3,), from_branch, from_branch),
        )
        problem = PartitionProblem(
            tuple(items), traffic, (StageLimits(memory_bytes=99),) * 2,
            memory=MemoryRule(in_flight=(2, 2)), num_microbatches=2, objective="flush",
        )  # fmt: skip
        model = build(problem)
        beside = Beside.of(model, heaviest_path(model), MOST)
        assert beside is not None
        assert beside.length == 4
        needed = IntervalBytes(beside, every=True)
        rule = problem.memory.counts(1)
        assert rule[:2] == (2, 2)
        more = needed.of_branches(1)
        assert more[2, 4] == 2 * expected  # a, c | d, z
        assert more[2, 3] == more[0, 4] == 0.0  # the branch may be behind it; nothing is before it
        assert [memory(problem, (0, 0, 1, 1, s))[1] for s in (0, 1)] == [
            needed.least(1)[2, 4] + 2 * from_branch, needed.least(1)[2, 4] + 2 * (5 + 3)
        ]  # fmt: skip
