"""Minibatches as microbatches, and their outputs put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdcompile.batch import (
    concatenate,
    microbatch_sizes,
    resolve_batch,
    split,
    weights,
)
from pdcompile.errors import InputError
from tests.helpers.calls import Point, call, rows


@given(st.integers(1, 60), st.integers(1, 70))
def test_sizes_are_those_of_tensor_split(batch: int, count: int) -> None:
    sizes = microbatch_sizes(batch, count)
    assert sum(sizes) == batch
    assert len(sizes) == min(batch, count)
    assert min(sizes) >= 1
    if count <= batch:
        assert sizes == [len(part) for part in torch.tensor_split(torch.zeros(batch), count)]


@given(st.integers(1, 12), st.integers(1, 14), st.integers(0, 1))
def test_splitting_loses_nothing(batch: int, count: int, dim: int) -> None:
    x = rows(batch, 3) if dim == 0 else rows(3, batch)
    flat = call(x, 7, target=rows(batch))
    layout = resolve_batch(flat, {"x": dim})
    parts = split(flat.leaves, layout, count)
    assert torch.equal(torch.cat([part["x"] for part in parts], dim), x)
    assert torch.equal(torch.cat([part["target"] for part in parts]), flat.leaves["target"])
    assert all(part["y"] == 7 for part in parts)
    assert [len(part["target"]) for part in parts] == microbatch_sizes(batch, count)
    ends = range(x.data_ptr(), x.data_ptr() + 4 * x.numel())
    if dim == 0:
        assert all(part["x"].data_ptr() in ends for part in parts)  # views, no copies
    assert all(part["x"].is_contiguous() for part in parts)


@given(st.permutations(range(3)), st.permutations(range(3)), st.integers(0, 2), st.booleans())
def test_microbatches_lie_in_memory_as_the_first_minibatch(
    first: list[int], later: list[int], dim: int, gaps: bool
) -> None:
    def laid(order: list[int]) -> Tensor:
        made = torch.randn(4, 4, 8 if gaps else 4)[..., :4]
        return made.permute([order.index(d) for d in range(3)])

    layout = resolve_batch(call(laid(first)), {"x": dim})
    assert layout.orders["x"] == tuple(first)
    x = laid(later)
    for part, kept in zip(split({"x": x}, layout, 2), x.tensor_split(2, dim), strict=True):
        assert torch.equal(part["x"], kept)
        assert part["x"].permute(first).is_contiguous()


def test_an_expanded_input_is_written_out() -> None:
    x = torch.randn(1, 3).expand(4, 3)
    (part,) = split({"x": x}, resolve_batch(call(x)), 1)
    assert part["x"].stride() == (3, 1)
    assert torch.equal(part["x"], x)


def test_leaves_that_this_rank_does_not_have_stay_none() -> None:
    flat = call(rows(4), rows(4))
    parts = split({**flat.leaves, "y": None}, resolve_batch(flat), 2)
    assert [part["y"] for part in parts] == [None, None]


def test_weights() -> None:
    flat = call(rows(5, 2), target=torch.tensor([1, -100, -100, 2, 3]))
    layout = resolve_batch(flat)
    assert weights("mean", flat, layout, 2) == [3 / 5, 2 / 5]
    assert weights("mean", flat, layout, 9) == [1 / 5] * 5
    assert weights("sum", flat, layout, 2) == [1.0, 1.0]

    def kept(args: tuple[Tensor], kwargs: dict[str, Any], target: Tensor) -> Tensor:
        assert args[0].shape[0] == target.shape[0]
        return (target != -100).sum()

    assert weights(kept, flat, layout, 2) == [1 / 3, 2 / 3]


@pytest.mark.parametrize("items", [0, -1, float("nan"), float("inf")])
def test_impossible_item_counts(items: float) -> None:
    flat = call(rows(4))
    with pytest.raises(InputError, match="items"):
        weights(lambda args, kwargs, target: items, flat, resolve_batch(flat), 2)


def test_outputs_are_put_together() -> None:
    def output(n: int, at: float) -> dict[str, Any]:
        return {
            "logits": torch.full((n, 2), at),
            "states": [torch.full((4, n), at), None],
            "loss": torch.tensor(at),
            "aux": torch.tensor(at),
            "load": torch.full((7,), at),
            "name": "a" if at == 0 else "b",
        }

    total = torch.tensor(0.4)
    whole = concatenate([output(3, 0.0), output(2, 1.0)], [3, 2], loss=total, loss_leaf=3)
    assert whole["logits"][:, 0].tolist() == [0, 0, 0, 1, 1]
    assert whole["states"][0].shape == (4, 5)
    assert whole["states"][1] is None
    assert whole["loss"] is total
    assert whole["aux"].tolist() == [0, 1]
    assert whole["load"].shape == (2, 7)
    assert whole["name"] == "a"


def test_one_microbatch_is_returned_as_it_is() -> None:
    output = Point(torch.zeros(()), torch.ones(3, 2))
    assert concatenate([output], [3]) == output


def test_the_batch_dimension_of_the_inputs_is_tried_first() -> None:
    parts = [torch.zeros(2, 2, 1), torch.ones(2, 2, 1)]
    assert concatenate(parts, [2, 2]).shape == (4, 2, 1)
    assert concatenate(parts, [2, 2], batch_dim=1).shape == (2, 4, 1)


def test_a_size_that_happens_to_be_the_microbatches_counts_no_samples() -> None:
    parts = [(torch.zeros(2, 2, 1), torch.zeros(2)), (torch.ones(2, 2, 1), torch.ones(2))]
    layers, statistic = concatenate(parts, [2, 2], sample_dims={0: [1], 1: []})
    assert layers.shape == (2, 4, 1)
    assert statistic.tolist() == [[0, 0], [1, 1]]


def test_unlike_structures_are_refused() -> None:
    with pytest.raises(InputError, match="microbatch 1 returned another structure"):
        concatenate([(rows(1), rows(1)), (rows(1),)], [1, 1])


def test_outputs_that_do_not_fit_together() -> None:
    with pytest.raises(InputError, match=r"leaf 1 of the output .* \(16,\), \(8,\)"):
        concatenate([(torch.ones(n, 8), torch.ones(8 * n)) for n in (2, 1, 1)], [2, 1, 1])
