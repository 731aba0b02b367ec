"""The planner against brute force, on problems with every feature."""

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import pdcompile.passes.partition.answer as answer
import pdcompile.passes.partition.search as search
from pdcompile.errors import InfeasibleError, PlanError
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.bounds import bounding_cost
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.chains import solve
from pdcompile.passes.partition.cpsat import IntegerProgram
from pdcompile.passes.partition.model import all_ideals, build, positions
from pdcompile.passes.partition.segments import Segments
from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import (
    Item,
    PartitionProblem,
    SharedParameter,
    StageLimits,
    Traffic,
)
from tests.helpers.problems import (
    brute_force,
    chain_problem,
    evaluate,
    gpt_problem,
    holding,
    measure,
    random_problem,
    violations,
)


def agrees_with_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    best = brute_force(problem)
    try:
        found, certificate = partition(problem)
    except InfeasibleError:
        assert best is None, f"seed {seed}: there is a plan of {best}"
        return
    assert best is not None, f"seed {seed}: found what brute force does not"
    assert found == evaluate(problem, found.stage_of)
    assert found.objective == pytest.approx(best, rel=1e-5, abs=1e-12), f"seed {seed}"
    assert certificate.bound_seconds <= best * (1 + 1e-9) + 1e-12, f"seed {seed}"
    assert certificate.status == "optimal"
    assert certificate.gap == 0
    assert certificate.objective_seconds == found.objective


def blocks(count: int) -> list[Any]:
    """Blocks of seeds; all but the first are slow tests."""
    return [pytest.param(k, marks=pytest.mark.slow if k else ()) for k in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(10))
def test_optimal_on_two_thousand_problems(block: int) -> None:
    for seed in range(200 * block, 200 * block + 200):
        agrees_with_brute_force(seed)


@pytest.mark.parametrize("block", blocks(8))
def test_the_integer_program_proves_what_bounds_do_not(block: int) -> None:
    for seed in range(10_000 + 50 * block, 10_000 + 50 * block + 50):
        agrees_with_brute_force(seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(4))
