"""Outputs of any class: taken apart, put together without their constructor."""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pdcompile.batch import concatenate, flatten_output, map_tensors, unflatten_output
from pdcompile.batch.structure import unknown_in

Point = namedtuple("Point", "x y")


class Layer:
    def __init__(self, keys: Tensor) -> None:
        assert isinstance(keys, Tensor), "the constructor is not for rebuilding"
        self.keys = keys
        self.filled = True


class Cache:
    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.kind = Layer


class Slots:
    __slots__ = ("a", "never")

    def __init__(self, a: Any) -> None:
        self.a = a


@dataclass(frozen=True, slots=True)
class Frozen:
    loss: Tensor
    cache: Any = None


class Named(dict):  # type: ignore[type-arg]
    """A dict of its own class, which pytrees take for a leaf."""


class Kind(enum.Enum):
    ONE = 1


ONES = torch.ones(1)


def _closure(value: Any) -> Any:
    return lambda: value


def back(value: Any) -> Any:
    return unflatten_output(*flatten_output(value))


def test_attributes_lead_to_leaves() -> None:
    cache = Cache([Layer(torch.ones(2)), Layer(torch.zeros(3))])
    leaves, structure = flatten_output({"cache": cache, "y": torch.ones(1)})
    assert [type(leaf) for leaf in leaves] == [Tensor, bool, Tensor, bool, Tensor]
    found = unflatten_output(leaves, structure)["cache"]
    assert type(found) is Cache
    assert found is not cache
    assert found.kind is Layer
    assert found.layers is not cache.layers
    assert found.layers[1].keys is cache.layers[1].keys
    assert found.layers[1].filled is True


def test_classes_of_many_makes() -> None:
    named = Named(a=torch.ones(1))
    named.extra = 3  # type: ignore[attr-defined]
    value = (Frozen(torch.ones(()), Slots(named)), torch.Size([2, 3]), Point(1, Slots(None)))
    frozen, size, point = back(value)
    assert type(frozen) is Frozen
    assert frozen.loss is value[0].loss
    assert type(frozen.cache.a) is Named
    assert frozen.cache.a.extra == 3
    assert not hasattr(frozen.cache, "never")
    assert type(size) is torch.Size
    assert size == (2, 3)
    assert type(point) is Point
    assert type(point.y) is Slots


def test_an_object_that_is_met_again_stays_one() -> None:
    layer = Layer(torch.ones(1))
    layer.self = layer  # type: ignore[attr-defined]
    first, second = back([layer, layer])
    assert first is second is first.self
    assert len(flatten_output([layer, layer])[0]) == 2


def test_what_has_no_tensors_is_kept() -> None:
    linear = nn.Linear(2, 2)
    kept = [linear, Layer, Kind.ONE, torch.relu, b"bytes", {1, 2}, torch.strided]
    leaves, structure = flatten_output(kept)
    assert leaves == []
    assert unknown_in(structure) is None
    assert all(a is b for a, b in zip(unflatten_output([], structure), kept, strict=True))


@pytest.mark.parametrize(
    "value",
    [
        functools.partial(torch.add, torch.ones(1)),
        functools.lru_cache(lambda: ONES),
        _closure(ONES),
        {torch.ones(1)},
        ValueError(torch.ones(1)),
        iter([torch.ones(1)]),
    ],
    ids=["partial", "cached function", "closure", "set", "exception", "iterator"],
)
def test_what_may_hide_tensors_is_told(value: Any) -> None:
    assert unknown_in(flatten_output((1, Slots(value)))[1]) is value


def test_distributions() -> None:
    normal = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
    found = map_tensors(lambda tensor: tensor + 1, normal)
    assert found.mean.tolist() == [1, 1, 1]
    assert found.batch_shape == torch.Size([3])


def test_microbatches_of_caches_become_one_cache() -> None:
    parts = [Frozen(torch.ones(()), Cache([Layer(torch.full((n, 2), n))])) for n in (2, 1)]
    place = next(i for i, one in enumerate(flatten_output(parts[0])[0]) if one is parts[0].loss)
    found = concatenate(parts, [2, 1], loss=torch.tensor(5.0), loss_leaf=place)
    assert found.loss == 5
    assert found.cache.layers[0].keys.tolist() == [[2, 2], [2, 2], [1, 1]]


_LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=2), st.just(torch.ones(1)))
_PLAIN = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=2).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=8,
)


@given(_PLAIN)
def test_plain_containers_have_the_leaves_of_pytrees(value: Any) -> None:
    leaves, structure = flatten_output(value)
    expected, spec = pytree.tree_flatten(value)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))
    assert pytree.tree_structure(unflatten_output(leaves, structure)) == spec


def _wrapped(value: Any) -> Any:
    return Slots(Layer.__new__(Layer)) if value is None else Slots([value, Slots(value)])


@given(_PLAIN.map(_wrapped))
def test_equal_structures_for_rebuilt_values(value: Any) -> None:
    leaves, structure = flatten_output(value)
    again, same = flatten_output(unflatten_output(leaves, structure))
    assert same == structure
    assert all(a is b for a, b in zip(leaves, again, strict=True))
