"""An error that several ranks end with is shown once, and none is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.launch import processes

FAIL = """
    import os, sys
    from pdcompile.cli.output import fail
    from pdcompile.errors import ConfigError
    {more}
    rank = int(os.environ["RANK"])
    errors = [{errors}]
    fail(errors[rank], as_json="--json" in sys.argv)
"""
SAME, OTHER = 'ConfigError("wrong")', 'ConfigError("another")'


def shown(folder: Path, *errors: str, more: str = "", arguments: tuple[str, ...] = ()) -> list[str]:
    """The lines that ranks with these errors print, but for their codes."""
    run = processes(
        FAIL.format(errors=", ".join(errors), more=more), len(errors), folder, *arguments
    )
    assert run.code == 0, run
    return [line for line in run.output.splitlines() if "code:" not in line]


def test_the_same_error_is_shown_by_one_rank(tmp_path: Path) -> None:
    (line,) = shown(tmp_path, SAME, SAME, SAME)
    assert line.startswith("error on rank ")
    assert line.endswith(": wrong")


def test_another_error_is_shown_too(tmp_path: Path) -> None:
    lines = shown(tmp_path, SAME, OTHER)
    assert sorted(lines) == ["error on rank 0: wrong", "error on rank 1: another"]


@pytest.mark.parametrize("other", [SAME, OTHER])
def test_json_is_one_object(other: str, tmp_path: Path) -> None:
    lines = shown(tmp_path, SAME, other, arguments=("--json",))
    assert sum('"message":' in line for line in lines) == 1
    assert sum(line.startswith("error on rank ") for line in lines) == 1 + (other != SAME)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "change",
    ['os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")', 'os.environ["MASTER_PORT"] = "1"'],
    ids=["of a rank", "that is not there"],
)
def test_without_a_store_nothing_is_lost(change: str, tmp_path: Path) -> None:
    lines = shown(tmp_path, SAME, SAME, more=change)
    assert sorted(lines) == ["error on rank 0: wrong", "error on rank 1: wrong"]


def test_one_process_says_nothing_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    from pdcompile.cli.output import fail
    from pdcompile.errors import ConfigError

    assert "WORLD_SIZE" not in os.environ
    assert fail(ConfigError("wrong")) == 2
    assert capsys.readouterr().err.startswith("error: wrong\n")
