"""Calls as named leaves, batch dimensions, microbatches."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pdcompile.batch import (
    FlatCall,
    concatenate,
    example_call,
    flatten_call,
    follow_batch,
    microbatch_sizes,
    resize,
    resolve_batch,
    split,
    weights,
)
from pdcompile.errors import ConfigError, InputError

Point = namedtuple("Point", ["x", "y"])


def rows(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


class Two(nn.Module):
    def forward(self, x: Any, y: Any = None, scale: float = 1.0) -> Any:
        return x


class Stars(nn.Module):
    def forward(self, first: Any, /, *args: Any, flag: bool = True, **more: Any) -> Any:
        return first, args, flag, more


class HasTarget(nn.Module):
    def forward(self, x: Any, target: Any) -> Any:
        return x


def call(*args: Any, target: Any = None, **kwargs: Any) -> FlatCall:
    return flatten_call(Two(), args, kwargs, target)


# ------------------------------------------------------------------ paths


def test_paths_follow_names_and_containers() -> None:
    flat = call({"ids": 1, 2: [3, Point(4, (5,))]}, target=[6, {"y": 7}])
    assert flat.leaves == {
        "x['ids']": 1,
        "x[2][0]": 3,
        "x[2][1].x": 4,
        "x[2][1].y[0]": 5,
        "target[0]": 6,
        "target[1]['y']": 7,
    }


def test_a_parameter_has_one_path_however_it_is_passed() -> None:
    x, y = rows(2), rows(3)
    calls = [call(x, y), call(x, y=y), call(y=y, x=x)]
    assert all(list(one.leaves) == ["x", "y", "target"] for one in calls)
    assert calls[0].spec == calls[1].spec == calls[2].spec
    for one in calls:
        args, kwargs, target = one.unflatten()
        assert args == (x, y)
        assert kwargs == {}
        assert target is None


def test_star_arguments() -> None:
    flat = flatten_call(Stars(), (0, 1, (2, 3)), {"flag": False, "extra": 4, "first": 5}, 6)
    assert flat.leaves == {
        "first": 0,
        "args[0]": 1,
        "args[1][0]": 2,
        "args[1][1]": 3,
        "flag": False,
        "extra": 4,
        "more['first']": 5,
        "target": 6,
    }
    assert flat.unflatten() == (
        (0, 1, (2, 3)),
        {"flag": False, "extra": 4, "first": 5},
        6,
    )


@pytest.mark.parametrize("model", [HasTarget(), Stars()])
def test_an_argument_named_target_is_not_the_target(model: nn.Module) -> None:
    flat = flatten_call(model, (1,), {"target": 2}, 3)
    assert flat.leaves["forward.target"] == 2
    assert flat.leaves["target"] == 3
    assert model(*flat.unflatten()[0], **flat.unflatten()[1]) is not None
    assert flat.unflatten()[2] == 3


def test_defaults_are_no_leaves_and_gaps_stay_gaps() -> None:
    flat = call(1, scale=2.0)
    assert "y" not in flat.leaves
    assert flat.unflatten() == ((1,), {"scale": 2.0}, None)


def test_unflatten_takes_other_leaves_and_names_missing_ones() -> None:
    flat = call(1, 2)
    assert flat.unflatten({"x": 5, "y": 6, "target": 7}) == ((5, 6), {}, 7)
    with pytest.raises(InputError, match="missing") as caught:
        flat.unflatten({"x": 5})
    assert caught.value.where == "y"


def test_example_inputs_forms() -> None:
    x = rows(2)
    assert example_call(Two(), x).spec == example_call(Two(), (x,)).spec
    assert example_call(Two(), x).spec == example_call(Two(), {"x": x}).spec
    with pytest.raises(InputError, match="list"):
        example_call(Two(), [x])


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [((), {}, "missing a required"), ((1, 2, 3, 4), {}, "too many"), ((1,), {"z": 1}, "'z'")],
)
def test_a_call_that_does_not_bind(
    args: tuple[int, ...], kwargs: Mapping[str, int], said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        flatten_call(Two(), args, kwargs)
    assert caught.value.where == "Two.forward(x: 'Any', y: 'Any' = None, scale: 'float' = 1.0)" \
        " -> 'Any'"  # fmt: skip


@dataclass
class Hidden:
    ids: Tensor


def test_leaves_that_cannot_be_split_are_refused() -> None:
    for value, said in [
        (Hidden(rows(2)), "hidden inside an object of class Hidden"),
        (np.zeros((2, 2)), "numpy array"),
        (torch.eye(2).to_sparse(), "sparse"),
    ]:
        with pytest.raises(InputError, match=said) as caught:
            call({"deep": value})
        assert caught.value.where == "x['deep']"
        assert caught.value.remedy


leaf = st.one_of(st.none(), st.integers(), st.text(max_size=2))
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(trees, trees, trees)
def test_flatten_and_unflatten_are_inverse(x: Any, y: Any, target: Any) -> None:
    flat = flatten_call(Two(), (x,), {"y": y}, target)
    assert flat.unflatten() == ((x, y), {}, target)


# ------------------------------------------------------------------ batch dimensions


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
    assert resolve_batch(flat, {"y": 1}).dims["y['seq'][0]"] == 1
    assert resolve_batch(flat, {"y": {"seq": None}}).dims["y['seq'][0]"] is None


def test_the_offender_is_the_odd_one_out() -> None:
    with pytest.raises(InputError) as caught:
        resolve_batch(call(rows(7, 4), rows(4, 2), target=rows(4)))
    assert caught.value.where == "x"


def test_an_empty_minibatch_is_refused() -> None:
    with pytest.raises(InputError, match="no samples"):
        resolve_batch(call(rows(0, 3), target=rows(0)))


@pytest.mark.parametrize(
    "dims",
    [
        ((1, 0), {}, 0),
        ((1,), {"y": 0}, 0),
        ({}, {"x": 1, "y": 0}, 0),
        (0, {"x": 1}, 0),
        ((1, -2), 0, (0,)),
        {"x": -1, "y": 0, "target": 0},
        {"x": 1},
    ],
)
def test_prefixes_over_args_kwargs_and_target(dims: Any) -> None:
    x, y, target = rows(3, 5), rows(5, 2), (rows(5),)
    if isinstance(dims, tuple) and dims[2] == 0:
        target = rows(5)  # type: ignore[assignment]
    for flat in (call(x, y, target=target), call(y=y, x=x, target=target)):
        layout = resolve_batch(flat, dims)
        assert layout.size == 5
        assert [layout.dims[path] for path in flat.leaves] == [1, 0, 0]


def test_scalar_prefixes_speak_of_how_arguments_are_passed() -> None:
    flat = call(rows(4), y=rows(9), target=rows(4))
    assert resolve_batch(flat, (0, None, 0)).dims == {"x": 0, "y": None, "target": 0}


def test_prefixes_of_star_arguments() -> None:
    flat = flatten_call(Stars(), (rows(4), rows(2, 4), rows(4)), {"extra": rows(3)})
    layout = resolve_batch(flat, ((0, 1), {"extra": None}, None))
    assert layout.dims == {
        "first": 0, "args[0]": 1, "args[1]": 0, "extra": None, "target": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "dims",
    ["0", True, 1.0, (0, 0), {"z": 0}, (0, {"z": 0}, 0), ((0, 0, 0, 0), {}, 0), ("x", {}, 0),
     {"x": {"a": 0}}, {"x": (0, 0)}, {"x": False}],
)  # fmt: skip
def test_senseless_prefixes_are_refused(dims: Any) -> None:
    with pytest.raises(ConfigError, match="batch_dims"):
        resolve_batch(call(rows(4), rows(4)), dims)


def test_a_dimension_that_does_not_exist() -> None:
    with pytest.raises(InputError, match="dimension 1 of a tensor of shape") as caught:
        resolve_batch(call(rows(4, 2), rows(2)), 1)
    assert caught.value.where == "y"


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
    later = follow_batch(call(rows(5, 3), rows(1, 3)), layout)
    assert (later.size, later.dims["x"], later.dims["y"]) == (5, 0, None)


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
    with pytest.raises(InputError):
        resize(flat, layout, 0)


def test_resize_keeps_channels_last_and_meta() -> None:
    images = torch.empty(2, 3, 4, 4, device="meta").to(memory_format=torch.channels_last)
    flat = call(images)
    larger = resize(flat, resolve_batch(flat), 5).leaves["x"]
    assert larger.shape == (5, 3, 4, 4)
    assert larger.is_contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------ microbatches


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
    assert all(part["x"].data_ptr() >= x.data_ptr() for part in parts)  # views, no copies


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


def test_unknown_reduction() -> None:
    flat = call(rows(4))
    with pytest.raises(ConfigError, match="'median'"):
        weights("median", flat, resolve_batch(flat), 2)  # type: ignore[arg-type]


# ------------------------------------------------------------------ outputs


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


def test_unlike_structures_are_refused() -> None:
    with pytest.raises(InputError, match="microbatch 1 returned another structure"):
        concatenate([(rows(1), rows(1)), (rows(1),)], [1, 1])
