"""The bound along a path never exceeds the optimum, whatever lies beside the path."""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pdcompile.passes.partition import partition
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.model import build
from pdcompile.passes.partition.path import path_bounds, path_case
from pdcompile.passes.partition.path.beside import MOST, Beside, heaviest_path
from pdcompile.passes.partition.path.branches import Side, parallels
from pdcompile.passes.partition.path.path_bounds import path_bound
from pdcompile.passes.partition.search import solve
from pdcompile.plan.evaluate import measure, violations
from pdcompile.problem import (
    Item,
    MemoryRule,
    PartitionProblem,
    SharedParameter,
    StageLimits,
    Traffic,
)
from tests.helpers.problems import brute_force, chain_problem, gpt_problem, random_problem


def branched(seed: int) -> PartitionProblem:
    """A chain with gradients, and items beside it: masks, branches, what nobody reads."""
    r = random.Random(seed)
    n, num_stages = r.randint(3, 6), r.randint(2, 4)
    num_stages = min(num_stages, n)
    beside = {i for i in range(n) if r.random() < 0.4}
    chain = [i for i in range(n) if i not in beside] or [0]
    beside -= set(chain)
    items, traffic = [], []
    readers: dict[int, set[int]] = {i: set() for i in range(n)}
    for a, b in pairwise(chain):
        readers[a].add(b)
    for i in beside:
        before, after = [c for c in range(i) if r.random() < 0.5], list(range(i + 1, n))
        for c in before[:2]:
            readers[c].add(i)
        if after and r.random() < 0.8:
            readers[i].add(r.choice(after))
    for i in range(n):
        trained = i not in beside or r.random() < 0.6
        weight = r.choice((0.0, 1.0, r.random(), 3 * r.random()))
        items.append(
            Item(f"i{i}", (f"i{i}",), weight, r.choice((0.5, 1, 2)) * weight if trained else 0.0,
                 r.randint(0, 5), 0, r.randint(0, 5), 0)
        )  # fmt: skip
        if readers[i]:
            back = r.randint(1, 5) if trained else 0
            traffic.append(Traffic(f"i{i}", i, tuple(sorted(readers[i])), r.randint(0, 5), back))
    m = r.randint(1, 7)
    depth = r.choice((1, 2)) if r.random() < 0.8 else m
    in_flight = tuple(min(m, depth * (num_stages - s - 1) + 1) for s in range(num_stages))
    rate, alike = r.choice((1.0, 5.0, 50.0, float("inf"))), r.random() < 0.5
    limits = tuple(
        StageLimits(
            speed=r.choice((1.0, 1.0, 2.0)),
            memory_bytes=r.randint(10, 60) if r.random() < 0.15 else None,
            bytes_per_second=rate if alike else r.choice((1.0, 5.0, 50.0)),
            full_duplex=r.random() < 0.8,
            latency_seconds=r.choice((0.0, 0.2)),
        )
        for _ in range(num_stages)
    )
    users = tuple(sorted(r.sample(range(n), r.choice((2, 2, 3)))))
    shared = (SharedParameter("w", r.randint(1, 9), True, users),) if r.random() < 0.5 else ()
    rule = MemoryRule(in_flight=r.choice(((), in_flight)))
    if r.random() < 0.2:
        rule = replace(rule, schedule="gpipe", in_flight=(m,) * num_stages)
    elif r.random() < 0.2:
        rule = replace(rule, schedule="zb-h1", in_flight=())
    return PartitionProblem(
        tuple(items), tuple(traffic), limits, shared, memory=rule, num_microbatches=m,
        objective="flush", allow_empty=r.random() < 0.15,
        max_stages=r.choice((None, None, None, num_stages - 1)) if num_stages > 2 else None,
    )  # fmt: skip


