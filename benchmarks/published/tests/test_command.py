"""The command for published problems: refusals, output, and how it ends."""

from __future__ import annotations

import json
import math
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.command import KINDS, FileKind
from benchmarks.published.solution import LevelSolution, Solution, StageSolution
from tests.helpers.alike import Call
from tests.helpers.reference import folder

PLANNED = Solution(
    "feasible", 2.0, 1.5, "CP-SAT", 0.0, "contiguous",
    (
        StageSolution((0, 1, 2, 5), details={"device": "accelerator", "load": 2.0}),
        StageSolution((3, 4), 3, {"device": "cpu", "load": 1.0}),
    ),
    (LevelSolution((0, 1, 2, 5), 1), LevelSolution((3, 4), 3, (LevelSolution((3, 4), 1),))),
)  # fmt: skip
NONE = Solution("infeasible", None, math.inf, "relaxation", 0.0, "all", reason="'a' needs 3 GB")
LATE = Solution("unknown", None, 0.25, "relaxation", 0.0, "all", reason="no plan within 0 s")


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Solution], list[dict[str, Any]]]:
    """Let device placement give this answer; the list gets the options of each call."""

    def use(answer: Solution) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []

        def solver(options: dict[str, Any], limits: Callable[[], dict[str, Any]]) -> Any:
            seen.append(options | limits())
            return answer, 16.5

        monkeypatch.setitem(KINDS, "device-placement", FileKind(solver, "a file", ""))
        return seen

    return use


PLACEMENT = ("--import", "device-placement", "some.json")


def test_json_is_one_object_and_nothing_else(
    call: Call, answering: Any, tmp_path: Path
) -> None:  # fmt: skip
    seen = answering(PLANNED)
    file = tmp_path / "new" / "answer.json"
    code, out, err = call(*PLACEMENT, "--json", "--time-limit", "3", "-o", str(file))
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert (document["status"], document["gap"]) == ("feasible", 0.25)
    assert document["seconds"] > 0
    assert document["stages"][1] == {
        "members": [3, 4], "replicas": 3, "device": "cpu", "load": 1.0
    }  # fmt: skip
    assert document["levels"][1]["inner"] == [{"members": [3, 4], "replicas": 1, "inner": []}]
    assert json.loads(file.read_text(encoding="utf-8")) == document
    assert seen[0]["target"] == Path("some.json")
    assert (seen[0]["time_limit"], seen[0]["seed"]) == (3.0, 0)


@pytest.mark.parametrize("answer", [NONE, LATE])
def test_without_a_plan_the_object_is_printed_and_the_exit_code_is_three(
    answer: Solution, call: Call, answering: Any
) -> None:
    answering(answer)
    code, out, _ = call(*PLACEMENT, "--json")
    document = json.loads(out)
    assert code == 3
    assert document["status"] == answer.status
    assert document["reason"] == answer.reason
    assert document["stages"] == []
    assert document["objective"] is None
    code, out, _ = call(*PLACEMENT)
    assert code == 3
    assert f"{answer.status}: {answer.reason}" in out


def test_the_table_says_what_the_object_says(call: Call, answering: Any) -> None:
    answering(PLANNED)
    code, out, err = call(*PLACEMENT)
    assert (code, err) == (0, "")
    for part in ("0–2, 5", "accelerator", "cpu", "3 × 3–4", "gap 25 %", "limit of a device: 16.5"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--import", "onnx", "f"), "no kind of file 'onnx'"),
        (("--import", "pipedream", "f"), "needs --cluster and --bandwidth"),
        (("--import", "pipedream", "f", "--cluster", "4"), "needs --bandwidth"),
        ((*PLACEMENT, "--devices", "4"), "--devices has no meaning with --import device-placement"),
        ((*PLACEMENT, "--memory", "1GB", "--batch", "2"), "--memory and --batch have no"),
        ((*PLACEMENT, "--time-limit", "nan"), "the time limit is nan seconds"),
        ((*PLACEMENT, "--time-limit", "-1"), "the time limit is -1.0 seconds"),
        ((*PLACEMENT, "--seed", "-1"), "seed -1 is out of range"),
    ],
)
def test_options_without_a_meaning_are_refused_by_name(
    arguments: tuple[str, ...], message: str, call: Call
) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "remedy: " in err


