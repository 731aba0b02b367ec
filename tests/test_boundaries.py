"""Edges, tied parameters and interfaces of small graphs made by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.errors import PlanError
from pdcompile.ir.graph import (
    Affine,
    Ref,
    TensorInfo,
    Value,
)
from pdcompile.passes.stages.boundaries import edges, stage_of_ops, staged, tied
from pdcompile.passes.stages.naming import identifier, unique
from tests.helpers.cuts import cut, plan_of
from tests.helpers.hand_graphs import WIDTH, both, chain, graph, op


def test_a_chain_has_one_edge_at_a_cut():
    (edge,) = edges(chain(4), {"a0": 0, "a1": 0, "a2": 1, "a3": 1}, 2, 4)
    assert (edge.value, edge.source, edge.targets) == ("a1", 0, (1,))
    assert edge.bytes == 4 * WIDTH * 4
    assert edge.shape == ("b", "8")
    assert edge.gradient


def test_a_skip_goes_straight_to_every_stage_that_reads_it():
    ops = [op("a", "x"), op("c", "a"), op("d", "c", "a"), op("e", "d", "a")]
    found = edges(graph(ops), {"a": 0, "c": 1, "d": 2, "e": 3}, 4, 1)
    assert [(e.value, e.source, e.targets) for e in found] == [
        ("a", 0, (1, 2, 3)),
        ("c", 1, (2,)),
        ("d", 2, (3,)),
    ]


def test_a_graph_input_is_no_edge():
    ops = [op("a", "x"), op("c", "a", "mask")]
    capture = both(graph(ops, inputs=("x", "mask")))
    plan = plan_of(capture, [["a"], ["c"]])
    assert [edge.value for edge in plan.edges] == ["a"]
    first, second = staged(capture, plan).interfaces
    assert [(p.value, p.path) for p in first.train.inputs] == [("x", "x")]
    assert [(p.value, p.path) for p in second.train.inputs] == [("a", None), ("mask", "mask")]


def test_output_leaves_flow_to_the_last_stage():
    ops = [op("a", "x"), op("c", "a"), op("d", "c")]
    capture = both(graph(ops, output=(Ref("d"), Ref("a"), Ref("x"))))
    plan = plan_of(capture, [["a"], ["c"], ["d"]])
    assert [(e.value, e.targets) for e in plan.edges] == [("a", (1, 2)), ("c", (2,))]
    last = staged(capture, plan).interfaces[2].train
    assert [p.value for p in last.outputs] == ["d", "a", "x"]
    assert {p.value for p in last.inputs} == {"c", "a", "x"}


def test_a_value_that_only_the_output_needs_brings_no_gradient():
    ops = [op("a", "x"), op("c", "a"), op("d", "c")]
    g = graph(ops, output=(Ref("d"), Ref("a")), loss="d")
    found = edges(g, {"a": 0, "c": 0, "d": 1}, 2, 1)
    assert [(e.value, e.gradient) for e in found] == [("a", False), ("c", True)]


def test_a_loss_made_early_still_sends_its_gradient():
    ops = [op("loss", "x"), op("logits", "x")]
    g = graph(ops, output=(Ref("loss"), Ref("logits")), loss="loss")
    (edge,) = edges(g, {"loss": 0, "logits": 1}, 2, 1)
    assert edge.gradient


def test_a_gradient_comes_back_through_a_tuple():
    ops = [op("a", "x"), op("parts", "a"), op("q", "parts"), op("loss", "q")]
    g = graph(ops, loss="loss", dtypes={"parts": "container"})
    (edge,) = edges(g, {"a": 0, "parts": 1, "q": 1, "loss": 1}, 2, 1)
    assert edge.gradient


def test_integers_bring_no_gradient():
    g = graph([op("a", "x"), op("c", "a")], dtypes={"a": "int64"})
    (edge,) = edges(g, {"a": 0, "c": 1}, 2, 2)
    assert not edge.gradient
    assert edge.bytes == 2 * WIDTH * 8


def test_an_op_before_what_it_reads_is_refused():
    with pytest.raises(PlanError, match="'a1' on stage 0 reads 'a0' of stage 1"):
        edges(chain(2), {"a0": 1, "a1": 0}, 2, 1)


def test_a_container_cannot_be_sent():
    g = graph([op("parts", "x"), op("q", "parts")], dtypes={"parts": "container"})
    with pytest.raises(PlanError, match="only tensors can be sent"):
        edges(g, {"parts": 0, "q": 1}, 2, 1)


def test_tied_parameters_name_their_stages():
    ops = [op("a", "x", weight="w"), op("c", "a", weight="u"), op("d", "c", weight="w")]
    g = graph(ops, parameters=("u", "w"))
    (found,) = tied(g, {"a": 0, "c": 1, "d": 2})
    assert (found.fqn, found.stages, found.bytes) == ("w", (0, 2), WIDTH * WIDTH * 4)
    assert tied(g, {"a": 0, "c": 0, "d": 0}) == ()


def test_a_frozen_parameter_is_copied_but_not_tied():
    g = graph([op("a", "x", weight="w"), op("c", "a", weight="w")], parameters=("w",))
    frozen = dataclasses.replace(g.tensors["w"], requires_grad=False)
    g = dataclasses.replace(g, tensors={"w": frozen})
    assert tied(g, {"a": 0, "c": 1}) == ()
    stages = staged(both(g), plan_of(both(g), [["a"], ["c"]])).interfaces
    assert [stage.parameters for stage in stages] == [("w",), ("w",)]


def test_unused_parameters_have_a_home_beside_their_module():
    ops = [op("a", "x", module_path="f"), op("c", "a", module_path="g.h")]
    capture = both(graph(ops, parameters=("f.w", "g.unused")))
    stages = staged(capture, plan_of(capture, [["a"], ["c"]])).interfaces
    assert [stage.parameters for stage in stages] == [("f.w",), ("g.unused",)]


def test_an_alias_exists_where_its_module_is():
    leaf = {"kind": "module", "target": "torch.nn.Linear", "parameters": ("wte.weight",)}
    ops = [
        op("a", "x", module_path="wte", **leaf),
        op("c", "a", module_path="mid"),
        op("d", "c", module_path="head", **leaf),
    ]
    g = graph(ops)
    info = TensorInfo("wte.weight", "parameter", (8, 8), "float32", True, aliases=("head.weight",))
    capture = both(dataclasses.replace(g, tensors={"wte.weight": info}))
    stages = staged(capture, plan_of(capture, [["a"], ["c"], ["d"]])).interfaces
    assert [stage.aliases for stage in stages] == [{}, {}, {"head.weight": "wte.weight"}]
    assert [stage.parameters for stage in stages] == [("wte.weight",), (), ("wte.weight",)]


def test_the_loss_is_on_the_last_stage_and_takes_outputs_and_targets():
    ops = [op("a", "x"), op("c", "a"), op("ce", "c", "target", region="loss")]
    g = graph(ops, inputs=("x", "target"), output=(Ref("c"), Ref("a")), loss="ce")
    capture = both(g)
    plan = cut(capture, [1])
    first, last = staged(capture, plan).interfaces
    assert plan.stages[1].ops == ("c", "ce")
    assert first.train.loss is None
    assert last.train.loss == "ce"
    assert [p.value for p in last.train.loss_inputs] == ["c", "target"]
    assert [p.value for p in last.train.inputs] == ["a"]


def test_a_loss_that_reads_inside_the_model_is_refused():
    ops = [op("a", "x"), op("c", "a"), op("ce", "a", region="loss")]
    capture = both(graph(ops, output=Ref("c"), loss="ce"))
    with pytest.raises(PlanError, match="which the model does not return") as refused:
        staged(capture, cut(capture, [1]))
    assert "write into clones" in str(refused.value.remedy)  # in place it makes another value


def test_draws_list_every_call_of_a_random_leaf_on_its_stage():
    drop = {"kind": "module", "target": "torch.nn.Dropout", "module_path": "drop"}
    ops = [op("a", "x", draw=0, **drop), op("c", "a", draw=1, **drop), op("d", "c", draw=2, **drop)]
    capture = both(graph(ops))
    stages = staged(capture, plan_of(capture, [["a"], ["c", "d"]])).interfaces
    assert [stage.train.draws for stage in stages] == [{"drop": (0,)}, {"drop": (1, 2)}]


def test_ports_are_named_after_the_users_variables():
    ops = [op("a", "x", variable="h"), op("c", "a", variable="h"), op("d", "c", "a")]
    capture = both(graph(ops, inputs=("x",)))
    _, middle, last = staged(capture, plan_of(capture, [["a"], ["c"], ["d"]])).interfaces
    assert [p.name for p in middle.train.inputs] == ["h"]
    assert [p.name for p in middle.train.outputs] == ["h"]  # the argument is dead by then
    assert [p.name for p in last.train.inputs] == ["h", "h_1"]


def test_a_result_never_takes_the_name_of_an_argument_still_in_use():
    ops = [
        op("a", "x", variable="h"),
        op("c", "a", variable="h"),
        op("d", "c", "a"),
        op("e", "d", "c"),
    ]
    capture = both(graph(ops))
    middle = staged(capture, plan_of(capture, [["a"], ["c", "d"], ["e"]])).interfaces[1]
    names = [p.name for p in (*middle.train.inputs, *middle.train.outputs)]
    assert names == ["h", "h_1", "add"]


def test_an_argument_that_the_stage_writes_into_is_marked():
    ops = [op("a", "x"), op("c", "a", mutates=("a",))]
    capture = both(graph(ops))
    _, last = staged(capture, plan_of(capture, [["a"], ["c"]])).interfaces
    assert last.train.inputs[0].mutated


def test_a_stage_that_needs_the_batch_size_gets_an_input_that_tells_it():
    fixed = Value("a", (WIDTH,), "float32", producer="a")
    ops = [op("a", "x"), op("c", "a", kind="method", target="expand")]
    ops[1] = dataclasses.replace(ops[1], args=(Ref("a"), Affine(1), WIDTH))
    g = graph(ops)
    values = {**g.values, "a": fixed, "c": dataclasses.replace(fixed, name="c")}
    capture = both(dataclasses.replace(g, values=values))
    _, last = staged(capture, plan_of(capture, [["a"], ["c"]])).interfaces
    assert [p.path for p in last.train.inputs] == [None, "x"]


@given(st.text())
def test_any_text_becomes_an_identifier(text):
    name = identifier(text)
    assert name.isidentifier()
    assert name.isascii()
    compile(f"{name} = 0", "test", "exec")


@given(st.lists(st.sampled_from(["x", "self", "h", "x_1"]), max_size=8))
def test_unique_names_are_unique(wishes):
    taken: list[str] = []
    for wish in wishes:
        taken.append(unique(wish, taken))
    assert len(set(taken)) == len(taken)
    assert "self" not in taken


@given(st.integers(1, 8), st.data())
def test_edges_are_exactly_the_values_that_cross(length, data):
    """Random monotone stages on a random DAG: an edge for each value read later, and no other."""
    ops, stage_of = [], {}
    for i in range(length):
        sources = data.draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        ops.append(op(f"v{i}", *(f"v{s}" for s in sources)))
        earliest = max((stage_of[f"v{s}"] for s in sources), default=0)
        stage_of[f"v{i}"] = data.draw(st.integers(earliest, 3))
    g = graph(ops)
    found = {(e.value, t) for e in edges(g, stage_of, 4, 1) for t in e.targets}
    expected = {
        (name, stage_of[each.name])
        for each in ops
        for name in each.inputs
        if stage_of[name] != stage_of[each.name]
    }
    if stage_of[ops[-1].name] != 3:
        expected.add((ops[-1].name, 3))
    assert found == expected
    stages = stage_of_ops(
        g, plan_of(both(g), [[n for n, s in stage_of.items() if s == k] for k in range(4)])
    )
    assert stages == stage_of
