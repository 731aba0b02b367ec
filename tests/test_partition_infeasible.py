"""Refusals of what cannot be planned say which limits conflict and what would help."""

from dataclasses import replace
from typing import Any

import pytest

from pdcompile.errors import CostError, InfeasibleError
from pdcompile.passes.partition import partition
from pdcompile.problem import (
    Holding,
    Item,
    PartitionProblem,
    SharedParameter,
    StageLimits,
    Traffic,
)
from tests.helpers.problems import chain_problem, gpt_problem


def sized(sizes: list[int], limits: list[int | None], **fields: Any) -> PartitionProblem:
    """A chain of items with that many trainable bytes, no optimizer state, one gradient."""
    items = tuple(Item(f"layer{i}", (f"op{i}",), 1.0, 2.0, n, n) for i, n in enumerate(sizes))
    traffic = tuple(Traffic(f"op{i}", i, (i + 1,), 0) for i in range(len(sizes) - 1))
    stages = tuple(StageLimits(memory_bytes=limit) for limit in limits)
    fields.setdefault("holdings", (Holding(1, 1, 0.0),) * len(limits))
    return PartitionProblem(items, traffic, stages, **fields)


def refusal(problem: PartitionProblem, **options: Any) -> str:
    with pytest.raises(InfeasibleError) as caught:
        partition(problem, **options)
    assert caught.value.remedy
    return str(caught.value)


def test_more_stages_than_items() -> None:
    text = refusal(chain_problem([1.0] * 3, 4))
    assert "4 stages for 3 items" in text
    assert "at most 3 stages" in text
    glued = replace(chain_problem([1.0] * 3, 3), together=((0, 1),))
    assert "3 stages for 2 items" in refusal(glued)


def test_an_item_larger_than_every_device() -> None:
    text = refusal(sized([10, 900, 10], [1000, 1000]))
    assert "'layer1'" in text
    assert "1.80 kB" in text
    assert "cannot hold" in text
    assert "limit that cannot hold: 1.00 kB of memory a stage" in text
    assert "where: stage" in text
    assert "remedy: more memory" in text


def test_versions_and_optimizer_are_named() -> None:
    text = refusal(
        sized([10, 300, 10], [1000, 1000], holdings=(Holding(3, 1, 2.0), Holding(2, 1, 2.0)))
    )
    assert "weight versions 3, 2, gradients 1, optimizer state 2 times the weights" in text


def test_fits_in_sum_but_not_contiguously() -> None:
    """Gradients are 400, 600, 600, 400 bytes: the middle one has to hold both 600s."""
    text = refusal(sized([200, 300, 300, 200], [500, 1150, 500]))
    assert "the model cut into 3 stages does not fit" in text
    assert "500 B to 1.15 kB of memory a stage" in text


def test_a_device_without_memory() -> None:
    assert "stage 0" in refusal(sized([10, 10], [0, 100], pins=((0, 0),)))
    assert "cannot hold" in refusal(sized([10, 10], [0, 100]))


def test_unlike_devices_take_what_fits() -> None:
    found, _ = partition(sized([300, 100, 100], [1000, 400]))
    assert found.stage_of == (0, 1, 1)
    assert found.memory_bytes == (600, 400)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pins": ((0, 5),)}, "pinned to stage 5 of 2"),
        ({"pins": ((0, -1),)}, "pinned to stage -1"),
        ({"pins": ((0, 0), (0, 1))}, "contradictory pins"),
        ({"pins": ((0, 1), (2, 0))}, "contradictory pins"),
        ({"pins": ((0, 0), (1, 1)), "together": ((0, 1),)}, "contradictory pins"),
        ({"apart": ((0, 1),), "together": ((0, 1),)}, "asked to be apart"),
        (
            {"apart": ((0, 1), (1, 2), (0, 2))},
            "together: apart (0, 1) and apart (1, 2)",
        ),
        (
            {"pins": ((0, 1),)},
            "or that no stage is empty; limit that cannot hold: pins (0, 1)",
        ),
    ],
)
def test_contradictory_constraints(fields: dict[str, Any], message: str) -> None:
    assert message in refusal(chain_problem([1.0] * 3, 2, **fields))


@pytest.mark.slow
def test_no_time_and_nothing_found_is_said() -> None:
    """Two clusters of items that only CP-SAT could disentangle, and no time for it."""
    problem = gpt_problem(400, 8, "bottleneck")
    tight = tuple(replace(stage, memory_bytes=10**10) for stage in problem.stages)
    with pytest.raises(InfeasibleError):
        partition(replace(problem, stages=tight), time_limit=0)


def test_empty_problems() -> None:
    assert "no ops" in refusal(PartitionProblem((), (), (StageLimits(),)))
    assert "0 stages" in refusal(chain_problem([1.0], 0))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["forward_seconds", "saved_bytes", "workspace_bytes"])
def test_costs_that_are_none(name: str, wrong: float) -> None:
    problem = chain_problem([1.0, 2.0], 2)
    broken: Any = {name: wrong}
    items = (replace(problem.items[0], **broken), problem.items[1])
    with pytest.raises(CostError, match=f"{name} of 'layer0'"):
        partition(replace(problem, items=items))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"traffic": (Traffic("v", 0, (1,), -1),)}, "forward_bytes of 'v'"),
        ({"shared": (SharedParameter("w", -1, True, (0,)),)}, "bytes of 'w'"),
        ({"stages": (StageLimits(speed=0.0),) * 2}, "speed is 0.0"),
        ({"stages": (StageLimits(bytes_per_second=0.0),) * 2}, "bytes_per_second is 0.0"),
    ],
)
def test_problems_that_are_none(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CostError, match=message):
        partition(replace(chain_problem([1.0, 2.0], 2), **fields))


def test_more_trainable_bytes_than_bytes() -> None:
    problem = chain_problem([1.0, 2.0], 2)
    items = (replace(problem.items[0], trainable_bytes=3), problem.items[1])
    with pytest.raises(CostError, match="'layer0' has 3 trainable of 0 bytes"):
        partition(replace(problem, items=items))
