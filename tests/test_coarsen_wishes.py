"""Wishes of users on the cut: constraints reach the problem, and contradictions are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pdcompile.errors import ConfigError, InfeasibleError
from pdcompile.ir.graph import OpCost, OpGraph
from pdcompile.passes.coarsen import coarsen
from pdcompile.passes.coarsen.constraints import between_borders
from pdcompile.passes.partition import partition
from pdcompile.problem import PartitionProblem, StageLimits
from pdcompile.problem.constraints import (
    KINDS,
    Apart,
    CutAt,
    CutBefore,
    Pin,
    Split,
    Together,
    parsed,
)
from tests.helpers.captures import captured
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
        ([CutAt("h.*.upp")], ConfigError, r"(?s)CutAt\('h.\*.upp'\).*did you mean 'h.\*.up'"),
        ([CutAt("?p")], ConfigError, r"did you mean 'h.0.\?p'"),
        ([CutAt("layers.*")], ConfigError, "did you mean 'wte' or 'h' or 'head'"),
        (
            [CutAt("h.*"), Apart("h.1.up", "h.1.down")],
            InfeasibleError,
            r"limits that cannot hold together: CutAt\('h.\*'\) and Apart\('h.1.up', 'h.1.down'\)",
        ),
        ([Pin("h.0", 2)], ConfigError, "from 0 to 1"),
        ([Pin("h.0", 0), Pin("h.0.up", 1)], InfeasibleError, "contradict"),
        ([Pin("cross_entropy", 0)], InfeasibleError, "last stage"),
        (
            [Pin("wte", 0), Together("h.0"), Apart("h.0.up", "h.0.down")],
            InfeasibleError,
            r"cannot hold together: Together\('h.0'\) and Apart\('h.0.up', 'h.0.down'\)",
        ),
        (
            [Pin("h.0.up", -1), Pin("h.1.up", 0)],
            InfeasibleError,
            r"limits that cannot hold together: Pin\('h.0.up', -1\) and Pin\('h.1.up', 0\)",
        ),
        ([Pin("h.0", -3)], ConfigError, "from 0 to 1"),
        (["h.0"], ConfigError, "not a constraint"),
    ],
)
def test_impossible_wishes_are_refused(
    constraints: list[object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        problem_of(residual(2), *constraints)


def test_constraints_check_their_own_arguments() -> None:
    with pytest.raises(ConfigError, match="stage number"):
        Pin("h.0", True)
    with pytest.raises(ConfigError, match="2 or more"):
        Apart("h.0")
    with pytest.raises(ConfigError, match="names of modules"):
        Together()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_cuts_lie_at_borders_alone(stages: int) -> None:
    graph = residual(4)
    problem = problem_of(graph, CutAt("h.*"), stages=stages)
    where, (found, certificate) = item_of(problem), partition(problem)
    for block in range(4):
        parts = {where[f"{name}_{block}"] for name in ("up", "gelu", "down", "add")}
        assert len({found.stage_of[item] for item in parts}) == 1
    assert found.stage_of[where["head"]] == found.stage_of[where["cross_entropy"]] == stages - 1
    assert certificate.scope.endswith("constraints CutAt('h.*')")
    free = partition(problem_of(graph, stages=stages))[0]
    assert free.objective <= found.objective * (1 + 1e-12)


def test_too_few_borders_are_counted() -> None:
    with pytest.raises(InfeasibleError, match=r"8 stages for 6 items.*CutAt") as caught:
        partition(problem_of(residual(4), CutAt("h.*"), stages=8))
    assert "at most 6 stages" in str(caught.value)


def test_outermost_modules_and_single_ops_have_borders() -> None:
    graph = residual(2)

    def parts(*patterns: str) -> list[list[str]]:
        return [[graph.ops[i].name for i in run] for run in between_borders(graph, patterns)]

    assert parts("h.*", "h.*.up") == parts("h.*")
    assert parts("h.0", "head") == [
        ["wte"],
        ["up_0", "gelu_0", "down_0", "add_0"],
        ["up_1", "gelu_1", "down_1", "add_1"],
        ["head"],
        ["cross_entropy"],
    ]
    assert ["gelu_0"] in parts("gelu_0")


def test_each_call_of_a_module_has_borders() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).relu())

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.block(x)
            return self.head(x).sum()

    graph = captured(Again(), torch.randn(4, 4)).train
    assert [len(run) for run in between_borders(graph, ("block",))] == [4, 4, 4, 2]
    assert [len(run) for run in between_borders(graph, ("block.up",))] == [1, 3, 1, 3, 1, 5]


def test_constraints_are_read_from_the_command_line() -> None:
    written = {
        "pin": ["h.0=1", "head=-1"],
        "together": ["wte, head"],
        "apart": ["h.0,h.1"],
        "cut_at": ["h.*", "head"],
        "cut_before": ["h.1"],
        "split_of": ["h.0=width"],
    }
    assert set(parsed(written)) == {
        Pin("h.0", 1),
        Pin("head", -1),
        Together("wte", "head"),
        Apart("h.0", "h.1"),
        CutAt("h.*", "head"),
        CutBefore("h.1"),
        Split("h.0", "width"),
    }
    assert parsed({}) == ()


@given(
    st.dictionaries(
        st.sampled_from(sorted(KINDS)),
        st.lists(st.text("h.*=,0-1 ", max_size=8), max_size=2),
    )
)
def test_what_cannot_be_read_names_its_option(written: dict[str, list[str]]) -> None:
    found, refused = (), None
    try:
        found = parsed(written)
    except ConfigError as error:
        refused = error
    assert all(str(one) for one in found)
    if refused is not None:
        assert str(refused.where).startswith("--")
        assert f'{refused.where} "' in str(refused.remedy)


@pytest.mark.parametrize("constraint", [CutBefore("features.3"), Apart("features.2", "features.3")])
def test_what_may_not_be_cut_says_what_and_why(constraint: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(inplace=True))
            self.features = nn.Sequential(*layers, nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.features(x).sum()

    found = captured(Model()).train
    ops = tuple(replace(op, cost=OpCost(1.0, 1.0, microbatch_size=4)) for op in found.ops)
    with pytest.raises(InfeasibleError) as told:
        problem_of(replace(found, ops=ops), constraint)
    assert f"{constraint} asks for a cut between 'features.2' and 'features.3'" in str(told.value)
    assert "have to share a stage: in-place writes" in str(told.value)