PIPEDREAM = ("--import", "pipedream", "f.txt")
PIPER = ("--import", "piper", "f.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*PIPEDREAM, "--cluster", "4x4", "--bandwidth", "1GB/s"), "too few bandwidths: 1 for"),
        ((*PIPEDREAM, "--cluster", "4", "--bandwidth", "1GB/s,1GB/s"), "too many bandwidths"),
        ((*PIPEDREAM, "--cluster", "4", "--bandwidth", "1"), "bandwidth '1' is not"),
        ((*PIPEDREAM, "--cluster", "4", "--bandwidth", "1GB"), "bandwidth '1GB' is not"),
        ((*PIPEDREAM, "--cluster", "4", "--bandwidth", "0GB/s"), "is below 1 B/s"),
        ((*PIPEDREAM, "--cluster", "0", "--bandwidth", "1GB/s"), "--cluster '0' does not give"),
        ((*PIPEDREAM, "--cluster", "4x", "--bandwidth", "1GB/s"), "--cluster '4x' does not give"),
        (
            (*PIPEDREAM, "--cluster", "auto", "--bandwidth", "1GB/s"),
            "'auto' does not give the sizes",
        ),
        ((*PIPEDREAM, "--cluster", "-4", "--bandwidth", "1GB/s"), "--cluster '-4' does not give"),
        ((*PIPEDREAM, "--cluster", "9999999", "--bandwidth", "1GB/s"), "got 9999999 devices"),
        (
            (*PIPEDREAM, "--cluster", "4", "--bandwidth", "1GB/s", "--memory", "16"),
            "memory '16' is not",
        ),
        (
            (*PIPEDREAM, "--cluster", "4", "--bandwidth", "1GB/s", "--activation-compression", "0"),
            "neither a positive number nor none",
        ),
        (
            (*PIPER, "--devices", "0", "--memory", "8GiB", "--batch", "2", "--bandwidth", "1GB/s"),
            "got 0 devices",
        ),
        (
            (*PIPER, "--devices", "2", "--memory", "8GiB", "--batch", "0", "--bandwidth", "1GB/s"),
            "got 0 microbatches",
        ),
        (
            (*PIPER, "--devices", "2", "--memory", "8", "--batch", "2", "--bandwidth", "1GB/s"),
            "memory '8' is not",
        ),
    ],
)
def test_malformed_values_name_the_option(
    arguments: tuple[str, ...], message: str, call: Call
) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "where: --" in err
    assert "remedy: " in err


def test_help_has_an_example_of_each_kind(call: Call) -> None:
    code, out, _ = call("--help")
    assert code == 0
    for kind in KINDS:
        assert f"python -m benchmarks.published plan --import {kind}" in out


STOPPED = """
import sys, time
from benchmarks.published.solution import Solution
from benchmarks.published import command
from pdcompile.cli import main
from pdcompile.passes.partition.budget import Budget

def search(options, limits):
    with Budget(60) as budget:
        limits()["progress"](3.0, 2.0)
        while not budget.late:
            time.sleep(0.01)
    assert budget.stopped
    return Solution("feasible", 3.0, 2.0, "CP-SAT", 0.0, "contiguous"), None

command.KINDS["device-placement"] = command.FileKind(search, "a file", "")
main(["plan", "--import", "device-placement", "f.json", "--json"], verbs=command.app)
"""


