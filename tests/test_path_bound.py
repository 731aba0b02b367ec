"""The bound along a path never exceeds the optimum, whatever lies beside the path."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from pdcompile.passes.partition import partition
from pdcompile.passes.partition.model import build
from pdcompile.passes.partition.space.path_bound import MOST, Path, heaviest_path
from pdcompile.passes.partition.space.straight import straight_bound
from pdcompile.problem import (
    Item,
    PartitionProblem,
    SharedParameter,
    StageLimits,
    Traffic,
)
from pdcompile.schedule.registry import DEFAULT
from tests.helpers.problems import (
    brute_force,
    chain_problem,
    gpt_problem,
    holding,
    random_problem,
)


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
    in_flight, schedule = r.choice(((), in_flight)), DEFAULT
    if r.random() < 0.2:
        in_flight, schedule = (m,) * num_stages, "gpipe"
    elif r.random() < 0.2:
        in_flight, schedule = (), "zb-h1"
    return PartitionProblem(
        tuple(items), tuple(traffic), limits, shared, schedule=schedule, in_flight=in_flight,
        holdings=holding(in_flight), num_microbatches=m, objective="flush",
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
    in_flight, schedule = tuple[int, ...](), DEFAULT
    if r.random() < 0.2:
        in_flight, schedule = (m,) * num_stages, "gpipe"
    return PartitionProblem(
        tuple(items), tuple(traffic), limits, schedule=schedule, in_flight=in_flight,
        holdings=holding(in_flight), num_microbatches=m, objective="flush",
    )  # fmt: skip


def close(problem: PartitionProblem, best: float) -> float:
    """The bound over the optimum, which it may not exceed."""
    model = build(problem)
    found = straight_bound(model, 0.0, best * (1 + 1e-6), lambda: False)
    assert found <= best * (1 + 1e-9) + 1e-12
    return found / best if best else 1.0


def ratios(problems: Iterable[PartitionProblem]) -> list[float]:
    """`close` of those that have a plan."""
    found = ((problem, brute_force(problem)) for problem in problems)
    return [close(problem, best) for problem, best in found if best is not None]


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 20))]
)
def test_bounds_stay_below_the_optimum(block: int, fast: bool) -> None:
    found, count = [], 30 if fast else 100
    for seed in range(100 * block, 100 * block + count):
        problem = blocks(seed) if seed % 3 == 0 else branched(seed)
        if seed % 5 == 0:
            problem = random_problem(seed, max_items=6)
            flush = seed % 2 == 0
            problem = replace(problem, objective="flush") if flush else problem
        found += ratios([problem])
    assert len(found) > 0.6 * count
    assert sum(ratio > 0.8 for ratio in found) > count / 10


def test_the_path_is_looked_at_more_roughly_where_it_is_long() -> None:
    problem = chain_problem([1.0 + i % 3 for i in range(700)], 4, num_microbatches=8)
    path = Path(build(problem))
    assert 100 < path.size <= MOST
    assert path.inside("forward", True)[0, -1] == pytest.approx(1399 / 3)


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
    _, certificate = partition(problem, time_limit=100)
    assert certificate.gap < 0.02


def test_of_groups_beside_several_boundaries_each_is_hidden_once() -> None:
    """A projection of the first group's value is read by the last one: wherever stages without the
    path lie, they make it once."""
    items = tuple(Item(f"i{i}", (f"i{i}",), 1.0, 2.0) for i in range(6))
    traffic = (
        Traffic("i0", 0, (1, 2), 1, 1), Traffic("i1", 1, (5,), 1, 1),
        *(Traffic(f"i{i}", i, (i + 1,), 1, 1) for i in range(2, 5)),
    )  # fmt: skip
    problem = PartitionProblem(items, traffic, (StageLimits(),) * 4, objective="flush")
    path = Path(build(problem))
    assert heaviest_path(path.model) == (0, 2, 3, 4, 5)
    assert list(path.hidden(1.0)) == [0.0, 3.0, 3.0]
    best = brute_force(problem)
    assert best is not None
    assert close(problem, best) > 0.8


def test_messages_along_the_path_count_where_stages_hold_nothing_of_it() -> None:
    """A path of three groups lies on four stages, between which links of a byte a second decide."""
    problem = branched(122)
    best = brute_force(problem)
    assert best is not None
    assert close(problem, best) > 0.9


def test_a_path_of_one_group_has_two_boundaries_for_what_lies_beside_it() -> None:
    """No gradients come back, so the path is one group, and two stages hold nothing of it."""
    items = tuple(Item(f"i{i}", (f"i{i}",), 1.0, w) for i, w in enumerate((0.0, 2.0, 1.7)))
    traffic = Traffic("i0", 0, (1,), 5, 0), Traffic("i1", 1, (2,), 2, 0)
    problem = PartitionProblem(
        items, traffic, (StageLimits(),) * 3, num_microbatches=5, objective="flush"
    )
    assert list(Path(build(problem)).hidden(1.0)) == [0.0, 2.7, 3.7]
    best = brute_force(problem)
    assert best is not None
    assert close(problem, best) > 0.8


@pytest.mark.slow
def test_long_chains_are_bounded_along_themselves() -> None:
    """There are too many pairs of intervals of 243 groups in a row for tables of both."""
    problem = gpt_problem(48, 8)
    model = build(problem)
    upper = partition(problem, time_limit=100)[0].objective
    assert straight_bound(model, 0.0, upper, lambda: False) > 0.98 * upper