def blocks(seed: int) -> PartitionProblem:
    """A chain with gradients, and one or two items around parts of it that read what it reads."""
    r = random.Random(seed)
    length = r.randint(3, 4)
    around = [sorted(r.sample(range(length), 2)) for _ in range(r.randint(1, 6 - length))]
    names = [
        name
        for c in range(length)
        for name in ((c, -1), *((c, n) for n, (a, _) in enumerate(around) if a == c))
    ]
    number = {name: i for i, name in enumerate(names)}
    chain = [number[c, -1] for c in range(length)]
    readers: list[set[int]] = [set() for _ in names]
    for a, b in pairwise(chain):
        readers[a].add(b)
    for n, (a, b) in enumerate(around):
        readers[chain[a]].add(number[a, n])
        readers[number[a, n]].add(chain[b])
    items, traffic = [], []
    for i, sinks in enumerate(readers):
        f = r.choice((0.0, 1.0, r.random(), 3 * r.random()))
        back = r.choice((0.5, 1, 2)) * f
        items.append(Item(f"i{i}", (f"i{i}",), f, back, r.randint(0, 5), 0, r.randint(0, 5), 0))
        if sinks:
            sent = r.randint(0, 5), r.randint(1, 5)
            traffic.append(Traffic(f"i{i}", i, tuple(sorted(sinks)), *sent))
    num_stages, m = r.randint(3, min(4, len(items))), r.choice((1, 1, 2, 3, 5, 8))
    alike = r.choice((5.0, 50.0, 500.0)) if r.random() < 0.5 else None
    limits = tuple(
        StageLimits(
            memory_bytes=r.randint(10, 60) if r.random() < 0.1 else None,
            bytes_per_second=alike or r.choice((1.0, 5.0, 50.0, 500.0)),
            latency_seconds=r.choice((0.0, 0.0, 0.2)),
        )
        for _ in range(num_stages)
    )
    rule = MemoryRule()
    if r.random() < 0.2:
        rule = MemoryRule(schedule="gpipe", in_flight=(m,) * num_stages)
    return PartitionProblem(
        tuple(items), tuple(traffic), limits, memory=rule, num_microbatches=m, objective="flush"
    )


def close(problem: PartitionProblem, best: float) -> float:
    """The bound over the optimum, which it may not exceed; nor may it deny what is as fast."""
    offered: list[tuple[int, ...]] = []
    with Budget(60) as budget:
        found = path_bound(build(problem), 0.0, lambda: best * (1 + 1e-6), budget, offered.append)
    assert found <= best * (1 + 1e-9) + 1e-12
    return found / best if best else 1.0