def test_ctrl_c_ends_the_search_with_the_best_plan() -> None:
    """stderr is a terminal here: when it shows the best plan, Ctrl-C is pressed."""
    terminal, other = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=other, text=True
    ) as child:
        os.close(other)
        seen = ""
        while "gap" not in seen:
            seen += os.read(terminal, 1000).decode()
        child.send_signal(signal.SIGINT)
        assert child.stdout is not None
        document = json.loads(child.stdout.read())
    os.close(terminal)
    assert child.returncode == 0
    assert "best 3, bound 2, gap 33 %" in seen
    assert (document["status"], document["objective"], document["bound"]) == ("feasible", 3.0, 2.0)


def test_ctrl_c_before_the_search_leaves_no_time_for_it(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def solver(options: dict[str, Any], limits: Callable[[], dict[str, Any]]) -> Any:
        assert limits()["time_limit"] == 60
        signal.raise_signal(signal.SIGINT)  # while the file is read
        assert limits()["time_limit"] == 0
        return PLANNED, None

    monkeypatch.setitem(KINDS, "device-placement", FileKind(solver, "a file", ""))
    code, out, _ = call(*PLACEMENT, "--time-limit", "60", "--json")
    assert (code, json.loads(out)["status"]) == (0, "feasible")


NEEDED = {
    "device-placement": (),
    "pipedream": ("--cluster", "2", "--bandwidth", "1GB/s"),
    "piper": (),
}


@pytest.mark.parametrize("kind", sorted(NEEDED))
@pytest.mark.parametrize(
    "content",
    [None, b"", b"\x00\xff\xfe", b"[]", b"{", b"{}", b"null", b"[" * 100_000, b"node1 -- a\n"],
    ids=lambda content: "missing" if content is None else repr(content[:8]),
)
def test_files_that_are_none_end_with_two(
    kind: str, content: bytes | None, tmp_path: Path, call: Call
) -> None:
    file = tmp_path / "input"
    if content is not None:
        file.write_bytes(content)
    code, out, err = call("--import", kind, str(file), *NEEDED[kind], "--json")
    document = json.loads(out)
    assert (code, document["status"]) == (2, "error")
    assert str(file) in document["error"]["where"]
    assert "remedy: " in err


@pytest.mark.parametrize(
    ("kind", "file", "options", "objective"),
    [
        ("device-placement", "device_placement/LayerGraphs/bert24_inference.json", (), 17.789906),
        ("piper", "piper/bert32a100.json",
         ("--devices", "8", "--memory", "8GiB", "--batch", "1920", "--bandwidth", "25 GiB/s"),
         0.16585575),
        ("pipedream", "pipedream/vgg16.txt",
         ("--cluster", "16", "--bandwidth", "3125000000.0B/s"), 0.04552480782648889),
        ("pipedream", "pipedream/vgg16.txt",
         ("--cluster", "2x8", "--bandwidth", "30GB/s,25Gbit/s"), 0.06576668672),
    ],
)  # fmt: skip
def test_published_optimum_and_no_torch(
    kind: str, file: str, options: tuple[str, ...], objective: float
) -> None:
    """The whole command imports no torch: run in a process of its own."""
    name, _, rest = file.partition("/")
    arguments = ["plan", "--import", kind, str(folder(name) / rest), *options, "--json"]
    program = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('benchmarks.published', run_name='__main__')\n"
        "finally:\n    sys.stderr.write('torch' * ('torch' in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert document["objective"] == pytest.approx(objective, rel=1e-7)
    assert (document["status"], document["gap"]) == ("optimal", 0)
    assert document["stages"]


def test_nothing_fits(call: Call) -> None:
    """4 GB hold no pipeline of VGG-16; the published option returns one that needs 15 GB."""
    file = folder("pipedream") / "vgg16.txt"
    code, out, _ = call(
        "--import", "pipedream", str(file), "--cluster", "16", "--bandwidth", "10Gbit/s",
        "--memory", "4GB", "--json",
    )  # fmt: skip
    document = json.loads(out)
    assert (code, document["status"], document["objective"]) == (3, "infeasible", None)
    assert document["reason"]
