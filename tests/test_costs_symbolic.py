"""Costs in closed form: exact at sizes that they were not made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pdcompile
from pdcompile.batch import example_call, resolve_batch
from pdcompile.cli.costs import sizes_of
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import size_at
from pdcompile.passes.costs import CostedOp, GraphIndex, forward_flops
from pdcompile.passes.costs.rehearsal.kept_storages import kept_storages, new_of
from pdcompile.passes.costs.symbolic import SymbolicCosts, polynomial_through
from pdcompile.passes.trace import capture
from tests.helpers import models

COEFFICIENTS = st.integers(-(10**9), 10**9)
B, S = sympy.symbols("b s", positive=True, integer=True)


@given(st.tuples(*[COEFFICIENTS] * 6))
def test_a_polynomial_is_found_from_its_values(c: tuple[int, ...]) -> None:
    def value(b: Any, s: Any) -> Any:
        return c[0] + c[1] * b + c[2] * s + c[3] * b * s + c[4] * s * s + c[5] * b * s * s

    found = polynomial_through({(b, s): value(b, s) for b in (2, 3, 7) for s in (4, 9, 10, 17)})
    assert sympy.expand(found - value(B, S)) == 0


def test_what_is_no_polynomial_of_low_degree_has_none() -> None:
    grid = [(b, s) for b in (2, 3, 5) for s in (4, 7, 9, 12)]
    assert polynomial_through({(b, s): b * b * s for b, s in grid}) is None
    assert polynomial_through({(b, s): b * s**3 for b, s in grid}) is None
    assert polynomial_through({(b, s): -(-s // 4) for b, s in grid}) is None
    assert (
        sympy.expand(polynomial_through({(b, s): b * s * (s + 1) // 2 for b, s in grid}) * 2)
        == B * S**2 + B * S
    )
    assert polynomial_through({(b,): 7 * b + 1 for b in (1, 2, 9)}) == 7 * B + 1
    with pytest.raises(ValueError, match="needs 3 sizes"):
        polynomial_through({(b,): b for b in (1, 2)})


Numbers = list[tuple[tuple[Any, ...], Any, Any, Any]]


def numbers(model: nn.Module, inputs: Any, target: Any, loss_fn: Any) -> Numbers:
    """(shape, FLOPs, output bytes, saved bytes) of each op, captured at this very size."""
    flat = example_call(model, inputs, target)
    graph = capture(model, flat, resolve_batch(flat), loss_fn).train
    index, b = GraphIndex.of(graph, graph.batch_size), graph.batch_size
    kept = new_of(kept_storages(graph, b))
    return [
        (
            tuple(size_at(size, b) for size in graph.values[op.name].shape),
            forward_flops(call),
            call.output_bytes,
            kept[op.name],
        )
        for op, call in ((op, CostedOp(op, index)) for op in graph.ops)
    ]


def hold(
    costs: SymbolicCosts, found: list[tuple[tuple[Any, ...], Any, Any, Any]], **at: int
) -> None:
    """Entries that are marked symbolic are these numbers."""
    given = costs.at(**at)
    assert len(given.ops) == len(found)
    for op, numbers_of in zip(given.ops, found, strict=True):
        if op.symbolic:
            assert (op.shape, op.flops, op.output_bytes, op.saved_bytes) == numbers_of, op.name


@pytest.mark.slow
def test_a_transformer_has_closed_forms_in_b_and_s() -> None:
    model = models.gpt(layers=1)
    loss_fn = models.loss_for(model)
    ids, target = models.batch_for(model, 4)
    length = ids.shape[1]
    costs = pdcompile.symbolic_costs(model, ids, example_target=target, loss_fn=loss_fn)
    assert costs.symbols == ("b", "s")
    assert dict(costs.sequence) == {"ids": (1,), "target": (1,)}
    assert costs.symbolic_share == 1.0
    b, s = 3, length - 2
    assert all(point != (b, s) for point in costs.fitted)
    hold(costs, numbers(model, ids[:b, :s], target[:b, :s], loss_fn), b=b, s=s)
    qkv = next(op for op in costs.ops if op.name == "blocks_0_qkv")
    assert qkv.flops == 2 * 32 * 96 * B * S
    assert qkv.shape == (B, S, 96)
    attention = next(op for op in costs.ops if "attention" in op.name)
    assert attention.flops == 4 * 4 * 8 * B * S**2
    assert costs.flops.subs({B: b, S: s}) == costs.at(b, s).flops
    text = str(costs)
    assert "96]" in text
    assert "100.0%" in text
    assert '"symbols"' in costs.to_json()


def test_a_model_without_a_length_has_forms_in_b() -> None:
    model = models.unet()
    images, target = models.batch_for(model, 4)
    loss_fn = models.loss_for(model)
    costs = pdcompile.symbolic_costs(model, images, example_target=target, loss_fn=loss_fn)
    assert costs.symbols == ("b",)
    assert "no integer or boolean input" in costs.without
    assert costs.symbolic_share == 1.0
    hold(costs, numbers(model, *models.batch_for(model, 6), loss_fn), b=6)


class Padded(nn.Module):
    """Pads to a multiple of eight: no polynomial in the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.head(self.embedding(ids))
        x = F.pad(x, (0, 0, 0, -x.shape[1] % 8))
        return x.relu().sum()


