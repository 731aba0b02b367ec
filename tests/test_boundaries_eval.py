"""Places of the ops of evaluation, given the stages of the training graph."""

from __future__ import annotations

import pytest

from pdcompile.errors import PlanError
from pdcompile.ir.graph import (
    Ref,
)
from pdcompile.passes.stages.boundaries import place_eval
from tests.helpers.cuts import plan_of
from tests.helpers.hand_graphs import both, graph, op


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