def test_integer_program_without_any_start(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dynamic program finds nothing: CP-SAT has to find, prove, or refute."""

    def nothing(found: search.Search) -> Segments:
        return Segments(found.model, all_ideals(found.model, 10_000) or [])

    monkeypatch.setattr(search, "cut_by_program", nothing)
    for seed in range(20_000 + 40 * block, 20_000 + 40 * block + 40):
        agrees_with_brute_force(seed)


def test_the_relaxation_never_overstates(fast: bool) -> None:
    """CP-SAT's bound with the optimum as upper bound stays at or below it."""
    for seed in range(50 if fast else 150):
        problem = random_problem(seed)
        best = brute_force(problem)
        if best:
            program = IntegerProgram(build(problem), best * 1.001)
            bound, groups = program.solve(Budget(), 0, lambda _: None)
            assert bound <= best * (1 + 1e-9), f"seed {seed}"
            assert groups is not None


@pytest.mark.slow
def test_segment_costs_never_overstate() -> None:
    """The dynamic program over all ideals is a bound on the bottleneck, exact next door."""
    exact = 0
    for seed in range(300):
        problem = replace(random_problem(seed), objective="bottleneck")
        if (best := brute_force(problem)) is None:
            continue
        model = build(problem)
        segments = Segments(model, all_ideals(model, 10_000) or [])
        found = solve(segments, bounding_cost(segments))
        assert found is not None
        assert found[0] <= best * (1 + 1e-9) + 1e-12, f"seed {seed}"
        exact += found[0] >= best * (1 - 1e-9)
    assert exact > 150


def test_positions_are_ideals() -> None:
    for seed in range(50):
        model = build(replace(random_problem(seed, 9), pins=()))
        everything = all_ideals(model, 10**6)
        assert everything is not None
        assert set(positions(model)) <= set(everything)
        assert everything[0] == 0
        assert everything[-1] == 2**model.num_groups - 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("objective", ["bottleneck", "flush"])
@pytest.mark.parametrize(("layers", "num_stages"), [(12, 2), (12, 4), (12, 8), (20, 4)])
def test_transformers_are_proved(layers: int, num_stages: int, objective: str) -> None:
    found, certificate = partition(gpt_problem(layers, num_stages, objective))
    assert certificate.status == "optimal"
    assert certificate.gap == 0
    assert list(found.stage_of) == sorted(found.stage_of)


def test_same_answer_every_time() -> None:
    for objective in ("bottleneck", "flush"):
        problem = gpt_problem(6, 4, objective, jitter=0.0)
        assert partition(problem)[0] == partition(problem)[0]


def test_balanced_chain() -> None:
    found, certificate = partition(chain_problem([1.0, 2.0, 3.0, 4.0, 5.0], 2))
    assert found.stage_of == (0, 0, 0, 1, 1)
    assert found.loads == (6.0, 9.0)
    assert certificate.prover == "dynamic program over all ideals"


def test_slow_links_move_the_cut() -> None:
    """The middle cut is balanced but its value is large."""
    items = tuple(Item(f"i{i}", (f"i{i}",), 1.0, 1.0) for i in range(4))
    sizes = (1, 100, 1)
    traffic = tuple(Traffic(f"v{i}", i, (i + 1,), sizes[i], sizes[i]) for i in range(3))
    slow, fast = StageLimits(bytes_per_second=10.0), StageLimits(bytes_per_second=1e9)
    assert partition(PartitionProblem(items, traffic, (fast,) * 2))[0].stage_of == (0, 0, 1, 1)
    found, _ = partition(PartitionProblem(items, traffic, (slow,) * 2))
    assert found.objective == 6.0
    assert found.stage_of in ((0, 1, 1, 1), (0, 0, 0, 1))


def test_faster_device_gets_more() -> None:
    stages = (StageLimits(speed=1.0), StageLimits(speed=3.0))
    found, _ = partition(chain_problem([1.0] * 8, 2, stages=stages))
    assert found.stage_of == (0, 0, 1, 1, 1, 1, 1, 1)
    assert found.loads == pytest.approx((2.0, 2.0))


def test_tied_weights_keep_their_price() -> None:
    """A shared parameter of 100 bytes is sent every microbatch: cheaper to hold both ends."""
    problem = chain_problem([2.0, 1.0, 1.0, 2.0], 2, size=0)
    stages = (StageLimits(bytes_per_second=10.0),) * 2
    apart = replace(problem, stages=stages)
    assert partition(apart)[0].objective == 3.0
    shared = (SharedParameter("w", 100, True, (0, 2)),)
    tied, _ = partition(replace(apart, shared=shared))
    assert tied.stage_of == (0, 0, 0, 1)
    frozen = (SharedParameter("w", 100, False, (0, 2)),)
    assert partition(replace(apart, shared=frozen))[0].objective == 3.0


def test_round_trip_counts_when_little_is_in_flight() -> None:
    problem = chain_problem([3.0, 3.0], 2)
    for in_flight, seconds in (((2, 1), 3.0), ((1, 1), 6.0)):
        with_it = replace(problem, in_flight=in_flight, holdings=holding(in_flight))
        assert partition(with_it)[0].objective == pytest.approx(seconds)


@pytest.mark.sample(3)
@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e12])
@pytest.mark.parametrize("objective", ["bottleneck", "flush"])
def test_costs_of_any_size(scale: float, objective: Any) -> None:
    problem = chain_problem([scale * x for x in (3.0, 1.0, 4.0, 1.0, 5.0, 9.0)], 3, size=0)
    problem = replace(problem, objective=objective, num_microbatches=4)
    found, certificate = partition(problem)
    assert certificate.status == "optimal"
    assert found.objective == pytest.approx(brute_force(problem), rel=1e-9)


def test_costs_of_very_unlike_size() -> None:
    problem = chain_problem([1e-12, 1e12, 1.0, 1e-12, 1e12], 2)
    assert partition(problem)[0].objective == pytest.approx(1e12)


@pytest.mark.parametrize("objective", ["bottleneck", "flush"])
def test_nothing_costs_anything(objective: Any) -> None:
    problem = replace(chain_problem([0.0] * 5, 3, size=0), objective=objective)
    found, certificate = partition(problem)
    assert found.objective == 0.0
    assert certificate.status == "optimal"
    assert set(found.stage_of) == {0, 1, 2}


def test_one_item_and_disconnected_items() -> None:
    assert partition(chain_problem([1.0], 1))[0].stage_of == (0,)
    items = tuple(Item(f"i{i}", (f"i{i}",), 1.0) for i in range(4))
    found, _ = partition(PartitionProblem(items, (), (StageLimits(),) * 2))
    assert found.objective == 2.0


