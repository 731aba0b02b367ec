"""`pdcompile schedule`, and a schedule of one's own on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdcompile.plan import Plan
from pdcompile.schedule.registry import KINDS, allowed
from pdcompile.schedule.written import read
from tests.helpers.alike import WORKLOAD, Call


@pytest.mark.parametrize("name", allowed(0))
def test_a_schedule_is_written_and_read_again(name: str, tmp_path: Path, call: Call) -> None:
    mine = tmp_path / "mine.csv"
    code, out, err = call("schedule", name, "--microbatches", "5", "-o", str(mine))
    assert code == 0, err
    ranks = 4 // KINDS[name].usual
    assert out.startswith(f"{name}: 4 stages on {ranks} rank")
    assert "5 microbatches, " in out
    assert f"schedule {name}: proved on" in out
    assert f"written: {mine}" in err.replace("\n", "")
    code, out, _ = call("schedule", str(mine), "--json")
    document = json.loads(out)
    assert document["status"] == "done"
    assert document["schedule"] == "mine"
    assert document["microbatches"] == 5
    assert [len(row.split()) for row in document["ranks"]] == [len(row) for row in read(mine).rows]


def test_more_forwards_of_interleaved_in_a_file(tmp_path: Path, call: Call) -> None:
    mine = tmp_path / "mine.csv"
    counts = ["--stages", "4", "--ranks", "2", "--microbatches", "6"]
    code, out, err = call("schedule", "interleaved+1", *counts, "-o", str(mine))
    assert code == 0, err
    assert "interleaved-1: 4 stages on 2 ranks" in out
    assert len(read(mine).rows) == 2


def test_an_edited_schedule_is_planned_and_run(tmp_path: Path, call: Call) -> None:
    """The plan carries it: the file may be gone, and comes out of the plan again."""
    mine, plan, again = (tmp_path / name for name in ("mine.csv", "plan.json", "mine.csv"))
    assert call("schedule", "1f1b", "--stages", "2", "-o", str(mine))[0] == 0
    text = mine.read_text()
    assert text.startswith("0F0,0F1,,0B0,0F2,0B1,")
    mine.write_text(text.replace("0F0,0F1,,0B0,0F2", "0F0,0F1,0F2,0B0,"))  # another warm-up
    given = ["--schedule", str(mine), "--costs", "estimated", "-o", str(plan)]
    code, _, err = call("plan", WORKLOAD, *given)
    assert code == 0, err
    written = read(mine)
    mine.unlink()
    assert Plan.load(plan).training.schedule == str(written)
    assert Plan.load(plan).training.warmup == (2, 0)
    code, _, err = call("run", WORKLOAD, "--plan", str(plan), "--steps", "2", "--json")
    assert code == 0, err
    assert call("schedule", str(plan), "-o", str(again))[0] == 0
    assert read(again) == written
    for verb in ("explain", "simulate"):
        code, out, _ = call(verb, str(plan))
        assert code == 0
        assert str(written) not in out
    other = Plan.load(plan)
    text = other.training.schedule.replace("0F2 0B0", "0B0 0F2")
    other_plan = tmp_path / "other.json"
    other_plan.write_text(replace(other, training=replace(other.training, schedule=text)).to_json())
    code, out, _ = call("diff", str(plan), str(other_plan))
    assert code == 0
    assert re.search("schedule +mine +mine +other tasks", out)


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["2bw"], "schedule '2bw' leaves microbatches in flight", "a schedule that drains: gpipe"),
        (["pipes"], "'pipes' is neither a schedule nor a file of one", "one of gpipe, 1f1b"),
        (["none.csv"], "cannot read the schedule: No such file", "pdcompile schedule NAME -o FILE"),
        (["bad.csv"], "there is a stage 1, and no stage 0", "without gaps"),
        (["1f1b", "--stages", "4", "--ranks", "2"], "4 stages on 2 ranks under schedule '1f1b'",
         "as many stages on every rank, 1 at most"),
        (["interleaved", "--stages", "5", "--ranks", "2"], "5 stages on 2 ranks", "as many stages"),
        (["bad.csv", "--stages", "2"], "--stages 2 would have no effect", "leave --stages out"),
        (["1f1b", "--stages", "100000"], "Invalid value for '--stages'", "less than or equal to"),
        (["1f1b", "-o", "mine.txt"], "written to .csv, not to .txt", "mine.csv"),
        (["1f1b", "-o", ""], "written to .csv, not to .", "mine.csv"),
        (["mine.json"], "cannot read the plan: No such file", "give a plan.json, which"),
    ],
)  # fmt: skip
def test_what_is_refused(
    words: list[str],
    message: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text("1F0,1B0\n")
    code, out, err = call("schedule", *words)
    assert code == 2
    assert not out
    shown = " ".join(err.split())
    assert message in shown
    assert remedy in shown


def test_a_bad_file_is_refused_before_the_target_is_read(tmp_path: Path, call: Call) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("0F0,0B0\n1F0,1Q0\n")
    for verb in ("plan", "run"):
        code, _, err = call(verb, "nowhere.py:build", "--schedule", str(bad))
        assert code == 2
        assert "'1Q0' is not a task" in err
        assert "row 2, column 2" in " ".join(err.split())


def test_the_example(call: Call) -> None:
    code, out, _ = call("schedule", "examples/schedule.csv")
    assert code == 0
    assert out.startswith("schedule: 4 stages on 2 ranks, 4 microbatches, ")


def test_it_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pdcompile.cli import main\n"
        "try: main(['schedule', 'zb-v', '-o', sys.argv[1]])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    given: list[Any] = [sys.executable, "-c", script, tmp_path / "mine.csv"]
    subprocess.run(given, check=True, capture_output=True)


def test_a_long_proof_says_what_it_is_at(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []

    @contextmanager
    def working(title: str, on: str) -> Iterator[None]:
        said.append((title, on))
        yield

    monkeypatch.setattr("pdcompile.report.progress.working", working)
    assert call("schedule", "1f1b", "--stages", "2", "--microbatches", "3")[0] == 0
    assert said == [("proving", "2 stages on 2 ranks, 3 microbatches")]
