"""Hostile names and literals of every kind that an op's argument may have."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from torch import nn

from pdcompile.ir.graph import Affine, DictOf, ListOf, Slice, TorchLiteral

NAMES = [
    "self", "class", "None", "True", "lambda", "match", "_", "__", "__class__x", "__init__x", "0",
    "12", "007", 'a"b', "a'b", 'a"b\'c', "back\\slash", "new\nline", "cr\rlf", "tab\t", "\u2028",
    "\x00", "'''", '"""', "{x}", "{", "%s", "# comment", "é", "ﬁ", "ｘ", "х", "𝐱", "\u200b", " ",
    "x y", "__import__('os')", "loss", "draw", "torch", "nn", "F", "x", "b", "super", "range",
    "Stage0", "OpaqueModule", "inputs", "results", "keys", "items", "values", "pop", "a" * 120,
    "x = 0); import os; (y", "\ud800",
]  # fmt: skip

names = st.one_of(
    st.sampled_from(NAMES), st.text(min_size=1, max_size=8), st.sampled_from("xyz")
).filter(lambda name: "." not in name and not hasattr(nn.Module(), name))
words = st.one_of(st.sampled_from([*NAMES, "", "x", "hidden", "q, (k, v)"]), st.text(max_size=8))

floats = st.one_of(
    st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e308, 5e-324, -1e22]),
    st.floats(),
)
integers = st.one_of(
    st.sampled_from([0, -1, 2**31, 2**53 + 1, -(2**63), 2**64, 10**40, -(10**40)]), st.integers()
)
complexes = st.builds(complex, floats, floats)
scalars = st.one_of(floats, integers, st.booleans(), complexes)
sizes = st.builds(Affine, st.integers(-3, 3).filter(bool), st.integers(-4, 4))
dtypes = st.sampled_from(["float32", "bfloat16", "int64", "bool", "complex64"])
torch_literals = st.one_of(
    dtypes.map(lambda name: TorchLiteral("dtype", name)),
    st.just(TorchLiteral("device", "self")),
    st.just(TorchLiteral("layout", "strided")),
    st.just(TorchLiteral("memory_format", "channels_last")),
)
leaves = st.one_of(scalars, words, st.none(), st.just(...), sizes, torch_literals)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3).map(tuple)
    pairs = st.lists(st.tuples(words, inner), max_size=3, unique_by=lambda pair: pair[0])
    return st.one_of(
        items, items.map(ListOf), pairs.map(lambda p: DictOf(tuple(p))),
        st.builds(Slice, inner, inner, inner),
    )  # fmt: skip


arguments = st.recursive(leaves, _nested, max_leaves=12)
