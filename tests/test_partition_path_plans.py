"""Plans along the heaviest path, and moves of several groups: what a search begins with."""

import random
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.improve.moves import _Allowed, move_groups, move_more
from pdcompile.passes.partition.model import build
from pdcompile.passes.partition.path import path_program
from pdcompile.passes.partition.path.path_plans import path_plans
from pdcompile.passes.partition.path.path_tables import Band
from pdcompile.passes.partition.search import Search
from pdcompile.passes.partition.segments import Segments
from pdcompile.plan.evaluate import measure, violations
from pdcompile.problem import Item, PartitionProblem, SharedParameter, StageLimits, Traffic
from tests.helpers.problems import brute_force, chain_problem, random_problem
from tests.test_partition_path_bounds import branched, residual_blocks, two_branches


def objectives(problem: PartitionProblem) -> list[float]:
    model = build(problem)
    found = [model.items_of(groups) for groups in path_plans(model) if groups is not None]
    return [measure(problem, one).objective for one in found if not violations(problem, one)]


@pytest.mark.slow
def test_plans_keep_the_order_of_groups() -> None:
    plans = 0
    for seed in range(200):
        try:
            model = build(branched(seed))
        except InfeasibleError:
            continue
        for groups in filter(None, path_plans(model)):
            plans += 1
            assert all(groups[u] <= groups[v] for u, v in model.arcs)
            assert all(0 <= s < model.num_stages for s in groups)
    assert plans > 1000


def test_a_branch_gets_a_stage_of_its_own() -> None:
    """The branches run beside each other: 2 (1 + 2 + 1) + 1.5, and nothing else is as fast."""
    problem = two_branches()
    assert min(objectives(problem)) == brute_force(problem) == 9.5


def test_several_stages_may_be_beside_one() -> None:
    """x and y read a mask and run while b does: 1 + 4 + 1, with the path on three stages."""
    seconds = zip("abxyc", (1.0, 4.0, 1.5, 1.5, 1.0), strict=True)
    items = tuple(Item(name, (name,), f / 2, f / 2) for name, f in seconds)
    traffic = (
        Traffic("a", 0, (1,), 1, 1), Traffic("mask", 0, (2, 3), 1, 0), Traffic("b", 1, (4,), 1, 1),
        Traffic("x", 2, (4,), 1, 1), Traffic("y", 3, (4,), 1, 1),
    )  # fmt: skip
    problem = PartitionProblem(items, traffic, (StageLimits(),) * 5, objective="flush")
    assert min(objectives(problem)) == brute_force(problem) == 6.0


def test_what_looks_good_changes_the_order_and_no_more() -> None:
    problem = replace(residual_blocks(3, 3), num_microbatches=4)
    model = build(problem)
    given = [*path_plans(model)]
    sought = [*path_plans(model, lambda groups: measure(problem, model.items_of(groups)).objective)]
    assert given != sought
    assert Counter(given) == Counter(sought)


