"""What users wish of the cut: constraints reach the problem, and contradictions are named."""

from __future__ import annotations

from typing import Any

import pytest

from pdcompile.errors import ConfigError, InfeasibleError
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.partition import partition
from pdcompile.problem import PartitionProblem, StageLimits
from pdcompile.problem.constraints import Apart, CutBefore, Forbid, MaxStages, Pin, Together
from tests.helpers.graphs import residual

TWO = (StageLimits(bytes_per_second=1e3),) * 2


def problem_of(graph: OpGraph, *constraints: Any, stages: int = 2) -> PartitionProblem:
    return coarsen(graph, TWO[:1] * stages, num_microbatches=4, constraints=constraints)


def item_of(problem: PartitionProblem) -> dict[str, int]:
    return {name: i for i, item in enumerate(problem.items) for name in item.ops}


def test_pins_count_from_both_ends() -> None:
    problem = problem_of(residual(3), Pin("h.0", 0), Pin("h.2", -1), stages=3)
    where = item_of(problem)
    pins = dict(problem.pins)
    assert pins[where["up_0"]] == pins[where["add_0"]] == 0
    assert pins[where["up_2"]] == pins[where["cross_entropy"]] == 2
    assert where["up_1"] not in pins


def test_together_apart_and_cut_before() -> None:
    graph = residual(3)
    problem = problem_of(graph, Together("h.1"))
    where = item_of(problem)
    group = tuple(sorted({where[f"{name}_1"] for name in ("up", "gelu", "down", "add")}))
    assert problem.together == (group,)
    problem = problem_of(graph, CutBefore("h.1"))
    where = item_of(problem)
    assert problem.apart == (
        (where["add_0"], where["up_1"]),
        (where["add_0"], where["add_1"]),
    )
    problem = problem_of(graph, Apart("wte", "h.*.up"))
    assert len(problem.apart) == 3


@pytest.mark.parametrize(
    ("constraints", "error", "text"),
    [
        ([Pin("h.9", 0)], ConfigError, "did you mean"),
        ([Pin("h.0", 2)], ConfigError, "from 0 to 1"),
        ([Pin("h.0", 0), Pin("h.0.up", 1)], InfeasibleError, "contradict"),
        ([Pin("cross_entropy", 0)], InfeasibleError, "last stage"),
        (
            [Pin("wte", 0), Together("h.0"), Apart("h.0.up", "h.0.down")],
            InfeasibleError,
            r"smallest conflict: Together\('h.0'\) and Apart\('h.0.up', 'h.0.down'\)",
        ),
        (
            [Forbid("h.0.up", 0), Pin("h.1.up", 0)],
            InfeasibleError,
            r"smallest conflict: Forbid\('h.0.up', 0\) and Pin\('h.1.up', 0\)",
        ),
        ([Forbid("h.0", -3)], ConfigError, "from 0 to 1"),
        (["h.0"], ConfigError, "not a constraint"),
    ],
)
def test_impossible_wishes_are_refused(
    constraints: list[object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        problem_of(residual(2), *constraints)


def test_forbidden_stages_and_fewer_stages() -> None:
    graph = residual(3)
    problem = problem_of(graph, Forbid("h.0", 0, -1), stages=3)
    where = item_of(problem)
    assert problem.forbidden == tuple(
        (item, s) for item in sorted({where["up_0"], where["down_0"], where["add_0"],
                                      where["gelu_0"]}) for s in (0, 2)
    )  # fmt: skip
    found, _ = partition(problem)
    assert {found.stage_of[where[name]] for name in ("up_0", "down_0")} == {1}
    assert "under Forbid('h.0', 0, -1)" in problem.scope
    problem = problem_of(graph, MaxStages(2), stages=3)
    assert (problem.max_stages, problem.allow_empty) == (2, True)
    assert len(set(partition(problem)[0].stage_of)) <= 2
    problem = problem_of(graph, MaxStages(3), stages=3)
    assert (problem.max_stages, problem.allow_empty) == (3, False)


def test_constraints_check_their_own_arguments() -> None:
    with pytest.raises(ConfigError, match="stage numbers"):
        Forbid("h.0")
    with pytest.raises(ConfigError, match="from 1"):
        MaxStages(0)
    with pytest.raises(ConfigError, match="stage number"):
        Pin("h.0", True)
    with pytest.raises(ConfigError, match="two patterns"):
        Apart("h.0")
    with pytest.raises(ConfigError, match="names of modules"):
        Together()
