"""ZB-H1: proved, as long as the paper says, and planned as exactly as what does not split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.cluster import Cluster
from pdcompile.errors import InfeasibleError, ScheduleError
from pdcompile.passes.check import check, check_programs
from pdcompile.passes.partition import partition
from pdcompile.passes.partition.bounds import bounding_cost
from pdcompile.passes.partition.chains import solve
from pdcompile.passes.partition.space.candidates import scheduled
from pdcompile.passes.partition.space.straight import straight_bound
from pdcompile.passes.schedules import make_stream, warmup
from pdcompile.passes.simulate import simulate
from pdcompile.plan import MemoryLedger, Plan
from pdcompile.problem import PartitionProblem
from pdcompile.problem.space import Setting
from pdcompile.schedule import Action, Instruction
from tests.helpers import spaces
from tests.helpers.problems import brute_force, chain_problem, evaluate
from tests.helpers.schedules import chain, make_plan, mutated, same_clock
from tests.test_partition_bounds import random_chain, segments_of
from tests.test_partition_makespan import flush_problem, simulated

NAME = "zb-h1"


# -- the schedule ------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 2), min_size=1, max_size=8),
    st.integers(1, 16),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, 1.0]),
)
def test_it_is_proved(
    replicas: list[int], count: int, extra: int, again: bool, clip: float | None
) -> None:
    """Any depth, microbatches and replicas; no stage holds more than the first one does."""
    plan = make_plan(
        NAME, len(replicas), count, replicas=tuple(replicas), extra=extra, clip=clip,
        recompute=again, saved_bytes=1,
    )  # fmt: skip
    check(plan)
    spec = plan.spec
    assert all(
        spec.in_flight(s) <= max(spec.in_flight(0), spec.warmup[s] + 1)
        for s in range(len(replicas))
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("depth", range(1, 9))
def test_the_bubble_is_the_papers(depth: int) -> None:
    """Forward, gradients of inputs and of weights take equally long; never behind 1F1B."""
    for count in range(1, 17):
        found, plain = (simulate(make_plan(n, depth, count)).forecast for n in (NAME, "1f1b"))
        assert found.step_seconds <= plain.step_seconds
        if count >= 2 * depth - 1:
            idle = Fraction(depth - 1, 3 * count + depth - 1)
            assert found.bubble == pytest.approx(float(idle), abs=1e-12)


def test_parts_in_another_order_are_refused() -> None:
    """Weights before inputs, twice, out of order, after the update, or as a whole backward."""
    plan = make_plan(NAME, 3, 4)
    program, stream = make_stream(plan).step(4)
    column = list(program.columns[2])
    place = {(one.action, one.microbatch): n for n, one in enumerate(column)}
    first = place[Action.BACKWARD_WEIGHT, 0]
    ends = Action.BACKWARD_WEIGHT, Action.FREE
    descending = [
        one._replace(microbatch=1 - one.microbatch)
        if one.action in ends and one.microbatch < 2
        else one
        for one in column
    ]
    inputs, update = place[Action.BACKWARD_INPUT, 0], place[Action.STEP, -1]
    whole = column[first]._replace(action=Action.BACKWARD)
    for changed, message in (
        (swapped(column, inputs, first), "before those of the inputs"),
        (descending, "not ascending"),
        (swapped(column, place[Action.BACKWARD_WEIGHT, 3], update), "before the minibatch's last"),
        ([*column[:first], *column[first + 1 :]], "frees what is not done"),
        ([*column[: first + 1], *column[first:]], "a backward without its forward"),
        ([*column[:first], whole, *column[first + 1 :]], "not an instruction"),
    ):
        with pytest.raises(ScheduleError, match=message):
            check_programs(plan, [mutated(program, 2, changed), stream.flush()[0]])
    halves = make_stream(make_plan("1f1b", 1, 1)).step(1)[0]
    split = [one._replace(action=Action.BACKWARD_INPUT) for one in halves.columns[0]]
    with pytest.raises(ScheduleError, match="not an instruction"):
        check_programs(make_plan("1f1b", 1, 1), [mutated(halves, 0, split)])


def swapped(column: list[Instruction], a: int, b: int) -> list[Instruction]:
    changed = list(column)
    changed[a], changed[b] = column[b], column[a]
    return changed


def test_activations_are_held_until_the_second_part() -> None:
    """Every stage holds what the first one does; with a second run only what is between parts."""
    for again, expected in ((False, [4, 4, 4, 4]), (True, [1, 2, 3, 4])):
        plan = make_plan(NAME, 4, 8, saved_bytes=1, recompute=again)
        found = [one.activations_bytes for one in simulate(plan).forecast.ledgers]
        assert found == expected
    found = scheduled(chain_problem([1.0] * 4, 4), Cluster.local(4), Setting(NAME, 8), (3, 2, 1, 0))
    held = [(one.saved, one.received, one.returned) for one in found.holdings]
    assert held == [(4, 5, 2), (4, 5, 2), (4, 5, 2), (4, 5, 1)]


def test_what_is_held_between_the_parts_is_another_number() -> None:
    """The number has the gradients that the second part needs, and not what only the first one
    did."""
    sizes = {
        "saved_bytes": 10,
        "workspace_bytes": 20,
        "split_bytes": 25,
        "split_workspace_bytes": 5,
    }
    plan = make_plan(NAME, 2, 4, edges=chain(2, 0), **sizes)
    found = [(one.activations_bytes, one.workspace_bytes) for one in ledgers(plan)]
    # First stage: one runs backward and one has only gone forward; last: one is between its parts.
    assert found == [(20, 20), (35, 20)]
    again = make_plan(NAME, 2, 4, edges=chain(2, 0), recompute=True, **sizes)
    assert [one.activations_bytes for one in ledgers(again)] == [10, 35]


def ledgers(plan: Plan) -> tuple[MemoryLedger, ...]:
    return simulate(plan).forecast.ledgers


# -- the planner -------------------------------------------------------------------------------


def of_the_schedule(problem: PartitionProblem) -> PartitionProblem:
    """The same problem under ZB-H1."""
    n, m = len(problem.stages), problem.num_microbatches
    return scheduled(problem, Cluster.local(n), Setting(NAME, m), warmup(NAME, n, m))


def test_the_fast_clock_is_the_simulators() -> None:
    for seed in range(80):
        problem, plan = simulated(seed, schedules=(NAME,))
        fast = evaluate(problem, tuple(range(len(problem.stages)))).objective
        assert same_clock(fast, plan, simulate(plan).forecast.step_seconds), f"seed {seed}"


def cases() -> Iterator[tuple[int, PartitionProblem]]:
    """Chains with any warm-up, and small problems of every kind."""
    for seed in range(60):
        row = random_chain(seed)
        yield seed, replace(row, schedule=NAME)
    for seed in range(100, 260):
        problem = flush_problem(seed)
        if problem is not None:
            yield seed, of_the_schedule(problem)


@pytest.mark.slow
def test_bounds_stay_below_the_optimum_and_the_search_finds_it() -> None:
    """Compared with all assignments: no bound takes a whole backward for what others wait for."""
    compared = 0
    for seed, problem in cases():
        best = brute_force(problem)
        if best is None:
            continue
        segments = segments_of(problem)
        value = solve(segments, bounding_cost(segments))
        assert value is not None
        assert value[0] <= best * (1 + 1e-9) + 1e-12, f"seed {seed}"
        along = straight_bound(segments.model, 0.0, best * 1.5, lambda: False)
        assert along <= best * (1 + 1e-9) + 1e-12, f"seed {seed}"
        found, certificate = partition(problem)
        assert found.objective == pytest.approx(best, rel=1e-6, abs=1e-12), f"seed {seed}"
        assert certificate.bound_seconds <= best * (1 + 1e-9) + 1e-12
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("block", range(3))
@pytest.mark.slow
def test_the_whole_space_is_searched_exactly(block: int) -> None:
    """The space has replicas, recomputation, limits on memory and unlike devices."""
    compared = 0
    for seed in range(120 * block, 120 * block + 120):
        draw = spaces.harsh_case if seed % 2 else spaces.random_case
        problem, cluster, space, setting = draw(seed)
        setting = replace(setting, schedule=NAME)
        ranks = tuple(range(len(cluster.devices)))
        counts = tuple(range(1, len(ranks) + 1)) if seed % 3 else (1,)
        case = (problem, cluster, space, setting, ranks, counts)
        expected = spaces.brute_force(*case, simulated=True)
        try:
            found = spaces.best(*case, exactly=True)
        except InfeasibleError:  # constraints that contradict each other
            found = None
        if expected is None or found is None:
            assert (expected, found) == (None, None), seed
            continue
        assert found[0] == pytest.approx(expected, rel=1e-9, abs=1e-12), seed
        compared += 1
    assert compared > 50
