"""place() against brute force, each prover alone, and what an answer holds."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.placement import place
from benchmarks.published.placement.ideal_program import all_ideals, best_chain
from benchmarks.published.placement.node_groups import grouped
from benchmarks.published.placement.placement_search import ExactSearch
from benchmarks.published.placement.placements import Placement, objective
from benchmarks.published.placement.threshold_program import prove
from benchmarks.published.placement_model import (
    SLACK,
    DeviceClass,
    LoadProblem,
    PlacedDevice,
    device_loads,
    parse,
    read,
    violations,
)
from benchmarks.published.tests.helpers.placements import (
    brute_force,
    device_load,
    inception,
    random_problem,
    write,
)
from pdcompile.passes.partition.budget import Budget
from tests.helpers.reference import folder

SMALL = 5  # forward nodes


def agree(found: float | None, best: float) -> bool:
    if found is None or math.isinf(found):
        return math.isinf(best)
    return abs(found - best) <= 1e-6 * best + 1e-12


def ideals_alone(groups: LoadProblem) -> float:
    found = all_ideals(groups, 10_000)
    assert found is not None
    chain = best_chain(groups, found, Budget())
    assert chain is not None
    if chain.placement is None:
        return math.inf
    value = objective(groups, chain.placement)
    assert chain.bound <= value
    return value


def integer_program_alone(groups: LoadProblem) -> float:
    found = [math.inf]

    def offer(placement: Placement) -> float:
        value = objective(groups, placement)
        found[0] = min(found[0], value)
        return value

    finite = [max((s for s in row if s < math.inf), default=0.0) for row in groups.seconds]
    proof = prove(groups, 2 + 2 * math.fsum([*finite, *groups.costs]), budget=Budget(), offer=offer)
    assert proof.complete
    assert proof.bound <= found[0] or math.isinf(found[0])
    return found[0]


@pytest.mark.parametrize("seed", range(150))
def test_place_agrees_with_brute_force(seed: int) -> None:
    problem = random_problem(seed, SMALL)
    best, _ = brute_force(problem)
    answer = place(problem)
    assert agree(answer.objective, best)
    assert answer.status == ("infeasible" if math.isinf(best) else "optimal")
    if answer.objective is not None:
        assert answer.gap == 0
        assert answer.bound <= best * (1 + 1e-12)
    else:
        assert answer.reason


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_each_prover_alone_agrees_with_brute_force(seed: int) -> None:
    problem = random_problem(seed, SMALL)
    if not any(kind.count for kind in problem.classes):
        problem = replace(problem, classes=(DeviceClass("accelerator", 2), *problem.classes[1:]))
    best, _ = brute_force(problem)
    groups = grouped(problem)
    assert agree(ideals_alone(groups), best)
    assert agree(integer_program_alone(groups), best)


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_answers_hold_every_node_once_with_the_loads_they_name(seed: int) -> None:
    problem = random_problem(seed, SMALL)
    answer = place(problem)
    if answer.objective is None:
        return
    index = {node.id: v for v, node in enumerate(problem.nodes)}
    held = [tuple(index[name] for name in stage.members) for stage in answer.stages]
    assert sorted(itertools.chain(*held)) == list(range(len(problem.nodes)))
    names = [kind.name for kind in problem.classes]
    roomy = replace(  # sums of fractions may exceed a limit that is such a sum by rounding
        problem, classes=tuple(replace(k, memory=k.memory * (1 + SLACK)) for k in problem.classes)
    )
    for stage, nodes in zip(answer.stages, held, strict=True):
        kind = names.index(stage.details["device"])
        assert stage.details["load"] == device_load(roomy, kind, set(nodes))
        assert stage.details["memory"] == math.fsum(problem.nodes[v].size for v in nodes)
        assert nodes == tuple(sorted(nodes))
    assert answer.objective == max(stage.details["load"] for stage in answer.stages)
    assert json.loads(json.dumps(answer.to_json(), allow_nan=False))["status"] == answer.status


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_linear_orders_give_placements_that_are_no_better_than_the_best(seed: int) -> None:
    problem = random_problem(seed, SMALL)
    groups = grouped(problem)
    search = ExactSearch(groups, Budget(), seed, None, -math.inf)
    if math.isinf(search.bound):
        return
    for order in search.orders(1):
        position = {v: i for i, v in enumerate(order)}
        assert sorted(order) == list(range(len(groups.sizes)))
        assert all(position[a] < position[b] for a, b in groups.arcs)
        search.along(order)
    best, _ = brute_force(problem)
    value, found = search.upper, search.best
    assert value >= best * (1 - 1e-12)
    if found is not None:
        assert value == objective(groups, found)
        for order in search.around(found.stage_of, seed):
            position = {v: i for i, v in enumerate(order)}
            assert all(position[a] < position[b] for a, b in groups.arcs)
        assert search.upper <= value * (1 + 1e-12)


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_a_known_placement_loses_nothing(seed: int) -> None:
    groups = grouped(random_problem(seed, SMALL))
    if not any(kind.count for kind in groups.classes):
        return
    found = all_ideals(groups, 10_000)
    assert found is not None
    free = best_chain(groups, found, Budget())
    assert free is not None
    if free.placement is None:
        return
    value = objective(groups, free.placement)
    bounded = best_chain(groups, found, Budget(), value)
    assert bounded is not None
    assert bounded.placement is not None
    assert objective(groups, bounded.placement) == pytest.approx(value, rel=1e-12)


def test_evaluation_refuses_what_is_no_pipeline() -> None:
    problem = parse(
        {
            "maxFPGAs": 2,
            "maxCPUs": 0,
            "maxSizePerFPGA": 8,
            "nodes": [
                {"id": i, "fpgaLatency": 1, "size": 4, "colorClass": c, "isBackwardNode": b}
                for i, (c, b) in enumerate([("a", 0), ("b", 0), (None, 0), ("x", 1), ("a", 1)])
            ],
            "edges": [
                {"sourceId": 0, "destId": 1, "cost": 1},
                {"sourceId": 1, "destId": 2, "cost": 2},
                {"sourceId": 3, "destId": 4, "cost": 4},
            ],
        },
        where="graph.json",
    )

    def devices(*nodes: tuple[int, ...]) -> list[PlacedDevice]:
        return [PlacedDevice(0, held) for held in nodes]

    assert "not every node" in violations(problem, devices((0, 1), (2, 3)))[0]
    assert "colour 'a'" in violations(problem, devices((0,), (1, 2, 3, 4)))[0]
    assert "against" in violations(problem, devices((1, 2), (0, 3, 4)))[0]
    assert any("along" in text for text in violations(problem, devices((3,), (0, 1, 2, 4))))
    assert any("holds 12 of 8" in text for text in violations(problem, devices((0, 1, 4), (2, 3))))
    assert any("3 devices" in t for t in violations(problem, devices((0, 4), (1, 3), (2,))))
    fit = replace(problem, classes=(DeviceClass("accelerator", 3, 8.0), problem.classes[1]))
    assert violations(fit, devices((0, 4), (1, 3), (2,))) == []
    assert device_loads(fit, devices((0, 4), (1, 3), (2,))) == [2 + 1 + 4, 2 + 1 + 2 + 4, 1 + 2]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_answer() -> None:
    problem = parse(inception(2, 120), where="graph.json")
    first, second = (replace(place(problem, seed=4), seconds=0.0) for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_progress_only_improves() -> None:
    seen: list[tuple[float | None, float]] = []
    problem = parse(inception(1, 160), where="graph.json")
    answer = place(problem, progress=lambda value, bound: seen.append((value, bound)))
    values = [value for value, _ in seen if value is not None]
    bounds = [bound for _, bound in seen]
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds)
    assert values[-1] == answer.objective


@pytest.mark.slow
def test_no_time_still_gives_an_honest_answer() -> None:
    problem = parse(inception(2, 326), where="graph.json")
    answer = place(problem, time_limit=0.0)
    assert answer.status in ("feasible", "optimal")
    assert answer.objective is not None
    assert 0 < answer.bound <= answer.objective
    best = place(parse(inception(2, 326), where="graph.json"))
    assert answer.bound <= best.bound <= answer.objective


PUBLISHED = {
    "LayerGraphs/bert24_inference": 17.789906,
    "LayerGraphs/bert24_training": 41.745812,
    "LayerGraphs/resnet50_inference": 33.774666,
    "LayerGraphs/gnmt_inference": 32.910658,
    "OperatorGraphs/bert_l-3_inference": 27.918568,
    "OperatorGraphs/bert_l-3_training": 65.303149,
    "OperatorGraphs/resnet50_inference": 124.348850,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_optima_are_reached_and_proved(name: str) -> None:
    answer = place(read(folder("device_placement") / f"{name}.json"))
    assert answer.status == "optimal"
    assert answer.gap == 0
    assert answer.objective == pytest.approx(PUBLISHED[name], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_inception_like_training_graphs_are_proved(seed: int, tmp_path: Path) -> None:
    problem = read(write(tmp_path, inception(seed)))
    groups = grouped(problem)
    assert len(problem.nodes) == 652
    assert len(groups.sizes) == 326
    answer = place(problem)
    assert answer.status == "optimal"
    assert answer.objective is not None
    # Another prover agrees: CP-SAT started from the answer finds nothing better, or nothing new.
    if seed == 1:
        found: list[float] = []

        def offer(placement: Placement) -> float:
            found.append(objective(groups, placement))
            return found[-1]

        proof = prove(groups, answer.objective, budget=Budget(), offer=offer)
        assert proof.complete
        assert not found
        assert proof.bound >= answer.objective * (1 - 1e-6)
