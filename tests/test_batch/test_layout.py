"""Batch dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdcompile.batch import (
    FlatCall,
    check_splits,
    flatten_call,
    follow_batch,
    lone_rows,
    resize,
    resolve_batch,
    split,
    weights,
)
from pdcompile.errors import ConfigError, InputError
from tests.helpers.calls import Stars, call, rows


def test_default_layout() -> None:
    flat = call(
        {"ids": rows(4, 3), "mask": rows(1, 1, 3, 3), "scale": torch.tensor(2.0), "n": 4},
        rows(4),
        target=rows(4, 2),
    )
    layout = resolve_batch(flat)
    assert layout.size == 4
    assert layout.splits
    assert layout.dims == {
        "x['ids']": 0,
        "x['mask']": None,
        "x['scale']": None,
        "x['n']": None,
        "y": 0,
        "target": 0,
    }


def test_all_ones_is_a_batch_of_one() -> None:
    layout = resolve_batch(call(rows(1, 3), rows(1, 2)))
    assert (layout.size, layout.dims["x"], layout.dims["y"]) == (1, 0, 0)


def test_nothing_to_split() -> None:
    for flat, dims in [(call(torch.tensor(1.0)), 0), (call(3), 0), (call(rows(4, 2)), None)]:
        layout = resolve_batch(flat, dims)
        assert layout.size == 1
        assert not layout.splits
        assert len(split(flat.leaves, layout, 3)) == 1
        assert weights("mean", flat, layout, 3) == weights("sum", flat, layout, 3) == [1.0]


def test_a_sequence_first_tensor_is_refused_with_its_path_and_remedy() -> None:
    flat = call(rows(4, 3), {"seq": [rows(7, 4)]}, target=rows(4))
    with pytest.raises(InputError, match=r"neither the batch size 4 \(of x\) nor 1") as caught:
        resolve_batch(flat)
    assert caught.value.where == "y['seq'][0]"
    assert caught.value.remedy is not None
    assert "batch_dims={'y': None}" in caught.value.remedy
    assert caught.value.remedy.startswith("give it 4 samples; or say where")
    assert resolve_batch(flat, {"y": 1}).dims["y['seq'][0]"] == 1
    assert resolve_batch(flat, {"y": {"seq": None}}).dims["y['seq'][0]"] is None


def test_the_offender_is_the_odd_one_out() -> None:
    with pytest.raises(InputError) as caught:
        resolve_batch(call(rows(7, 4), rows(4, 2), target=rows(4)))
    assert caught.value.where == "x"


def test_a_flat_target_is_told_its_rows() -> None:
    """A target for each token in one row, as language models are often trained."""
    with pytest.raises(InputError) as caught:
        resolve_batch(call(rows(4, 16), target=rows(64)))
    assert caught.value.where == "target"
    told = "give it 4 samples (of 16 rows, made flat in forward or the loss); or say where"
    assert caught.value.remedy.startswith(told)


def test_an_empty_minibatch_is_refused() -> None:
    with pytest.raises(InputError, match="no samples"):
        resolve_batch(call(rows(0, 3), target=rows(0)))


@pytest.mark.parametrize("dims", [{"x": -1, "y": 0, "target": 0}, {"x": 1}, {"x": 1, "y": -2}])
def test_dimensions_by_name(dims: Any) -> None:
    x, y, target = rows(3, 5), rows(5, 2), (rows(5),)
    for flat in (call(x, y, target=target), call(y=y, x=x, target=target)):
        layout = resolve_batch(flat, dims)
        assert layout.size == 5
        assert [layout.dims[path] for path in flat.leaves] == [1, 0, 0]


def test_dimensions_of_star_arguments() -> None:
    flat = flatten_call(Stars(), (rows(4), rows(2, 4), rows(4)), {"extra": rows(3)})
    layout = resolve_batch(flat, {"args": (1, 0), "extra": None, "target": None})
    assert layout.dims == {
        "first": 0, "args[0]": 1, "args[1]": 0, "extra": None, "target": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "dims",
    ["0", True, 1.0, (0, 0), (0, 0, 0), {"z": 0}, {"x": {"a": 0}}, {"x": (0, 0)}, {"x": False},
     {"x": "0"}],
)  # fmt: skip
def test_senseless_prefixes_are_refused(dims: Any) -> None:
    with pytest.raises(ConfigError, match="batch_dims"):
        resolve_batch(call(rows(4), rows(4)), dims)


def test_a_dimension_that_does_not_exist() -> None:
    with pytest.raises(InputError, match="dimension 1 of a tensor of shape") as caught:
        resolve_batch(call(rows(4, 2), rows(2)), 1)
    assert caught.value.where == "y"


BOXES = [{"boxes": rows(3, 4)}, {"boxes": rows(3, 4)}]
IMAGES = [rows(3, 5, 5)] * 3


@pytest.mark.parametrize(
    ("flat", "dims", "where"),
    [
        (call(IMAGES, target=rows(3)), 0, "x"),
        (call([rows(8, 6)] * 4), 0, "x"),
        (call(tuple([rows(8, 6)] * 4)), 0, "x"),
        (call(rows(2, 5), target=BOXES), 0, "target"),
        (call([rows(3, 5)] * 2, target=BOXES), 0, "x"),
        (call([rows(3, 5)] * 2, target=BOXES), {"x": None}, "target"),
        (call({"seq": IMAGES}, rows(3, 2)), 0, "x['seq']"),
        (call(IMAGES, target=rows(3)), {"target": 0}, "x"),
    ],
)
def test_lists_of_samples_are_not_split_along_their_elements(
    flat: FlatCall, dims: Any, where: str
) -> None:
    with pytest.raises(InputError, match="may have one element for each sample") as caught:
        check_splits(resolve_batch(flat, dims), 2)
    assert caught.value.where == where
    whole = resolve_batch(flat, None)
    check_splits(whole, 1)
    with pytest.raises(ConfigError, match="2 microbatches are asked for, and nothing"):
        check_splits(whole, 2)


@pytest.mark.parametrize(
    ("flat", "dims", "size"),
    [
        (call(IMAGES, target=rows(3)), {"x": 0}, 3),
        (call([rows(4, 5)] * 3, target=rows(4)), 0, 4),  # three features of four samples
        (call([rows(4, 5)] * 3, target=[rows(4)] * 2), 0, 4),
        (call((rows(2, 5), rows(2).long()), target=rows(2)), 0, 2),  # of unlike kinds
        (call([rows(4, 5)], target=rows(4)), 0, 4),
        (flatten_call(Stars(), (rows(2), rows(2), rows(2)), {}), 0, 2),
    ],
)
def test_lists_of_inputs_are_split_along_their_elements(
    flat: FlatCall, dims: Any, size: int
) -> None:
    layout = resolve_batch(flat, dims)
    check_splits(layout, 2)
    assert layout.size == size
    split_ones = {path for path, leaf in flat.leaves.items() if isinstance(leaf, torch.Tensor)}
    assert {path for path, dim in layout.dims.items() if dim == 0} == split_ones


def test_later_minibatches_keep_their_dimensions() -> None:
    layout = resolve_batch(call(rows(4, 3), rows(1, 3), target=rows(4)))
    short = follow_batch(call(rows(2, 3), rows(2, 3), target=rows(2)), layout)
    assert (short.size, short.dims) == (2, layout.dims)
    one = follow_batch(call(rows(1, 3), rows(1, 3), target=rows(1)), layout)
    assert (one.size, one.dims) == (1, layout.dims)
    absent = follow_batch(call(None, None, target=rows(3)), layout)
    assert (absent.size, absent.dims) == (3, layout.dims)
    with pytest.raises(InputError, match="neither the batch size"):
        follow_batch(call(rows(2, 3), rows(1, 3), target=rows(3)), layout)
    with pytest.raises(InputError, match="did not have"):
        follow_batch(call(rows(2, 3), rows(1, 3), 2.0, target=rows(2)), layout)


def test_a_batch_of_one_first_leaves_masks_replicated_later() -> None:
    layout = resolve_batch(call(rows(1, 3), rows(1, 3)))
    flat = call(rows(5, 3), rows(1, 3))
    later = follow_batch(flat, layout)
    assert (later.size, later.dims["x"], later.dims["y"]) == (5, 0, None)
    assert lone_rows(flat, later, layout) == ("y",)
    one = call(rows(1, 3), rows(1, 3))
    assert lone_rows(one, follow_batch(one, layout), layout) == ()


def test_resize_repeats_and_cuts_rows() -> None:
    flat = call(rows(3, 2).t(), rows(1, 2), target=rows(3).requires_grad_())
    layout = resolve_batch(flat, {"x": 1})
    for size in (1, 2, 3, 5):
        other = resize(flat, layout, size)
        index = [i % 3 for i in range(size)]
        assert torch.equal(other.leaves["x"], flat.leaves["x"][:, index])
        assert other.leaves["y"] is flat.leaves["y"]
        assert other.leaves["target"].requires_grad
        assert resolve_batch(other, {"x": 1}).size == size
    assert resize(flat, layout, 5).leaves["x"].stride() == (1, 2)  # column-major, as it was


def test_resize_keeps_channels_last_and_meta() -> None:
    images = torch.empty(2, 3, 4, 4, device="meta").to(memory_format=torch.channels_last)
    flat = call(images)
    larger = resize(flat, resolve_batch(flat), 5).leaves["x"]
    assert larger.shape == (5, 3, 4, 4)
    assert larger.is_contiguous(memory_format=torch.channels_last)