def ratios(problems: Iterable[PartitionProblem]) -> list[float]:
    """`close` of those that have a plan."""
    found = ((problem, brute_force(problem)) for problem in problems)
    return [close(problem, best) for problem, best in found if best is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 20))]
)
def test_bounds_stay_below_the_optimum(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in range(150 * block, 150 * block + 150):
        problem = blocks(seed) if seed % 3 == 0 else branched(seed)
        if seed % 5 == 0:
            problem = replace(random_problem(seed, max_items=6), objective="flush")
        monkeypatch.setattr(path_bounds, "COARSE", 2 + seed % 3 if seed % 2 else 240)
        monkeypatch.setattr(path_bounds, "ALMOST", 1)
        found += ratios([problem])
    assert len(found) > 100
    assert sum(ratio > 0.9 for ratio in found) > 10


def two_branches() -> PartitionProblem:
    """b and x read a, c reads both; a stage for each."""
    items = tuple(
        Item(name, (name,), f, f) for name, f in zip("abxc", (1.0, 2.0, 1.5, 1.0), strict=True)
    )
    traffic = (
        Traffic("a", 0, (1, 2), 1, 1), Traffic("b", 1, (3,), 1, 1), Traffic("x", 2, (3,), 1, 1),
    )  # fmt: skip
    return PartitionProblem(items, traffic, (StageLimits(),) * 4, objective="flush")


def test_what_runs_beside_the_path_may_run_at_the_same_time() -> None:
    """A stage that holds only a branch takes no time of the others' forwards; gradients of what
    both read go through both."""
    problem = two_branches()
    assert heaviest_path(build(problem)) == (0, 1, 3)
    assert brute_force(problem) == 9.5
    assert close(problem, 9.5) > 0.999


def residual_blocks(blocks: int, stages: int) -> PartitionProblem:
    """Blocks of three items in a row and one around them, then a sum; one microbatch."""
    items, traffic = [Item("in", ("in",), 1.0, 2.0)], []
    for n in range(blocks):
        last = len(items) - 1
        first = len(items)
        for name, f in zip("abcsj", (2.0, 2.0, 1.0, 2.0, 1.0), strict=True):
            items.append(Item(f"{name}{n}", (f"{name}{n}",), f, 2 * f))
        sinks = {last: (0, 3), first: (1,), first + 1: (2,), first + 2: (4,), first + 3: (4,)}
        traffic += [
            Traffic(items[v].name, v, tuple(first + k for k in ends), 1, 1)
            for v, ends in sinks.items()
        ]
    traffic.append(Traffic(items[-1].name, len(items) - 1, (len(items),), 1, 1))
    items.append(Item("out", ("out",), 1.0, 2.0))
    return PartitionProblem(
        tuple(items), tuple(traffic), (StageLimits(),) * stages, objective="flush"
    )


def test_a_branch_is_out_of_the_way_only_beside_a_stage_inside_its_block() -> None:
    """Each of the four shortcuts takes three more stages: two of them find room on eight."""
    problem = residual_blocks(4, 8)
    total = sum(item.forward_seconds + item.backward_seconds for item in problem.items)
    best, certificate = partition(problem, time_limit=5)
    assert best.objective == pytest.approx(total - 2 * 6.0)
    assert certificate.bound_seconds > 0.999 * best.objective


def test_of_several_stages_beside_the_path_one_with_the_largest_group_is_on_a_way() -> None:
    """Of groups of 3 and 0.1 seconds: where neither spans the interval the larger one is not
    hidden, where the larger one does the smaller one is not."""
    zero, small, large, both = (np.array([f, 2 * f])[:, None, None] for f in (0.0, 0.1, 3.0, 3.1))
    for number in (2, math.inf):
        neither = Side.of(both, zero, large).of_stages[number]
        assert [one.item() for one in neither] == pytest.approx([0.1, 0.2, 0.3])
        larger = Side.of(both, large, small).of_stages[number]
        assert [one.item() for one in larger] == pytest.approx([3.0, 6.0, 9.0])


def test_no_more_is_out_of_the_way_than_may_be_there(fast: bool) -> None:
    """Also where some of it spans the stage before and other work the stage behind."""
    apart = 0
    for seed in range(30 if fast else 60):
        problem, _ = around_a_chain(seed)
        model = build(problem)
        beside = Beside.of(model, heaviest_path(model))
        assert beside is not None
        forward, backward = np.array(model.forward), np.array(model.backward)
        for one in parallels(beside, forward, backward, filled=True):
            apart += not one.all_nested
            ways = path_case.Ways(np.zeros((beside.length + 1,) * 2))
            handed = path_case._Handed.of(ways, np.ones_like(one.onward.old), one.onward.old)
            assert handed is not None
            for others in (1, 2, math.inf):
                found = handed.over(others, one, one.onward)
                assert (found >= -(one.there[0] + one.there[1])[:, None] - 1e-9).all()
    assert apart > (5 if fast else 10)


def test_a_way_by_a_stage_beside_the_path_has_hops_of_its_own() -> None:
    """What goes around directly is slow, what goes by the stage between them is not: no way has
    the work of the one and the hops of the other."""
    items = tuple(Item(f"i{i}", (f"i{i}",), f, f) for i, f in enumerate((1.0, 4.0, 1.0, 1.0)))
    traffic = (
        Traffic("i0", 0, (1, 2), 0, 1), Traffic("i1", 1, (3,), 40, 40),
        Traffic("i2", 2, (3,), 1, 1),
    )  # fmt: skip
    limits = (StageLimits(bytes_per_second=40.0),) * 3
    problem = PartitionProblem(
        items, traffic, limits, objective="flush",
        pins=((0, 0), (1, 0), (2, 1), (3, 2)),
    )  # fmt: skip
    assert brute_force(problem) == pytest.approx(2 * (1 + 4 + 1 + 1) + 3 / 40)
    assert 0.8 < bound_of(problem) <= 1


def test_the_path_is_looked_at_more_roughly_where_it_is_long() -> None:
    problem = chain_problem([1.0 + i % 3 for i in range(700)], 4, num_microbatches=8)
    beside = Beside.of(build(problem), heaviest_path(build(problem)))
    assert beside is not None
    assert 100 < beside.length <= MOST
    assert beside.inside(np.array(beside.model.forward), every=True)[0, -1] == pytest.approx(
        1399 / 3
    )


@pytest.mark.slow
def test_models_that_are_almost_chains_are_proved() -> None:
    """A mask that every layer reads, and labels: the chain of layers decides."""
    layers = 24
    items = [Item("mask", ("mask",), 1e-3, 0.0), Item("labels", ("labels",), 1e-3, 0.0)]
    items += [Item(f"l{i}", (f"l{i}",), 1.0 + i % 2 / 10, 2.0) for i in range(layers)]
    items.append(Item("loss", ("loss",), 0.5, 0.5))
    chain = range(2, 2 + layers)
    traffic = [Traffic("mask", 0, tuple(chain), 1, 0), Traffic("labels", 1, (2 + layers,), 1, 0)]
    traffic += [Traffic(f"l{i - 2}", i, (i + 1,), 10, 10) for i in chain]
    limits = (StageLimits(bytes_per_second=1e4),) * 6
    problem = PartitionProblem(
        tuple(items), tuple(traffic), limits, num_microbatches=12, objective="flush"
    )
    _, certificate = partition(problem, time_limit=10)
    assert certificate.gap < 0.01


def bound_of(problem: PartitionProblem) -> float:
    best = brute_force(problem)
    assert best is not None
    return close(problem, best)


def test_gradients_of_a_shared_parameter_wait_for_slots() -> None:
    """Each takes 20 seconds over the slow link, and the third one leaves when the first microbatch
    has been all the way down and up: 120 + 6 x 20, a backward after the last, the new weights."""
    problem = chain_problem(
        [30.0] * 4, 4, num_microbatches=8, objective="flush",
        stages=(StageLimits(), StageLimits(bytes_per_second=1.0), StageLimits(), StageLimits()),
    )  # fmt: skip
    shared = (SharedParameter("w", 20, True, (0, 3)),)
    assert bound_of(replace(problem, shared=shared)) > 0.85


@pytest.mark.parametrize("branch", [False, True])
def test_new_weights_of_a_shared_parameter_are_sent_at_last(branch: bool) -> None:
    """60 seconds over the slow link in the middle, also if a branch beside the second group may
    have a stage of its own."""
    items = tuple(Item(f"i{i}", (f"i{i}",), 10.0, 20.0) for i in range(4))
    readers = ((1, 2), (3,), (3,)) if branch else ((1,), (2,), (3,))
    traffic = tuple(Traffic(f"i{i}", i, sinks, 1, 1) for i, sinks in enumerate(readers))
    limits = tuple(StageLimits(bytes_per_second=rate) for rate in (50.0, 1.0, 50.0, 50.0))
    shared = (SharedParameter("w", 60, True, (0, 3)),)
    problem = PartitionProblem(
        items, traffic, limits, shared, num_microbatches=2, objective="flush"
    )
    assert bound_of(problem) > 0.87


def test_both_values_of_a_cut_inside_a_branch_are_counted() -> None:
    """A residual of 30 bytes goes around the second item.  The cut behind that one, which sends it
    too, still is the best: else one stage computes twice as much."""
    items = tuple(Item(f"i{i}", (f"i{i}",), f, 2 * f) for i, f in enumerate((20.0,) * 4))
    traffic = (
        Traffic("i0", 0, (1, 2), 30, 30), Traffic("i1", 1, (2,), 10, 10),
        Traffic("i2", 2, (3,), 10, 10),
    )  # fmt: skip
    limits = (StageLimits(bytes_per_second=10.0),) * 2
    problem = PartitionProblem(
        items, traffic, limits, num_microbatches=4, objective="flush",
        memory=MemoryRule(in_flight=(2, 1)),
    )  # fmt: skip
    assert bound_of(problem) > 0.999


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("count", "stages", "slow", "sent"), [(8, 4, 6, 40), (8, 4, 5, 20), (7, 5, 4, 40)]
)
def test_round_trips_over_several_stages(count: int, stages: int, slow: int, sent: int) -> None:
    """Between the first stages values are large: trips over all of these, again and again, are what
    the schedule waits for."""
    items = tuple(Item(f"i{i}", (f"i{i}",), 1.0, 2.0) for i in range(count))
    traffic = tuple(
        Traffic(f"i{i}", i, (i + 1,), *(sent if i < slow else 1,) * 2) for i in range(count - 1)
    )
    limits = (StageLimits(bytes_per_second=10.0),) * stages
    problem = PartitionProblem(items, traffic, limits, num_microbatches=32, objective="flush")
    assert bound_of(problem) > 0.98


