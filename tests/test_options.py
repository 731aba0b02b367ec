"""One row an option: the table, `compile`, `Workload`, the command line and the plan agree."""

from __future__ import annotations

import inspect
import typing
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any

import pytest
from typer.main import get_command

import pdcompile
import pdcompile.__main__  # every verb
from pdcompile.cli.app import app
from pdcompile.cli.options import OWN
from pdcompile.options import Options
from pdcompile.options.table import PANELS, ROWS
from pdcompile.plan import StagePlan, Training

#: types that `compile` alone takes (a file is read at once), or the search of `pdcompile plan`
OTHER_TYPES = {
    "schedule": {"os.PathLike[str]"}, "replicas": {"1"}, "parts": {"tuple[int, ...]"},
}  # fmt: skip
NOT_OF_A_MODEL = ("example_inputs", "example_target")


def kinds(hint: Any) -> set[Any]:
    """The members of a union, literals one by one, without None."""
    if typing.get_origin(hint) in (typing.Union, UnionType, typing.Literal):
        parts = [kinds(one) for one in typing.get_args(hint)]
        return set().union(*parts) - {NoneType}
    return {hint}


def test_the_signature_of_compile_is_the_table() -> None:
    signature = inspect.signature(pdcompile.compile)
    hints = typing.get_type_hints(pdcompile.compile)
    given = {
        name: one
        for name, one in signature.parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY and name not in NOT_OF_A_MODEL
    }
    assert given.keys() == ROWS.keys()
    own = typing.get_type_hints(Options)
    for name, row in ROWS.items():
        assert given[name].default == row.unsaid, name
        assert type(given[name].default) is type(row.unsaid), name
        other = kinds(hints[name]) ^ kinds(own[name])
        assert {str(one) for one in other} <= OTHER_TYPES.get(name, set()), name
        if row.is_open:
            assert NoneType in typing.get_args(hints[name]) or hints[name] is Any, name


def test_help_says_each_option_once() -> None:
    doc = inspect.getdoc(pdcompile.compile) or ""
    arguments, _, raises = doc.partition("Args:\n")[2].partition("\n\nRaises:")
    assert raises
    listed = [line.split(":")[0].strip() for line in arguments.splitlines() if line[4:5] != " "]
    assert listed == ["model", *NOT_OF_A_MODEL, *ROWS]


def test_a_workload_takes_those_of_a_training() -> None:
    doc = inspect.getdoc(pdcompile.Workload) or ""
    said = " ".join(doc.partition("takes them: ")[2].partition(".")[0].split())
    assert said.split(", ") == [name for name, row in ROWS.items() if row.of_training]


@pytest.mark.parametrize("verb", ["plan", "run", "verify", "dump"])
def test_a_verb_has_the_flags_of_the_table(verb: str) -> None:
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    shown = {one.name: one for one in command.params}
    for name, row in {**ROWS, **OWN}.items():
        has = row.flag is not None and verb in (row.flag.verbs or (verb,))
        if name == "resume":  # the verb's own, a switch: the folder is that of --save
            has = verb == "run"
        assert (name in shown) == has, name
        if name in shown and row.flag is not None:
            assert shown[name].opts == [f"--{name.replace('_', '-')}"]
            assert shown[name].help.startswith(row.flag.help or row.help), name


def test_a_row_names_a_place_that_a_plan_has() -> None:
    training = {one.name for one in fields(Training)}
    stage = {one.name for one in fields(StagePlan)}
    for name, row in ROWS.items():
        of, _, place = row.plan.partition("." if row.plan.startswith("training") else ": ")
        if row.plan:
            assert place in (training if of == "training" else {*stage, ""}), name


def test_every_option_has_a_panel_and_text() -> None:
    assert [name for kind in PANELS.values() for name in kind.__annotations__] == [*ROWS]
    for name, row in ROWS.items():
        assert row.help[0].isupper() or row.flag is not None or not row.help[0].isalpha(), name
        assert row.help.endswith("."), name
        assert not row.more or row.more.endswith("."), name
