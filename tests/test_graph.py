"""OpGraph as text, as JSON and as fingerprint, without a model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.errors import PlanError
from pdcompile.ir import graph_json
from pdcompile.ir.graph import (
    Affine,
    Attr,
    DictOf,
    GraphInput,
    ListOf,
    Op,
    OpCost,
    OpGraph,
    Ref,
    Slice,
    TensorInfo,
    TorchLiteral,
    Value,
    fingerprint,
    leaves,
    walk,
)
from pdcompile.ir.graph_json import decode, encode


def small_graph() -> OpGraph:
    linear = Op(
        name="up",
        kind="module",
        target="torch.nn.Linear",
        args=(Ref("x"),),
        module_path="block.up",
        source="model.py:7",
        parameters=("block.up.weight",),
        constructor=(("in_features", 8), ("out_features", 4), ("bias", False)),
    )
    half = Op(
        name="getitem",
        kind="function",
        target="operator.getitem",
        args=(Ref("up"), (..., Slice(None, 2))),
        source="model.py:8",
    )
    view = Op(name="view", kind="method", target="view", args=(Ref("getitem"), Affine(2, -1), 4))
    shift = Op(
        name="add",
        kind="function",
        target="operator.add",
        args=(Ref("view"), 1.5),
        draw=0,
        grad_enabled=False,
        autocast="cpu:bfloat16",
    )
    shape = (Affine(1), 4)
    values = [
        Value("x", (Affine(1), 8), "float32", consumers=("up",), storage=0),
        Value("up", shape, "float32", True, True, "up", ("getitem",), 1),
        Value("getitem", (Affine(1), 2), "float32", True, True, "getitem", ("view",), 1),
        Value("view", shape, "float32", True, True, "view", ("add",), 1),
        Value("add", shape, "float32", True, True, "add", (), 2),
    ]
    weight = TensorInfo("block.up.weight", "parameter", (4, 8), "float32", True)
    return OpGraph(
        training=True,
        ops=(linear, half, view, shift),
        values={value.name: value for value in values},
        inputs=(GraphInput("x", "x", 0),),
        tensors={"block.up.weight": weight},
        output=DictOf((("y", Ref("add")), ("n", 3))),
        loss=None,
        batch_size=4,
        classes={"": ("model.Model", "model.py:1")},
    )


def test_text() -> None:
    assert str(small_graph()) == (
        "graph train(x):  # 4 ops, 1 parameters, 128 bytes in all tensors\n"
        "  x: f32[b, 8]                                                    "
        "# input x, split along dim 0\n"
        "  # block (, )\n"
        "  up = self.block.up(x)                                           "
        "# f32[b, 4], model.py:7\n"
        "  # the model (Model, model.py:1)\n"
        "  getitem = up[..., :2]                                           "
        "# f32[b, 2], model.py:8\n"
        "  view = getitem.view(2*b-1, 4)                                   "
        "# f32[b, 4], <no source>\n"
        "  add = view + 1.5                                                "
        "# f32[b, 4], draw 0, no_grad, autocast cpu:bfloat16, <no source>\n"
        "  return {'y': add, 'n': 3}\n"
    )


def test_json_round_trip() -> None:
    graph = small_graph()
    costed = replace(graph.ops[0], cost=OpCost(forward_seconds=1e-6, flops=12))
    graph = replace(graph, ops=(costed, *graph.ops[1:]))
    again = OpGraph.from_json(graph.to_json())
    assert again == graph
    assert again.to_json() == graph.to_json()


def test_fingerprint_is_of_what_is_computed() -> None:
    graph = small_graph()
    ops = tuple(replace(op, source="elsewhere.py:1", cost=OpCost()) for op in graph.ops)
    moved = replace(graph, ops=ops, batch_size=7, notes=("a note",))
    assert fingerprint(moved) == fingerprint(graph)
    assert len(fingerprint(graph)) == 64
    other_number = replace(graph.ops[3], args=(Ref("view"), 1.25))
    weight = replace(graph.tensors["block.up.weight"], shape=(4, 9))
    for changed in (
        replace(graph, ops=(*graph.ops[:3], other_number)),
        replace(graph, tensors={"block.up.weight": weight}),
        replace(graph, training=False),
        replace(graph, output=Ref("add")),
    ):
        assert fingerprint(changed) != fingerprint(graph)


def test_leaves_and_walk() -> None:
    nested = DictOf((("a", (Ref("x"), None)), ("b", ListOf((Ref("y"), Attr("w"), 2)))))
    assert leaves(nested) == (Ref("x"), None, Ref("y"), Attr("w"), 2)
    assert [ref.name for ref in walk(nested, Ref)] == ["x", "y"]
    assert walk(Slice(Ref("a"), None, Ref("b")), Ref) == [Ref("a"), Ref("b")]


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(exclude_categories=("Cs",))),
    st.just(...),
    st.builds(Affine, st.integers(1, 99), st.integers(-9, 9)),
    st.builds(Ref, st.text("abc", min_size=1)),
    st.builds(Attr, st.text("ab.\"'\n", min_size=1)),
    st.builds(TorchLiteral, st.sampled_from(["dtype", "device"]), st.text("abc")),
)
arguments = st.recursive(
    scalars,
    lambda part: st.one_of(
        st.lists(part, max_size=3).map(tuple),
        st.builds(ListOf, st.lists(part, max_size=3).map(tuple)),
        st.builds(DictOf, st.lists(st.tuples(st.text("abc"), part), max_size=3).map(tuple)),
        st.builds(Slice, part, part, part),
    ),
    max_leaves=8,
)


@given(arguments)
def test_every_argument_survives_json(argument: object) -> None:
    again = decode(json.loads(json.dumps(encode(argument))))
    assert again == argument
    assert repr(again) == repr(argument)  # 1, 1.0 and True are equal, but not the same


def test_numbers_that_json_does_not_have() -> None:
    assert math.isnan(decode(encode(math.nan)))  # type: ignore[arg-type]
    assert decode(encode(-math.inf)) == -math.inf
    assert decode(encode(2**80)) == 2**80


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.update(version=1), "format version"),
        (lambda data: data.pop("digest"), "changed since it was written"),
        (lambda data: data.update(surprise=1), "changed since it was written"),
        (lambda data: data["ops"].reverse(), "changed since it was written"),
        (lambda data: data["ops"][0].update(kind="lambda"), "changed since it was written"),
        (lambda data: data["values"].append(data["values"][0]), "changed since it was written"),
        (lambda data: data.update(batch_size=0), "changed since it was written"),
    ],
)
def test_changed_graphs_are_refused(edit: Callable[[Any], Any], message: str) -> None:
    data = json.loads(small_graph().to_json())
    edit(data)
    with pytest.raises(PlanError, match=message):
        OpGraph.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.update(surprise=1), "surprise"),
        (lambda data: data["ops"][0].update(kind="lambda"), "Invalid enum value"),
        (lambda data: data["ops"][0].update(args={"tuple": [{"call": "f"}]}), "call"),
        (lambda data: data["ops"][0].pop("name"), "name"),
        (lambda data: data.update(batch_size="4"), "Expected"),
        (lambda data: data["ops"][0].update(args={"tuple": [{"int": "9" * 5000}]}), "digits"),
        (lambda data: data["ops"][0].update(args={"tuple": [{"complex": [1, "2"]}]}), "complex"),
    ],
)
def test_a_sealed_file_may_still_be_no_graph(edit: Callable[[Any], Any], message: str) -> None:
    data = json.loads(small_graph().to_json())
    edit(data)
    own = {name: part for name, part in data.items() if name not in ("version", "digest")}
    sealed = {**own, "version": data["version"], "digest": graph_json._digest(own)}
    with pytest.raises(PlanError, match=f"not a graph: .*{message}"):
        OpGraph.from_json(json.dumps(sealed))


def test_graphs_need_no_torch() -> None:
    code = (
        "import sys; from pdcompile.ir.graph import OpGraph; import pdcompile.ir.graph_json, "
        "pdcompile.ir.graph_text; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
