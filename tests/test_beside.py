"""Cuts as others make them, for benchmarks/results/planner.md; ours must not be slower."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from pdcompile.batch import example_call, resolve_batch
from pdcompile.cluster import Cluster, Device, Level
from pdcompile.passes.trace import capture
from tests.helpers.planned import planned
from tests.test_border_cuts import links, transformer
from tests.test_planner_benchmark import BENCHMARKS

PATTERNS = ("h.*",)


@pytest.fixture(scope="module")
def others() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    from planning import beside

    yield beside
    sys.path.remove(str(BENCHMARKS))


def layers(others: Any, seconds: list[float], parameters: list[int] | None = None) -> Any:
    """One item a layer; the first and the last one are no blocks."""
    count = len(seconds)
    blocks = (False, *(True,) * (count - 2), False)
    return others.Layers(
        tuple(range(count)), blocks, tuple(seconds), tuple(parameters or [1] * count)
    )


def test_layers_are_blocks_and_what_lies_around_them(others: Any) -> None:
    graph = transformer([1.0, 2.0, 0.5], head=0.3)
    problem = planned(graph, links(2)).problem
    assert problem is not None
    found = others.layers_of(graph, problem, PATTERNS)
    assert found.is_block == (False, True, True, True, False)
    assert [round(one, 1) for one in found.seconds] == [0.2, 1.0, 2.0, 0.5, 0.6]
    assert [problem.items[i].name.partition(":")[0] for i in found.begins] == [
        "wte", "h.0.attn", "h.1.attn", "h.2.attn", "loss_fn"
    ]  # fmt: skip
    stage_of = found.stage_of((2, 4), len(problem.items))
    assert stage_of[found.begins[2] - 1 : found.begins[2] + 1] == (0, 1)
    assert (stage_of[0], stage_of[-1]) == (0, 2)


def test_equal_layers_are_those_of_blocks(others: Any) -> None:
    eight = layers(others, [1.0] * 10)
    assert others.equal_layers(eight, 4) == (3, 5, 7)
    assert others.equal_layers(eight, 3) == (4, 7)  # the first stages have one more
    assert others.equal_layers(eight, 9) is None
    assert others.equal_shares([1, 1, 1, 9, 1], 3) == (3, 4)
    assert others.equal_shares([1, 1], 3) is None


@given(st.data())
def test_balanced_cuts_have_the_least_largest_share(others: Any, data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0]), min_size=2, max_size=8))
    stages = data.draw(st.integers(1, 4))
    borders = sorted(data.draw(st.sets(st.integers(1, len(seconds) - 1))))
    total = [0.0, *itertools.accumulate(seconds)]

    def largest(cut: tuple[int, ...]) -> float:
        ends = [0, *cut, len(seconds)]
        return max(total[b] - total[a] for a, b in itertools.pairwise(ends))

    every = list(itertools.combinations(borders, stages - 1))
    found = others.balanced(total, borders, stages)
    assert (found is None) == (not every)
    if found is not None:
        assert found in every
        assert largest(found) == pytest.approx(min(map(largest, every)))


def test_the_largest_share_gives_some_of_it_away(others: Any) -> None:
    """The first of three shares has 9 seconds of 22: without its last run the others have 17."""
    total = list(itertools.accumulate([1, 4, 4, 4, 4, 4, 1], initial=0.0))
    assert list(others.rebalanced(total, range(1, 7), 3)) == [(3, 5), (2, 4)]
    assert list(others.rebalanced(total, [1, 2], 4)) == []


@given(st.lists(st.integers(1, 9), min_size=3, max_size=8), st.integers(2, 4))
def test_auto_partition_is_no_worse_than_where_it_begins(seconds: list[int], stages: int) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    from planning import beside as others

    sys.path.remove(str(BENCHMARKS))
    known = layers(others, [float(one) for one in seconds])

    def step(cut: tuple[int, ...]) -> float:
        """All stages once, and the largest seven times more."""
        ends = (0, *cut, len(seconds))
        loads = [sum(seconds[a:b]) for a, b in itertools.pairwise(ends)]
        assert min(loads) > 0
        return sum(loads) + 7 * max(loads)

    found = others.auto_partition(known, stages, step)
    every = list(itertools.combinations(range(1, len(seconds)), stages - 1))
    assert (found is None) == (not every)
    if found is not None:
        assert found in every
        assert step(found) == min(map(step, every))  # equal seconds are the best by this clock


def test_auto_partition_moves_layers_off_the_stage_that_decides(others: Any) -> None:
    known = layers(others, [1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 1.0])

    def step(cut: tuple[int, ...]) -> float:
        """The first stage takes twice what its layers say."""
        ends = (0, *cut, 7)
        loads = [sum(known.seconds[a:b]) for a, b in itertools.pairwise(ends)]
        return float(max(2 * loads[0], *loads))

    assert others.equal_shares(known.seconds, 3) == (3, 5)
    assert step((3, 5)) == 18
    assert step(others.auto_partition(known, 3, step)) == 10


@pytest.mark.slow
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_ours_is_never_slower(others: Any, data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.sampled_from([0.5, 0.9, 1.0, 3.0]), min_size=3, max_size=7))
    graph = transformer(seconds, head=data.draw(st.sampled_from([0.1, 0.7, 2.0])))
    cluster = links(data.draw(st.integers(2, 4)), data.draw(st.sampled_from([1e2, 1e3, 1e6])))
    assume(len(seconds) + 2 >= len(cluster.devices))
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
    plan = planned(graph, cluster, schedule=schedule, tolerance=0.01)
    found = others.beside(plan, graph, cluster, PATTERNS)
    assert found.others["auto_partition"] is not None
    assert found.slower == []


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Blocks(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.h = nn.ModuleList(map(Block, widths))
        self.head = nn.Linear(16, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return self.head(x).square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "2bw"])
def test_nor_of_a_model_with_several_stages_a_device(others: Any, schedule: str) -> None:
    model = Blocks([64, 64, 64, 256, 64, 64, 64, 64])
    flat = example_call(model, torch.ones(16, 16), None)
    layout = resolve_batch(flat, 0)
    captured = capture(model, flat, layout, None, microbatch_size=2)
    machines = Cluster((Device("cpu"),) * 2, (Level("link", 2, 1e9, 1e-6),))
    stages = 4 if schedule == "interleaved" else 2
    plan, graph, machines = others.planned(
        model, flat, captured, cluster=machines, stages=stages, microbatches=8, schedule=schedule,
        time_limit=200.0,
    )  # fmt: skip
    found = others.beside(plan, graph, machines, PATTERNS)
    assert all(one is not None for one in found.others.values())
    assert found.slower == []