def test_what_follows_no_form_is_a_number_and_marked() -> None:
    costs = pdcompile.symbolic_costs(Padded(), torch.zeros(4, 21, dtype=torch.long))
    by_target = {op.target.rpartition(".")[2]: op for op in costs.ops}
    marked = {name: op.symbolic for name, op in by_target.items()}
    assert marked == {"Embedding": True, "Linear": True, "pad": False, "relu": False, "sum": False}
    assert by_target["relu"].output_bytes == 4 * 24 * 8 * 4
    assert 0 < costs.symbolic_share < 1
    assert "(concrete)" in str(costs)


class Halves(nn.Module):
    """Takes another way for short inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return (x.tanh() if ids.shape[1] > 10 else x.exp()).sum()


def test_a_model_that_asks_for_its_length_has_no_s_and_says_where() -> None:
    costs = pdcompile.symbolic_costs(Halves(), torch.zeros(4, 20, dtype=torch.long))
    assert costs.symbols == ("b",)
    assert "other ops at length" in costs.without
    assert "test_costs_symbolic.py" in costs.without


def test_sizes_that_do_not_fit_are_refused() -> None:
    costs = pdcompile.symbolic_costs(nn.Linear(12, 3), torch.zeros(4, 12))
    assert costs.symbols == ("b",)
    assert "no integer or boolean input" in costs.without
    with pytest.raises(ConfigError, match="do not fit"):
        costs.at(b=2, s=3)
    assert costs.at(b=2).symbols == ()


def test_sizes_on_the_command_line() -> None:
    assert sizes_of("b=8,s=512") == {"b": 8, "s": 512}
    assert sizes_of("b=3") == {"b": 3}
    for text in ("b=0", "b=8,s=0", "8", "s=4", "b=x", "b=1,b=2", "b=1,t=2", ""):
        with pytest.raises(ConfigError):
            sizes_of(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "mixtral", "resnet_cifar"])
def test_published_architectures_are_in_closed_form(name: str) -> None:
    from tests.zoo.case import build
    from tests.zoo.models import ENTRIES

    entry = ENTRIES[name]
    if entry.missing:
        pytest.skip(entry.missing)
    case = build(entry, 0.1)
    costs = pdcompile.symbolic_costs(
        case.model, case.inputs(0), example_target=case.target(0), loss_fn=case.loss_fn
    )
    assert costs.symbolic_share >= 0.95

    def rows(value: Any, count: int) -> Any:
        call: Callable[[Any], Any] = lambda x: x[:count]  # noqa: E731
        if isinstance(value, dict):
            return {key: call(one) for key, one in value.items()}
        return tuple(map(call, value)) if isinstance(value, tuple) else value and call(value)

    target = case.target(0)
    found = numbers(
        case.model,
        rows(case.inputs(0), 3),
        None if target is None else target[:3],
        case.loss_fn,
    )
    at = {"b": 3} | ({"s": costs.example[1]} if "s" in costs.symbols else {})
    hold(costs, found, **at)
