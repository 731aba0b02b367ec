"""An error that several ranks end with is shown once, with their numbers, and none is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.helpers.launch import processes

FAIL = """
    import os, sys
    from pdcompile.cli.output import fail
    from pdcompile.errors import ConfigError, RankError
    from pdcompile.runtime.failure import deduplicated_errors
    deduplicated_errors.SETTLE_SECONDS = 100.0  # it ends with the last rank's error
    {more}
    rank = int(os.environ["RANK"])
    errors = [{errors}]
    fail(errors[rank], as_json="--json" in sys.argv)
"""
SAME, OTHER = 'ConfigError("wrong")', 'ConfigError("another")'
DERIVED = 'RankError("another rank failed first: wrong")'


def shown(folder: Path, *errors: str, more: str = "", arguments: tuple[str, ...] = ()) -> list[str]:
    """The lines that ranks with these errors print, but for their codes."""
    run = processes(
        FAIL.format(errors=", ".join(errors), more=more), len(errors), folder, *arguments
    )
    assert run.code == 0, run
    return [line for line in run.output.splitlines() if "code:" not in line]


def test_the_same_error_is_shown_by_one_rank_which_names_the_others(tmp_path: Path) -> None:
    first, then = shown(tmp_path, SAME, SAME, SAME)
    assert first[: -len("0: wrong")] == "error on rank "
    rank = int(first.removeprefix("error on rank ").removesuffix(": wrong"))
    others = [str(other) for other in range(3) if other != rank]
    assert then == f"the same on ranks {', '.join(others)}"


def test_another_error_is_shown_too(tmp_path: Path) -> None:
    lines = shown(tmp_path, SAME, OTHER)
    assert sorted(lines) == ["error on rank 0: wrong", "error on rank 1: another"]


def test_that_another_rank_failed_is_said_where_that_one_says_nothing(tmp_path: Path) -> None:
    assert shown(tmp_path, DERIVED, SAME) == ["error on rank 1: wrong"]
    alone = shown(tmp_path, DERIVED, DERIVED)
    assert len(alone) == 2
    assert alone[0].endswith("another rank failed first: wrong")
    assert alone[1].startswith("the same on rank ")


def test_what_torchrun_ends_meanwhile_is_shown_before(tmp_path: Path) -> None:
    """Rank 1 gets SIGTERM while it waits whether rank 0 says what came first."""
    script = """
        import os, signal, time
        from pdcompile.cli.output import fail
        from pdcompile.errors import RankError
        if os.environ["RANK"] == "1":
            wait = time.sleep
            time.sleep = lambda seconds: (os.kill(os.getpid(), signal.SIGTERM), wait(seconds))
            fail(RankError("another rank failed first: killed"))
            print("goes on")
    """
    run = processes(script, 2, tmp_path)
    assert run.code == -signal.SIGTERM, run
    assert "error on rank 1: another rank failed first: killed" in run.output
    assert "goes on" not in run.output


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("one", "other"), [(SAME, OTHER), (SAME, SAME), (DERIVED, OTHER), (DERIVED, DERIVED)]
)
def test_json_is_one_object(one: str, other: str, tmp_path: Path) -> None:
    lines = shown(tmp_path, one, other, arguments=("--json",))
    assert sum('"message":' in line for line in lines) == 1
    if {one, other} == {SAME, OTHER}:
        assert sum(line.startswith("error on rank ") for line in lines) == 2


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
