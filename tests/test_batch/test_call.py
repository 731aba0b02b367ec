"""Calls as named leaves."""

from __future__ import annotations

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
    example_call,
    flatten_call,
)
from pdcompile.errors import InputError
from tests.helpers.calls import HasTarget, Point, Stars, Two, call, rows


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


@dataclass
class Registered:
    ids: Tensor
    scale: float = 2.0


def test_a_data_class_is_flattened_once_it_is_registered() -> None:
    with pytest.raises(InputError, match="class Registered") as caught:
        call(Registered(rows(2)))
    assert str(caught.value.remedy).endswith(
        "register Registered with torch.export.register_dataclass"
    )
    torch.export.register_dataclass(Registered)  # as the remedy says
    flat = call(Registered(rows(2)))
    args, _, _ = flat.unflatten(flat.leaves)
    assert isinstance(args[0], Registered)
    assert args[0].scale == 2.0
    assert [type(leaf) for leaf in flat.leaves.values()][:2] == [Tensor, float]


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


def test_tensors_without_values_are_for_models_without_values() -> None:
    """Planning needs no values; a forward on the meta device ended in a raw error of torch."""
    inputs, model = torch.ones(4, 2, device="meta"), nn.Linear(2, 2)
    for args, target, path in (((inputs,), None, "input"), ((rows(4),), [inputs], r"target\[0\]")):
        with pytest.raises(InputError, match=f"a meta tensor has no values\n *where: {path}"):
            flatten_call(model, args, {}, target)
    assert flatten_call(model.to("meta"), (inputs,), {}).leaves["input"] is inputs
