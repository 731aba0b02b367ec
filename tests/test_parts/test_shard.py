"""Slices of parts: own, then joined, is the identity; fused qkv; text and JSON."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdcompile import jsonio
from pdcompile.errors import PlanError
from pdcompile.parts.shard import Shard


@st.composite
def shards(draw: Any, total: int | None = None) -> Shard:
    """A shard of a dimension that has `total` items, or any number."""
    parts = draw(st.sampled_from([1, 2, 3, 4]))
    if total is not None:
        parts = draw(st.sampled_from([n for n in range(1, 5) if total % n == 0]))
        rest = total // parts
        before = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        sizes = (before, parts, rest // before)
        return Shard("w", 1, sizes, 1, parts)
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    which = draw(st.integers(0, len(sizes) - 1))
    sizes[which] *= parts
    return Shard("w", draw(st.integers(0, 2)), tuple(sizes), which, parts)


def tensor_of(shard: Shard) -> torch.Tensor:
    shape = [2, 3, 2]
    shape[shard.dim] = torch.Size(shard.sizes).numel()
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@given(shards())
def test_own_then_joined_is_the_tensor(shard: Shard) -> None:
    whole = tensor_of(shard)
    slices = [shard.own(whole, part) for part in range(shard.parts)]
    assert {tuple(one.shape) for one in slices} == {shard.local_shape(whole.shape)}
    assert all(one.is_contiguous() and one.storage_offset() == 0 for one in slices)
    assert torch.equal(shard.joined(slices), whole)
    assert sum(one.numel() for one in slices) == whole.numel()


@given(shards())
def test_a_slice_is_that_of_the_dimension_written_as_its_factors(shard: Shard) -> None:
    whole = tensor_of(shard)
    factors = whole.unflatten(shard.dim, shard.sizes)
    own = shard.sizes[shard.which] // shard.parts
    for part in range(shard.parts):
        share = factors.narrow(shard.dim + shard.which, part * own, own)
        flat = share.flatten(shard.dim, shard.dim + len(shard.sizes) - 1)
        assert torch.equal(shard.own(whole, part), flat)


@given(shards(total=24), shards(total=24))
def test_any_sharding_becomes_any_other_and_back(old: Shard, new: Shard) -> None:
    whole = torch.arange(48.0).reshape(2, 24)
    slices = [old.own(whole, part) for part in range(old.parts)]
    there = [new.own(old.joined(slices), part) for part in range(new.parts)]
    back = [old.own(new.joined(there), part) for part in range(old.parts)]
    assert all(torch.equal(a, b) for a, b in zip(back, slices, strict=True))


def test_a_part_of_a_fused_qkv_has_its_heads_of_each() -> None:
    shard = Shard("qkv.weight", 0, (3, 4, 16), 1, 2)
    assert shard.runs == 3
    own = [*range(32, 64), *range(96, 128), *range(160, 192)]
    assert shard.own(torch.arange(192), 1).tolist() == own
    assert shard.local_shape((192, 64)) == (96, 64)
    assert str(shard) == "qkv.weight: dimension 0 = 3 x (4 in 2 parts) x 16"


@given(shards())
def test_json(shard: Shard) -> None:
    data = jsonio.loads(jsonio.dumps(shard), where="plan.json")
    assert jsonio.decode(Shard, data, where="plan.json") == shard


@pytest.mark.parametrize(
    ("sizes", "which", "parts", "said"),
    [
        ((3, 4, 16), 0, 2, "does not divide: 3 in 2 parts"),
        ((4,), 1, 2, "of which one is divided"),
        ((0,), 0, 2, "sizes above 0"),
        ((4,), 0, 0, "of which one is divided"),
    ],
)
def test_what_is_no_shard_is_refused(
    sizes: tuple[int, ...], which: int, parts: int, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        Shard("w", 0, sizes, which, parts)


def test_a_tensor_of_another_shape_is_refused() -> None:
    shard = Shard("w", 0, (4,), 0, 2)
    with pytest.raises(PlanError, match=r"not of a tensor of shape \(6, 2\)"):
        shard.own(torch.zeros(6, 2), 0)
    with pytest.raises(PlanError, match="has not 1 slices"):
        shard.joined([torch.zeros(2, 2)])