@pytest.mark.slow
def test_what_many_stages_read_is_out_of_the_way_only_once() -> None:
    """Two projections of the encoder's output beside four layers: they may be made beside the
    first layers, and nothing else is out of the way."""
    items = [Item(f"i{i}", (f"i{i}",), 1.0, 2.0) for i in range(7)]
    traffic = [
        Traffic("i0", 0, (1, 2, 3), 1, 1), Traffic("i1", 1, (5,), 1, 1),
        Traffic("i2", 2, (6,), 1, 1), Traffic("i3", 3, (4,), 1, 1),
        Traffic("i4", 4, (5,), 1, 1), Traffic("i5", 5, (6,), 1, 1),
    ]  # fmt: skip
    problem = PartitionProblem(
        tuple(items), tuple(traffic), (StageLimits(),) * 5, objective="flush"
    )
    assert bound_of(problem) >= (3 * 7 - 3 * 2) / (3 * 7)


@pytest.mark.slow
def test_long_chains_are_bounded_along_themselves() -> None:
    """There are too many pairs of intervals of 243 groups in a row for tables of both."""
    with Budget(60) as budget:
        search = solve(gpt_problem(48, 8), budget, thorough=False)
    assert search.bound > 0.99 * search.upper


def around_a_chain(seed: int) -> tuple[PartitionProblem, tuple[int, ...]]:
    """A chain, items around parts of it or before or behind all of it, and a random plan, which may
    leave stages without work."""
    r = random.Random(seed)
    length, num_stages = r.randint(6, 10), r.randint(3, 6)
    ends = [sorted(r.sample(range(-1, length + 1), 2)) for _ in range(r.randint(2, 6))]
    starting = [[n for n, (a, _) in enumerate(ends) if a == c] for c in range(-1, length)]
    names = [(c, n) for c in range(-1, length) for n in (-1, *starting[c + 1])][1:]
    cuts = [r.randint(0, length) for _ in range(num_stages - 1)]
    stages = [0, *(sum(c >= k for k in cuts) for c in range(length)), num_stages - 1]  # from -1 on
    items, traffic, stage_of = [], [], []
    for i, (c, n) in enumerate(names):
        f = 3 + r.random() if n < 0 else 3 * r.random()
        items.append(Item(f"i{i}", (f"i{i}",), f, r.choice((1, 2)) * f))
        last = c if n < 0 else ends[n][1]
        stage_of.append(r.randint(stages[c + 1], stages[last + 1]))
        read_by = [(last, -1)] if n >= 0 else [(c + 1, -1), *((c, k) for k in starting[c + 1])]
        readers = tuple(sorted(names.index(one) for one in read_by if one in names))
        if readers:
            traffic.append(Traffic(f"i{i}", i, readers, r.randint(0, 3), r.randint(1, 3)))
    limits = (StageLimits(bytes_per_second=r.choice((5.0, 50.0, 500.0))),) * num_stages
    m = r.choice((4, 8, 16, 32))
    problem = PartitionProblem(
        tuple(items), tuple(traffic), limits, num_microbatches=m, objective="flush"
    )
    return problem, tuple(stage_of)


