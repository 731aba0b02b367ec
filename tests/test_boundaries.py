"""Edges, tied parameters, evaluation placement and interfaces of small graphs made by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.errors import PlanError
from pdcompile.graph import (
    Affine,
    Argument,
    Attr,
    Capture,
    GraphInput,
    Op,
    OpGraph,
    Ref,
    TensorInfo,
    Value,
)
from pdcompile.passes.boundaries import (
    edges,
    interfaces,
    place_eval,
    stage_of_ops,
    tied,
)
from pdcompile.passes.naming import identifier, unique
from tests.helpers.cuts import cut, plan_of

WIDTH = 8


def graph(
    ops: list[Op],
    *,
    inputs: tuple[str, ...] = ("x",),
    output: Argument = None,
    loss: str | None = None,
    parameters: tuple[str, ...] = (),
    dtypes: dict[str, str] | None = None,
    gradient: bool = True,
    training: bool = True,
) -> OpGraph:
    """Every value is float32 (b, 8) unless `dtypes` says otherwise."""
    dtypes = dtypes or {}
    values = {
        name: Value(name, (Affine(1), WIDTH), dtypes.get(name, "float32"), storage=i)
        for i, name in enumerate(inputs)
    }
    for i, op in enumerate(ops):
        dtype = dtypes.get(op.name, "float32")
        values[op.name] = Value(
            op.name,
            (Affine(1), WIDTH) if dtype != "container" else (),
            dtype,
            gradient,
            gradient and dtype == "float32",
            op.name,
            tuple(other.name for other in ops if op.name in other.inputs),
            100 + i,
        )
    return OpGraph(
        training=training,
        ops=tuple(ops),
        values=values,
        inputs=tuple(GraphInput(name, name, 0) for name in inputs),
        tensors={
            fqn: TensorInfo(fqn, "parameter", (WIDTH, WIDTH), "float32", True) for fqn in parameters
        },
        output=output if output is not None else Ref(ops[-1].name),
        loss=loss,
        batch_size=4,
    )


def op(name: str, *inputs: str, weight: str | None = None, **fields: object) -> Op:
    """A function of values, and of one parameter."""
    args: tuple[Argument, ...] = tuple(Ref(each) for each in inputs)
    if weight is not None:
        args = (*args, Attr(weight))
        fields["parameters"] = (weight,)
    defaults = {"kind": "function", "target": "torch.add", "args": args}
    return Op(name, **{**defaults, **fields})  # type: ignore[arg-type]


def both(train: OpGraph, evaluation: OpGraph | None = None) -> Capture:
    return Capture(train, dataclasses.replace(evaluation or train, training=False))


def chain(length: int) -> OpGraph:
    """x → a0 → a1 → …"""
    return graph([op(f"a{i}", f"a{i - 1}" if i else "x") for i in range(length)])


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
    first, second = interfaces(capture, plan)
    assert [(p.value, p.path) for p in first.train.inputs] == [("x", "x")]
    assert [(p.value, p.path) for p in second.train.inputs] == [("a", None), ("mask", "mask")]


def test_output_leaves_flow_to_the_last_stage():
    ops = [op("a", "x"), op("c", "a"), op("d", "c")]
    capture = both(graph(ops, output=(Ref("d"), Ref("a"), Ref("x"))))
    plan = plan_of(capture, [["a"], ["c"], ["d"]])
    assert [(e.value, e.targets) for e in plan.edges] == [("a", (1, 2)), ("c", (2,))]
    last = interfaces(capture, plan)[2].train
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
    stages = interfaces(both(g), plan_of(both(g), [["a"], ["c"]]))
    assert [stage.parameters for stage in stages] == [("w",), ("w",)]


def test_unused_parameters_have_a_home_beside_their_module():
    ops = [op("a", "x", module_path="f"), op("c", "a", module_path="g.h")]
    capture = both(graph(ops, parameters=("f.w", "g.unused")))
    stages = interfaces(capture, plan_of(capture, [["a"], ["c"]]))
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
    stages = interfaces(capture, plan_of(capture, [["a"], ["c"], ["d"]]))
    assert [stage.aliases for stage in stages] == [{}, {}, {"head.weight": "wte.weight"}]
    assert [stage.parameters for stage in stages] == [("wte.weight",), (), ("wte.weight",)]


def test_the_loss_is_on_the_last_stage_and_takes_outputs_and_targets():
    ops = [op("a", "x"), op("c", "a"), op("ce", "c", "target", region="loss")]
    g = graph(ops, inputs=("x", "target"), output=(Ref("c"), Ref("a")), loss="ce")
    capture = both(g)
    plan = cut(capture, [1])
    first, last = interfaces(capture, plan)
    assert plan.stages[1].ops == ("c", "ce")
    assert first.train.loss is None
    assert last.train.loss == "ce"
    assert [p.value for p in last.train.loss_inputs] == ["c", "target"]
    assert [p.value for p in last.train.inputs] == ["a"]


def test_a_loss_that_reads_inside_the_model_is_refused():
    ops = [op("a", "x"), op("c", "a"), op("ce", "a", region="loss")]
    capture = both(graph(ops, output=Ref("c"), loss="ce"))
    with pytest.raises(PlanError, match="which the model does not return"):
        interfaces(capture, cut(capture, [1]))


def test_ops_that_only_evaluation_has_join_their_module():
    train = graph([op("a", "x", module_path="f"), op("c", "a", module_path="g")])
    evaluation = graph(
        [
            op("a_", "x", module_path="f"),
            op("extra", "a_", module_path="f", target="torch.mul"),
            op("c_", "extra", module_path="g"),
        ],
    )
    capture = both(train, evaluation)
    assert place_eval(capture, {"a": 0, "c": 1}) == {"a_": 0, "extra": 0, "c_": 1}


def test_ops_are_told_apart_by_what_they_read():
    """Evaluation has one more op of a kind before: counting them would match the wrong ones."""
    train = graph([op("a", "x", weight="w"), op("c", "a", weight="v")], parameters=("w", "v"))
    evaluation = graph(
        [op("more", "x"), op("a_", "more", weight="w"), op("c_", "a_", weight="v")],
        parameters=("w", "v"),
    )
    placed = place_eval(both(train, evaluation), {"a": 0, "c": 1})
    assert placed == {"more": 0, "a_": 0, "c_": 1}


def test_an_op_of_evaluation_goes_where_training_has_its_parameter():
    train = graph([op("a", "x", weight="w"), op("c", "a", module_path="g")], parameters=("w",))
    other = op("extra", "x", module_path="g", target="torch.mul", weight="w")
    evaluation = graph([op("c_", "x", module_path="g"), other], parameters=("w",))
    assert place_eval(both(train, evaluation), {"a": 0, "c": 1}) == {"c_": 1, "extra": 0}


def test_what_only_evaluation_writes_in_place_stays_with_its_later_readers():
    train = graph([op("a", "x", module_path="f"), op("c", "a", module_path="g")])
    ops = [
        op("a_", "x", module_path="f"),
        op("write", "a_", module_path="g", mutates=("a_",)),
        op("c_", "a_", module_path="g"),
    ]
    capture = both(train, graph(ops))
    assert place_eval(capture, {"a": 0, "c": 1}) == {"a_": 1, "write": 1, "c_": 1}
    fine = both(train, graph([*ops[:2], op("c_", "write", module_path="g")]))
    assert place_eval(fine, {"a": 0, "c": 1}) == {"a_": 0, "write": 1, "c_": 1}


def test_readers_of_what_evaluation_wrote_may_be_later_and_those_before_not():
    train = graph([op("a", "x", module_path="f"), op("c", "a", module_path="g")])
    write = op("write", "a_", module_path="f", mutates=("a_",))
    after = [op("a_", "x", module_path="f"), write, op("c_", "a_", module_path="g")]
    placed = place_eval(both(train, graph(after)), {"a": 0, "c": 1})
    assert placed == {"a_": 0, "write": 0, "c_": 1}
    placed = place_eval(both(train, graph([after[0], after[2], write])), {"a": 0, "c": 1})
    assert placed == {"a_": 1, "c_": 1, "write": 1}


def test_what_evaluation_returns_is_made_where_it_is_written_last():
    train = graph([op("a", "x", module_path="f"), op("c", "a", module_path="g")])
    write = op("write", "a_", module_path="g", mutates=("a_",))
    evaluation = graph([op("a_", "x", module_path="f"), write], output=Ref("a_"))
    assert place_eval(both(train, evaluation), {"a": 0, "c": 1}) == {"a_": 1, "write": 1}


def test_a_number_is_read_in_evaluation_where_it_is_used():
    """An early exit that only evaluation has: the choice between both ways is on a later stage."""
    train = graph([op("a", "x", module_path="f"), op("c", "a", module_path="g")])
    ops = [
        op("a_", "x", module_path="f"),
        op("decided", "a_", module_path="f", target="item"),
        op("c_", "a_", module_path="g"),
        op("choose", "decided", "c_", module_path="f"),
    ]
    capture = both(train, graph(ops, dtypes={"decided": "container"}))
    placed = place_eval(capture, {"a": 0, "c": 1})
    assert placed == {"a_": 0, "decided": 1, "c_": 1, "choose": 1}


def test_evaluation_is_repaired_to_be_monotone():
    train = graph([op("a", "x", module_path="f"), op("c", "a", module_path="g")])
    evaluation = graph([op("c_", "x", module_path="g"), op("a_", "c_", module_path="f")])
    placed = place_eval(both(train, evaluation), {"a": 0, "c": 1})
    assert placed == {"c_": 1, "a_": 1}


def test_evaluation_may_not_read_elsewhere_what_training_changes():
    train = graph(
        [op("a", "x", module_path="f", weight="w"), op("c", "a", module_path="g")],
        parameters=("w",),
    )
    evaluation = graph(
        [
            op("a", "x", module_path="f", weight="w"),
            op("c", "a", module_path="g"),
            op("again", "c", module_path="g", weight="w", target="torch.mul"),
        ],
        parameters=("w",),
    )
    capture = both(train, evaluation)
    with pytest.raises(PlanError, match="evaluation reads 'w' on stage 1"):
        plan_of(capture, [["a"], ["c"]])


def test_an_op_on_two_stages_or_none_is_refused():
    capture = both(chain(2))
    with pytest.raises(PlanError, match="on stage 0 and on stage 1"):
        plan_of(capture, [["a0"], ["a0", "a1"]])
    with pytest.raises(PlanError, match=r"'a1'.* is on no stage"):
        plan_of(capture, [["a0"], []])


def test_draws_list_every_call_of_a_random_leaf_on_its_stage():
    drop = {"kind": "module", "target": "torch.nn.Dropout", "module_path": "drop"}
    ops = [op("a", "x", draw=0, **drop), op("c", "a", draw=1, **drop), op("d", "c", draw=2, **drop)]
    capture = both(graph(ops))
    stages = interfaces(capture, plan_of(capture, [["a"], ["c", "d"]]))
    assert [stage.train.draws for stage in stages] == [{"drop": (0,)}, {"drop": (1, 2)}]


def test_ports_are_named_after_the_users_variables():
    ops = [op("a", "x", variable="h"), op("c", "a", variable="h"), op("d", "c", "a")]
    capture = both(graph(ops, inputs=("x",)))
    _, middle, last = interfaces(capture, plan_of(capture, [["a"], ["c"], ["d"]]))
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
    middle = interfaces(capture, plan_of(capture, [["a"], ["c", "d"], ["e"]]))[1]
    names = [p.name for p in (*middle.train.inputs, *middle.train.outputs)]
    assert names == ["h", "h_1", "add"]


def test_an_argument_that_the_stage_writes_into_is_marked():
    ops = [op("a", "x"), op("c", "a", mutates=("a",))]
    capture = both(graph(ops))
    _, last = interfaces(capture, plan_of(capture, [["a"], ["c"]]))
    assert last.train.inputs[0].mutated


def test_a_stage_that_needs_the_batch_size_gets_an_input_that_tells_it():
    fixed = Value("a", (WIDTH,), "float32", producer="a")
    ops = [op("a", "x"), op("c", "a", kind="method", target="expand")]
    ops[1] = dataclasses.replace(ops[1], args=(Ref("a"), Affine(1), WIDTH))
    g = graph(ops)
    values = {**g.values, "a": fixed, "c": dataclasses.replace(fixed, name="c")}
    capture = both(dataclasses.replace(g, values=values))
    _, last = interfaces(capture, plan_of(capture, [["a"], ["c"]]))
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
