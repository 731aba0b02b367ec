"""Source of random graphs with hostile names and literals computes what the graph computes."""

from __future__ import annotations

import ast
import io
import re
import sys
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pdcompile.errors import SourceError
from pdcompile.ir.execution import Lookup, execute, materialise
from pdcompile.ir.graph import Capture, OpGraph, Ref, walk
from pdcompile.ir.stage_interface import Sources, module_of
from pdcompile.passes.codegen import generate, stage_classes
from pdcompile.passes.codegen.source_text import fold
from pdcompile.passes.form.expressions import Scope, literal, quote
from tests.helpers.cuts import cut
from tests.helpers.wild_graphs import B, Wild, captures
from tests.helpers.wild_literals import arguments, names

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=25, suppress_health_check=SLOW)
@given(st.data())
def test_wild_graphs_run_as_source(data):
    wild = data.draw(captures())
    assert_equal_as_source(wild, data.draw)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=SLOW)
@given(st.data())
def test_many_wild_graphs_run_as_source(data):
    wild = data.draw(captures(max_steps=16))
    assert_equal_as_source(wild, data.draw)


def test_a_sum_without_brackets_is_folded() -> None:
    name = "x" * 28
    assert fold(f"{name}_1 = {name} + {name}", 4) == [
        f"                {name}_1 = (",
        f"                    {name} + {name}",
        "                )",
    ]


WORD = re.compile(r"\w+")  # a name of the model's that is too long for any line stays whole


def assert_equal_as_source(wild: Wild, draw: Any) -> None:
    """Cut the graph anywhere, generate, and compare each mode's values bit by bit."""
    allowed = positions(wild.capture)
    cuts = sorted(draw(st.sets(st.sampled_from(allowed), max_size=2))) if allowed else []
    sources = generate(wild.capture, cut(wild.capture, cuts))
    for file, text in sources.files.items():
        if file.endswith(".py"):
            text.encode()  # no lone surrogates
            long = [line for line in text.splitlines() if len(line) > 100]
            assert all(max(map(len, WORD.findall(line))) > 60 for line in long), file
            ast.parse(text)
    run_pipeline_file(sources)
    stages = [filled(cls(), wild.model) for cls in stage_classes(sources)]
    held = {name for stage in stages for name in stage.state_dict()}
    assert held == set(wild.capture.train.tensors)
    for graph in (wild.capture.train, wild.capture.eval):
        made = run(graph, sources, stages, wild)
        torch.manual_seed(1)
        inputs = {item.name: wild.inputs[item.path].clone() for item in graph.inputs}
        expected = execute(graph, inputs, Lookup(wild.model, B))
        for ref in walk(graph.output, Ref):
            assert bits(made[ref.name]) == bits(expected[ref.name]), ref.name


def positions(capture: Capture) -> list[int]:
    """Places where a cut may be: not between a value and an op that writes into its memory."""
    graph = capture.train
    made = {op.name: i for i, op in enumerate(graph.ops)}
    spans: dict[int, list[int]] = {}
    written = {graph.values[name].storage for op in graph.ops for name in op.mutates}
    for op in graph.ops:
        for name in (op.name, *op.inputs):
            if name in made and graph.values[name].storage in written:
                spans.setdefault(graph.values[name].storage, []).extend((made[name], made[op.name]))
    inside = {p for span in spans.values() for p in range(min(span) + 1, max(span) + 1)}
    return [p for p in range(1, len(graph.ops)) if p not in inside]


def run_pipeline_file(sources: Sources) -> str:
    """Do and print what `python pipeline.py` does, without a process of its own."""
    modules = {f"stage_{k}": module_of(cls) for k, cls in enumerate(stage_classes(sources))}
    space = {"__name__": "pipeline", "__file__": "/nowhere/pipeline.py"}
    with patch.dict(sys.modules, modules), redirect_stdout(io.StringIO()) as printed:
        exec(compile(sources.files["pipeline.py"], "pipeline.py", "exec"), space)
        space["main"]()
    return printed.getvalue()


def filled(stage: nn.Module, model: nn.Module) -> nn.Module:
    """The stage with the model's values."""
    state = model.state_dict()
    stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    return stage


def run(
    graph: OpGraph, sources: Sources, stages: list[nn.Module], wild: Wild
) -> dict[str, torch.Tensor]:
    """Every value that a stage returns, of all stages in order."""
    torch.manual_seed(1)
    found: dict[str, torch.Tensor] = {
        item.name: wild.inputs[item.path].clone() for item in graph.inputs
    }
    for stage, interface in zip(stages, sources.interfaces, strict=True):
        stage.train(graph.training)
        signature = interface.train if graph.training else interface.eval
        given = [found[port.value] for port in signature.inputs]
        given = [
            v.clone() if p.mutated else v for p, v in zip(signature.inputs, given, strict=True)
        ]
        results = stage(*given)
        found |= zip([port.value for port in signature.outputs], results, strict=True)
    return found


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are equal to the last bit, of NaNs too."""
    flat = tensor.detach().contiguous().flatten()
    return tensor.dtype, tuple(tensor.shape), bytes(flat.view(torch.uint8).tolist())


class Known(dict):
    """Names that the source of an argument may use."""

    def __missing__(self, name):
        raise AssertionError(f"the literal refers to {name!r}")


@settings(max_examples=150)
@given(arguments)
def test_any_argument_evaluates_to_itself(argument):
    scope = Scope(
        value=quote, tensor=quote, size=lambda size: str(size.at(B)), device=lambda: "device",
        module=quote, function=quote,
    )  # fmt: skip
    text = literal(argument, scope)
    assert "\n" not in text
    device = torch.device("cpu")
    known = Known(
        torch=torch, float=float, complex=complex, slice=slice, device=device, __builtins__={}
    )
    found = eval(compile(ast.parse(text, mode="eval"), "literal", "eval"), known)
    assert_same(found, materialise(argument, {}, Lookup(nn.Module(), B, device)))


def assert_same(one: Any, other: Any) -> None:
    """Equal in type and value, nan and -0.0 too."""
    assert type(one) is type(other)
    if isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()))
    elif isinstance(one, slice):
        assert_same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    else:
        assert repr(one) == repr(other)


class Text(str):
    def __repr__(self):
        return "__import__('os').system('touch pwned')"


class Number(float):
    __repr__ = Text.__repr__


@given(names, st.sampled_from([Text, Number, bytes, frozenset, object]))
def test_subclasses_and_strangers_are_refused_wherever_they_stand(name, kind):
    scope = Scope(str, str, str, lambda: "device", str, str)
    value = kind(name) if kind is Text else kind()
    for argument in (value, (1, value), ((name, value),)):
        with pytest.raises(SourceError, match="cannot be written as source"):
            literal(argument, scope)
