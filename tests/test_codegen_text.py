"""Folding and quoting: text changes its shape, never its meaning."""

from __future__ import annotations

import ast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pdcompile.passes.codegen import generate
from pdcompile.passes.codegen.source_text import Line, clean, fold, render
from pdcompile.passes.form.expressions import atom, plain, quote
from tests.helpers.cuts import cut
from tests.helpers.generated import captured, mean_square

names = st.sampled_from(["x", "self.blocks[0].attention", "hidden_states", "torch.zeros", "y"])
literals = st.one_of(
    st.integers(-5, 5), st.text(max_size=120), st.floats(allow_nan=False), st.booleans(), st.none()
).map(plain)


def calls(children):
    return st.one_of(
        st.tuples(names, st.lists(children, max_size=6)).map(
            lambda p: f"{p[0]}({', '.join(p[1])})"
        ),
        st.lists(children, min_size=2, max_size=5).map(lambda p: f"[{', '.join(p)}]"),
        st.tuples(children, children).map(lambda p: f"{atom(p[0])} + {atom(p[1])}"),
        st.tuples(names, children).map(lambda p: f"{p[0]}.view(2, {p[1]})"),
    )


expressions = st.recursive(st.one_of(names, literals), calls, max_leaves=25)


@settings(max_examples=200)
@given(expressions, st.integers(0, 3), st.sampled_from(["x = {}", "return {}", "f({})", "{}"]))
def test_folding_keeps_the_meaning(expression, depth, form):
    code = form.format(expression)
    lines = fold(code, depth)
    folded = "\n".join(lines)
    block = (
        "if x:\n" * bool(depth) + folded
        if depth == 1
        else "\n".join([*("    " * i + "if x:" for i in range(depth)), folded])
    )
    plain_code = "\n".join([*("    " * i + "if x:" for i in range(depth)), "    " * depth + code])
    body = f"def f():\n{_indent(block)}"
    other = f"def f():\n{_indent(plain_code)}"
    assert ast.dump(ast.parse(body)) == ast.dump(ast.parse(other))


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


@given(st.text())
def test_quoted_text_evaluates_to_itself(text):
    assert ast.literal_eval(quote(text)) == text
    assert "\n" not in quote(text)


@given(st.one_of(st.floats(), st.integers(), st.complex_numbers(), st.booleans(), st.none()))
def test_numbers_evaluate_to_themselves(value):
    result = eval(plain(value), {"float": float, "complex": complex})
    assert type(result) is type(value)
    assert repr(result) == repr(value)


@given(st.text())
def test_comments_cannot_end_early(text):
    shown = clean(text)
    assert shown.isascii()
    assert shown.isprintable()
    assert not set(shown) & set('"\\')
    assert ast.get_docstring(ast.parse(f'"""{shown} is there."""'), clean=False) == (
        f"{shown} is there."
    )
    assert render([Line("x = 1", shown)]).count("\n") == 1


def test_a_call_that_no_line_can_begin_moves_below_its_targets():
    call = 'self.decoder.block[0].layer["1"].EncDecAttention'
    code = f"keys_3, values_4, position_bias, attn_output = {call}(hidden_states, attention_mask)"
    assert fold(code, 2) == [
        "        keys_3, values_4, position_bias, attn_output = (",
        f"            {call}(hidden_states, attention_mask)",
        "        )",
    ]
    many = ", ".join(f"hidden_states_{number}" for number in range(4))
    assert fold(code.replace("hidden_states", many), 2) == [
        "        keys_3, values_4, position_bias, attn_output = (",
        f"            {call}(",
        f"                {many}, attention_mask",
        "            )",
        "        )",
    ]


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, skip: Tensor, *, gate: Tensor) -> Tensor:
        mixed: Tensor = torch.relu(self.a(x)) * gate + self.b(skip)
        return mixed


class Layers(nn.Module):
    """Values of one name, which modules take under others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.mix = Mixer()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
            kept.append(h)
        mixed: Tensor = self.last(self.mix(h, kept[0], gate=kept[1]))
        return mixed


def test_modules_call_their_arguments_what_their_authors_do():
    text = source_of(Layers(), torch.randn(4, 8))
    assert "def forward(self, x, gate, skip):" in text
    assert "return (torch.relu(self.a(x)) * gate) + self.b(skip)" in text
    # A list of modules has no code of its own: what its modules give stays inside an expression.
    assert "h_1 = torch.tanh(self.layers[1](h))  # f32[b, 8]" in text
    assert "self.mix(h_2, h_1, h)" in text


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.relu(self.lin(x)) if self.training else self.lin(x)
        return found + 1


class Outer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, Inner())
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = getattr(self, self.name)(x)
        return found


def test_headings_are_whole():
    """Parentheses close, however long the name and however deep the body."""
    seen = set()
    for length in (30, 33, 34, 35, 38):
        model = Outer("m" * length)
        found = captured(model, torch.randn(4, 8), torch.zeros(4, 8), mean_square)[2]
        text = generate(found, cut(found, [2])).files["stage_0.py"]
        (heading,) = {one.strip() for one in text.splitlines() if one.strip().startswith("# mm")}
        assert heading.count("(") == heading.count(")")
        seen.add("(" in heading)
    assert seen == {True, False}


def source_of(model: nn.Module, inputs: Tensor) -> str:
    found = captured(model, inputs, torch.zeros(4, 8), mean_square)[2]
    return generate(found, cut(found, [])).files["stage_0.py"]
