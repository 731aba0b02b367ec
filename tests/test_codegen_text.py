"""Folding and quoting: text changes its shape, never its meaning."""

from __future__ import annotations

import ast

from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompile.passes.codegen.source_text import Line, clean, fold, render
from pdcompile.passes.form.expressions import atom, plain, quote

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
def test_folding_keeps_the_meaning_and_the_width(expression, depth, form):
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
    if form != "{}":
        assert max(map(len, lines)) <= 100


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