def test_what_has_no_time_is_all_that_a_band_leaves_out(
    monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """The same plans, in the same order, where all intervals are looked at."""
    problems = [residual_blocks(blocks, 3) for blocks in ((3,) if fast else (2, 3, 4))]
    problems += [decoder_beside_encoder(stages) for stages in ((4,) if fast else (4, 5, 6))]
    models = [build(replace(problem, num_microbatches=4)) for problem in problems]
    few = [[*path_plans(model)] for model in models]

    def every(program: Any, s: int, best: Any, makespan: float) -> Band:
        return Band(slice(1, program.beside.length + 1), program.beside.length)

    monkeypatch.setattr(path_program.PathProgram, "_band", every)
    assert few == [[*path_plans(model)] for model in models]
    assert all(len(set(plans)) > 3 for plans in few)


def decoder_beside_encoder(stages: int) -> PartitionProblem:
    """An encoder whose output every layer of a decoder projects: the projections may all be done
    as soon as it is there."""
    items = [Item(f"e{i}", (f"e{i}",), 1.0, 2.0) for i in range(4)]
    traffic = [Traffic(f"e{i}", i, (i + 1,), 1, 1) for i in range(3)]
    layers = range(4)
    items += [Item(f"k{i}", (f"k{i}",), 1.0, 2.0) for i in layers]
    items += [Item(f"d{i}", (f"d{i}",), 2.0, 4.0) for i in layers]
    traffic.append(Traffic("e3", 3, (4, 5, 6, 7, 8), 1, 1))
    traffic += [Traffic(f"k{i}", 4 + i, (8 + i,), 1, 1) for i in layers]
    traffic += [Traffic(f"d{i}", 8 + i, (9 + i,), 1, 1) for i in range(3)]
    return PartitionProblem(
        tuple(items), tuple(traffic), (StageLimits(),) * stages, objective="flush"
    )


def test_a_branch_runs_backward_at_the_same_time_where_its_value_is_not_read() -> None:
    """Three blocks are cut behind the item that reads what the branch reads, not before it."""
    problem = residual_blocks(4, 12)
    total = sum(item.forward_seconds + item.backward_seconds for item in problem.items)
    assert min(objectives(problem)) == pytest.approx(total - 3 * 6.0)


def long_block(stages: int) -> PartitionProblem:
    """Six items in a row and one around them, which takes as long as three of these."""
    row = range(1, 7)
    seconds = {0: 1.0, **dict.fromkeys(row, 1.0), 7: 3.0, 8: 1.0}
    items = tuple(Item(f"i{i}", (f"i{i}",), f, 2 * f) for i, f in seconds.items())
    sinks = {0: (1, 7), **{i: (i + 1,) for i in row[:-1]}, 6: (8,), 7: (8,)}
    traffic = tuple(Traffic(f"i{i}", i, ends, 1, 1) for i, ends in sinks.items())
    limits = (StageLimits(bytes_per_second=2.0),) * stages
    return PartitionProblem(items, traffic, limits, objective="flush")


def test_a_branch_is_counted_beside_one_stage_of_its_block_only() -> None:
    """It is hidden whole behind the row, 3 (1 + 6 + 1), and the way has four hops of a second there
    and back.  Were it beside several stages, more cuts inside the block would seem to pay."""
    assert min(objectives(long_block(6))) == pytest.approx(3 * 8.0 + 4 * 1.0)


@pytest.mark.slow
def test_what_many_layers_read_is_made_beside_the_first_of_them() -> None:
    """Without stages of their own the projections are on the way: 16 seconds, three times."""
    problem = decoder_beside_encoder(6)
    in_a_row = 3 * (4 * 1.0 + 4 * 1.0 + 4 * 2.0)
    found = min(objectives(problem))
    assert found <= in_a_row - 3 * 2.0
    best, certificate = partition(problem, time_limit=5)
    assert best.objective <= found
    assert certificate.gap < 0.2


def test_a_path_with_a_shared_parameter_stays_behind_a_slow_link() -> None:
    """Two constants may lie on the stages before it: its gradients then never cross the link."""
    constants = [Item(f"c{i}", (f"c{i}",), 0.0, 0.0) for i in range(2)]
    layers = [Item(f"l{i}", (f"l{i}",), 1.0, 2.0) for i in range(4)]
    traffic = [Traffic(f"l{i}", 2 + i, (3 + i,), 1, 1) for i in range(3)]
    traffic += [Traffic(f"c{i}", i, (5,), 0, 0) for i in range(2)]
    fast, slow = (StageLimits(bytes_per_second=rate) for rate in (1e6, 1.0))
    shared = (SharedParameter("w", 50, True, (2, 5)),)
    problem = PartitionProblem(
        (*constants, *layers), tuple(traffic), (fast, slow, fast, fast), shared,
        num_microbatches=8, objective="flush",
    )  # fmt: skip
    one_link = 8 * 50.0  # seconds of its gradients
    assert min(objectives(problem)) < 2 * 3 * 9 + 2 < one_link


def test_moves_of_several_groups_end_at_no_worse_a_plan() -> None:
    """Thirty groups on the first stage: single moves only shift the last one on and on."""
    problem = chain_problem([1.0] * 32, 3, num_microbatches=8, objective="flush")
    model = build(problem)
    with Budget(30) as budget:
        search = Search(problem, model, budget)
        search.offer((0,) * 30 + (1, 2))
        before = search.upper
        move_groups(search, Segments.build(model, []))
    even = measure(problem, (0,) * 11 + (1,) * 11 + (2,) * 10).objective
    assert search.upper < before
    assert search.upper == pytest.approx(even, rel=0.05)


def test_a_boundary_moves_far_away() -> None:
    """Cuts behind groups 5 and 10 cost little, those from 44 on less, all others much; and no move
    of a boundary alone comes so far."""
    hops = {5: 2, 10: 2} | dict.fromkeys(range(44, 60), 1)
    items = tuple(Item(f"v{i}", (f"v{i}",), 1.0, 1.0) for i in range(60))
    traffic = tuple(
        Traffic(f"v{i}", i, (i + 1,), size, size)
        for i in range(59)
        for size in [hops.get(i + 1, 10)]
    )
    stages = (StageLimits(bytes_per_second=1.0),) * 3
    problem = PartitionProblem(items, traffic, stages, objective="flush")
    model = build(problem)
    with Budget(60) as budget:
        search = Search(problem, model, budget)
        search.offer((0,) * 5 + (1,) * 5 + (2,) * 50)
        assert search.upper == 128  # 120 s of work, two hops there and back
        move_more(search, Segments.build(model, []))
    assert search.upper == 124


def test_changed_plans_keep_every_constraint_but_memory() -> None:
    compared = kept = 0
    for seed in range(200):
        problem = random_problem(seed, max_items=6)
        r = random.Random(seed)
        n, count = len(problem.items), len(problem.stages)
        forbidden = tuple((r.randrange(n), r.randrange(count)) for _ in range(r.choice((0, 0, 1))))
        most = r.randint(1, count) if problem.allow_empty else None
        problem = replace(
            problem.without_memory_limits(), forbidden=forbidden, max_stages=most, pins=()
        )
        try:
            model = build(problem)
        except InfeasibleError:
            continue
        every = np.array([*product(range(count), repeat=model.num_groups)])
        found = {tuple(one) for one in _Allowed(model).of(every).tolist()}
        for one in map(tuple, every.tolist()):
            assert (one in found) == (not violations(problem, model.items_of(one))), f"seed {seed}"
        compared, kept = compared + len(every), kept + len(found)
    assert 0 < kept < compared