def test_with_a_plans_intervals_of_the_path_the_bound_is_below_the_plan(fast: bool) -> None:
    """Pinned, the path has no other intervals: what the bound says of these is nearly tight."""
    found, count = [], 50 if fast else 200
    for seed in range(count):
        problem, stage_of = around_a_chain(seed)
        if violations(problem, stage_of):
            continue
        model = build(problem)
        path = [i for group in heaviest_path(model) for i in model.members[group]]
        pinned = replace(problem, pins=tuple((i, stage_of[i]) for i in path))
        plan = measure(problem, stage_of).objective
        found.append(close(pinned, plan))
    assert len(found) > count // 5
    assert sum(found) > 0.9 * len(found)


@pytest.mark.parametrize(("made", "seed"), [(blocks, 347), (blocks, 645), (branched, 392)])
def test_trips_over_two_stages_have_what_surely_is_on_one_of_them(
    made: Callable[[int], PartitionProblem], seed: int
) -> None:
    """With the earliest end that the second one may have: by its latest the optimum is denied."""
    assert bound_of(replace(made(seed), num_microbatches=16, memory=MemoryRule())) > 0.5


def test_a_stage_before_the_path_computes_what_nothing_of_it_is_before() -> None:
    """Three items of equal work, of which the first one is read by the last: a stage for each."""
    items = tuple(
        Item(name, (name,), 2.0, 2.0 + f) for name, f in zip("xab", (0, 1, 1), strict=True)
    )
    traffic = (Traffic("x", 0, (2,), 1, 1), Traffic("a", 1, (2,), 1, 1))
    problem = PartitionProblem(
        items, traffic, (StageLimits(),) * 3, num_microbatches=32, objective="flush", pins=((1, 1),)
    )
    assert heaviest_path(build(problem)) == (1, 2)
    assert bound_of(problem) > 0.9