def test_cycles_of_precedence_are_one_group() -> None:
    problem = replace(chain_problem([1.0] * 4, 2), together=((0, 2),))
    assert partition(problem)[0].stage_of == (0, 0, 0, 1)
    assert build(problem).members == ((0, 1, 2), (3,))


@pytest.mark.sample(1)
@pytest.mark.parametrize("time_limit", [0, 0.0, 1e-9])
def test_no_time_still_gives_a_plan(time_limit: float) -> None:
    found, certificate = partition(gpt_problem(6, 4), time_limit=time_limit)
    assert certificate.bound_seconds <= found.objective
    assert certificate.status in ("feasible", "optimal")
    assert (certificate.status == "optimal") == (certificate.gap == 0)


def test_progress_and_scope() -> None:
    lines: list[str] = []
    problem = replace(gpt_problem(3, 2), scope="blocks")
    _, certificate = partition(problem, progress=lines.append)
    assert lines
    assert certificate.scope == "blocks"


def test_large_problem_is_cut_and_bounded() -> None:
    problem = gpt_problem(400, 8, "bottleneck")
    found, certificate = partition(problem, time_limit=0)
    assert certificate.status == "feasible"
    assert certificate.prover == "relaxation"
    assert certificate.gap < 0.05
    assert found == evaluate(problem, found.stage_of)


def test_planner_checks_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Evaluation):
        def violations(self) -> Iterator[str]:
            yield "nonsense"

    monkeypatch.setattr(answer, "Evaluation", Wrong)
    with pytest.raises(PlanError, match=r"internal error.*nonsense"):
        partition(chain_problem([1.0, 2.0], 2))


def test_violations_name_what_is_not_allowed() -> None:
    problem = replace(chain_problem([1.0] * 3, 2), apart=((0, 1),), pins=((0, 0),))
    for stage_of, message in (
        ((0, 1), "2 stages given for 3"),
        ((0, 1, 2), "stage 2 of 2"),
        ((0, 1, 0), "earlier stage"),
        ((0, 0, 1), "are on one stage"),
        ((1, 1, 1), "pinned to 0"),
        ((0, 0, 0), "stage 1 is empty|on one stage"),
    ):
        assert re.search(message, violations(problem, stage_of)[0])


def test_planning_needs_neither_torch_nor_or_tools_to_import() -> None:
    code = (
        "import sys, pdcompile.plan, pdcompile.cluster, pdcompile.passes.partition\n"
        "sys.exit(' '.join({'torch', 'ortools'} & set(sys.modules)) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_reductions_lose_nothing() -> None:
    """Groups instead of items: the optimum is the same, and every assignment costs the same.

    Items that are together or in a cycle of precedence become one group, values with the same
    ends one flow, pins ranges: the best assignment of groups is the best of items.
    """
    smaller = 0
    for seed in range(120):
        r = random.Random(seed)
        problem = replace(random_problem(seed, 6), objective=r.choice(("bottleneck", "flush")))
        n, stages = len(problem.items), range(len(problem.stages))
        if n < 2:
            continue
        problem = replace(
            problem,
            together=((r.randrange(n), r.randrange(n)),),
            order=((r.randrange(n), r.randrange(n)),),
            pins=((r.randrange(n), r.choice(stages)),),
        )
        best = brute_force(problem)
        try:
            model = build(problem)
        except InfeasibleError:
            assert best is None
            continue
        smaller += model.num_groups < n
        found = []
        for groups in itertools.product(stages, repeat=model.num_groups):
            inside = all(
                low <= s <= high
                for s, low, high in zip(groups, model.lowest, model.highest, strict=True)
            )
            stage_of = model.items_of(groups)
            if not violations(problem, stage_of):
                assert inside, f"seed {seed}"
                found.append(measure(problem, stage_of).objective)
        assert min(found, default=None) == best, f"seed {seed}"
    assert smaller > 25


def test_what_is_to_be_apart_is_not_joined_in_a_large_model() -> None:
    problem = replace(gpt_problem(200, 4, "flush"), apart=((101, 102),))
    assert len(problem.items) > search.FIRST
    found, _ = partition(problem, time_limit=2)
    assert found.stage_of[101] != found.stage_of[102]