def test_what_may_be_on_any_of_several_stages_is_computed_once() -> None:
    """Four stages of one second of the path each.  The first two have room for two seconds that lie
    between them, the last two none for the two seconds that lie between these."""
    size = 5
    cut = [np.zeros((size, size), dtype=bool) for _ in range(4)]
    for s, mask in enumerate(cut):
        mask[s, s + 1] = True
    most = [np.where(mask, room, -1.0) for mask, room in zip(cut, (3, 3, 1, 1), strict=True)]
    before, behind = np.array([0, 1, 4, 5, 8.0]), np.array([8, 5, 4, 1, 0.0])
    kept = [mask.copy() for mask in cut]
    path_case._drop_without_all_work(kept, most, [3.0] * 4, None, (0 * before, 0 * behind), 8.0)
    assert all(mask.any() for mask in kept)  # eight seconds in all are not too many
    path_case._drop_without_all_work(kept, most, [3.0] * 4, None, (before, behind), 8.0)
    assert not any(mask.any() for mask in kept)


@pytest.mark.parametrize("seed", [26, 58])
def test_all_work_is_done_where_some_stages_are_without_the_path(seed: int) -> None:
    """What the others compute in that time is not all: without that sum it is 0.69 and 0.66."""
    assert bound_of(branched(seed)) > 0.78
