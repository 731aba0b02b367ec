"""The command line: help that teaches, errors that tell, JSON that parses, exit codes."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdcompile.cli import main
from pdcompile.cli.options import Flags
from pdcompile.cli.run import step_seconds
from pdcompile.errors import InfeasibleError, NotFoundError, PlanError
from tests.helpers.alike import Call
from tests.helpers.report_data import plan

VERBS = (
    "plan", "explain", "diff", "whatif", "simulate", "schedule", "dump", "verify", "run",
    "checkpoint", "costs", "doctor", "probe",
)  # fmt: skip


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan().to_json(), encoding="utf-8")
    return path


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example_that_names_the_verb(verb: str, call: Call) -> None:
    code, out, _ = call(verb, "--help")
    assert code == 0
    assert "Example" in out
    assert f"pdcompile {verb} " in out


def test_front_page_lists_the_verbs_and_the_exit_codes(call: Call) -> None:
    code, out, _ = call("--help")
    assert code == 0
    assert "Exit codes" in out
    positions = [out.index(f"│ {verb} ") for verb in VERBS]
    assert positions == sorted(positions)


def test_help_fills_the_lines_of_a_narrow_terminal(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    for verb in ("", "verify"):
        _, out, _ = call(*([verb] if verb else []), "--help")
        prose = out.partition("Usage:")[2].partition("\u256d")[0]
        blocks = [block.splitlines() for block in prose.split("\n" + " " * 80 + "\n")]
        for block in blocks:
            for line, following in itertools.pairwise(block):
                assert len(line.rstrip()) + len(following.split()[0]) > 75, line


def test_a_word_that_is_no_verb_is_told_the_nearest(call: Call) -> None:
    code, _, err = call("verfy")
    assert code == 2
    assert "Did you mean 'verify'" in err


def test_units_are_in_the_help(call: Call) -> None:
    _, out, _ = call("plan", "--help")
    for part in ("16 GB", "2x4", "local:4", "SECONDS", "cluster.toml"):
        assert part in out


def test_explain(plan_file: Path, call: Call) -> None:
    code, out, err = call("explain", str(plan_file))
    assert (code, err) == (0, "")
    assert "certificate: optimal" in out
    assert max(map(len, out.splitlines())) <= 100


def test_explain_json_is_one_object(plan_file: Path, call: Call) -> None:
    code, out, _ = call("explain", str(plan_file), "--json")
    assert code == 0
    document = json.loads(out)
    assert "pdcompile plan TARGET" in document.pop("missing")
    assert document == {
        "status": "optimal",
        "plan": json.loads(plan().to_json()),
        "explanation": None,
    }


def test_explain_needs_no_torch(plan_file: Path) -> None:
    program = (
        "import sys\nfrom pdcompile.cli import main\n"
        "try:\n    main(['explain', sys.argv[1]])\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "    sys.exit(str({'torch', 'ortools'} & set(sys.modules) or ''))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(plan_file)], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "plan.json"),
        (b"{", "plan.json"),
        (b'{"schema": "pdcompile.plan/9"}', "pdcompile.plan/9"),
        (b"\xff\xfe", "plan.json"),
        (b"[" * 100_000, "plan.json"),
    ],
)
def test_plan_files_that_are_none(
    content: bytes | None, message: str, tmp_path: Path, call: Call
) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    code, out, err = call("explain", str(path))
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_a_report_is_no_plan(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "report.html"
    path.write_text("<html></html>")
    _, _, err = call("explain", str(path))
    assert "not JSON" in err
    assert "remedy: give a plan.json" in err


def test_error_as_json(tmp_path: Path, call: Call) -> None:
    code, out, err = call("explain", str(tmp_path / "none.json"), "--json")
    assert code == 2
    document = json.loads(out)
    assert document["status"] == "error"
    assert document["error"]["kind"] == "PlanError"
    assert document["error"]["code"] == "PDC-PLAN"
    assert document["error"]["where"].endswith("none.json")
    assert document["error"]["remedy"]
    assert "error: " in err
    assert "\n  code: PDC-PLAN (docs/errors.md)" in err


@pytest.mark.parametrize(
    ("kind", "status", "begin"),
    [(InfeasibleError, "infeasible", "infeasible"), (NotFoundError, "unknown", "error")],
)
def test_no_plan_has_its_own_exit_code(
    kind: type[InfeasibleError],
    status: str,
    begin: str,
    plan_file: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it is proved that there is none, the status says."""

    def refuse(path: Path) -> None:
        raise kind("20 MB cannot hold it", where="stage 0", remedy="add memory")

    monkeypatch.setattr("pdcompile.plan.Plan.load", refuse)
    code, out, err = call("explain", str(plan_file), "--json")
    assert code == 3
    assert json.loads(out)["status"] == status
    assert json.loads(out)["error"]["remedy"] == "add memory"
    assert err.startswith(f"{begin}: 20 MB cannot hold it\n  where: stage 0\n  remedy: add")


def test_a_defect_keeps_its_traceback(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(path: Path) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("pdcompile.plan.Plan.load", break_down)
    with pytest.raises(ZeroDivisionError):
        main(["explain", str(plan_file)])


def test_markup_in_a_message_is_text(
    plan_file: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PlanError("stages[bold] has no ops[/]", where="[red]")

    monkeypatch.setattr("pdcompile.plan.Plan.load", refuse)
    _, _, err = call("explain", str(plan_file))
    assert "stages[bold] has no ops[/]" in err
    assert "[red]" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "nothing.py:build"), "no file 'nothing.py'"),
        (("run", "nothing"), "has not the form"),
        (("verify", "no_such_module:build"), "no module 'no_such_module'"),
        (("dump", "nothing.py:build", "--plan", "none.json"), "No such file"),
    ],
)
def test_bad_targets_end_with_two(arguments: tuple[str, ...], message: str, call: Call) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "remedy: " in err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--microbatches", "many", "--microbatches many is not a valid value"),
        ("--optimizer", "Adomw", "no optimizer 'Adomw'"),
        ("--split", "samples", "split='samples' divides nothing: a stage has one part"),
        ("--parts", "2,4", "parts=(2, 4) has stages of 2 and of 4 parts"),
        ("--cluster", "local:none", "no number of stages"),
        ("--lr", "-1", "greater than or equal to 0"),
    ],
)
def test_bad_options_end_with_two(
    option: str, value: str, message: str, tmp_path: Path, call: Call
) -> None:
    target = tmp_path / "small_target.py"
    target.write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(2, 2), torch.ones(4, 2)\n",
        encoding="utf-8",
    )
    code, _, err = call("plan", f"{target}:build", option, value)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--memory", "32", "write a number and one of B, kB, MB"),
        ("--cluster", "local:none", "no number of stages"),
        ("--refine", "maybe", "one of auto, on, off"),
        ("--outputs", "some", "one of none, evaluation, last, everything, all"),
        ("--loss-reduction", "median", "one of mean, sum, FILE:FUNCTION"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "run"])
def test_options_are_read_before_the_target(
    verb: str, option: str, value: str, message: str, call: Call
) -> None:
    code, _, err = call(verb, "nothing.py:build", option, value)
    assert code == 2
    assert message in err


def test_python_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdcompile", "--version"], capture_output=True, text=True, check=True
    )
    of_torch = re.escape(metadata.version("torch"))
    assert re.fullmatch(rf"pdcompile 0\.[0-9.]+, torch {of_torch}\n", done.stdout)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("pdcompile wha", "whatif"),
        ("pdcompile plan --clu", "--cluster"),
        ("pdcompile che", "checkpoint"),
    ],
)
def test_the_shell_completes(typed: str, offered: str) -> None:
    """A shell asks as bash does, with what `pdcompile --install-completion` puts into its start-up
    file."""
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    asked = {"_PDCOMPILE_COMPLETE": "complete_bash", **words}
    command = [sys.executable, "-c", "from pdcompile.__main__ import main; main()"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **asked}
    )
    assert done.stdout.split() == [offered]


def test_simulate_draws_and_writes(plan_file: Path, tmp_path: Path, call: Call) -> None:
    names = {"--html": "r.html", "--trace": "t.json"}
    options = [part for key, name in names.items() for part in (key, str(tmp_path / "new" / name))]
    code, out, err = call("simulate", str(plan_file), "--steps", "2", *options)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("rank 0 F0")
    assert lines[1].startswith("rank 1 ··")
    assert err.count("written: ") == 2
    page = (tmp_path / "new" / "r.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "What limits this plan" in page
    events = json.loads((tmp_path / "new" / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["name"].startswith("B ") for event in events) == 2 * 2 * 4


def test_simulate_json(plan_file: Path, call: Call) -> None:
    code, out, _ = call("simulate", str(plan_file), "--json")
    document = json.loads(out)
    assert (code, document["status"], document["steps"]) == (0, "done", 1)
    assert document["seconds"] > 0
    assert 0 < document["idle"] < 1
    assert len(document["forecast"]["ledgers"]) == 2
    assert document["costs"] == ""  # of the devices themselves
    estimated = plan_file.with_name("estimated.json")
    estimated.write_text(replace(plan(), costs="estimated costs").to_json(), encoding="utf-8")
    shown = json.loads(call("simulate", str(estimated), "--json")[1])
    assert shown["costs"] == "estimated costs"


def test_simulate_into_a_place_that_cannot_be_written(plan_file: Path, call: Call) -> None:
    code, _, err = call("simulate", str(plan_file), "--html", f"{plan_file}/r.html")
    assert code == 2
    assert "cannot write" in err
    assert "with -o" not in err  # which simulate does not have


def test_plan_leaves_its_target_as_it_is(tmp_path: Path, call: Call) -> None:
    target = tmp_path / "target_to_keep.py"
    text = "import torch\ndef build():\n    return torch.nn.Linear(2, 2), torch.ones(4, 2)\n"
    target.write_text(text, encoding="utf-8")
    options = ("--costs", "estimated", "--optimizer", "none", "-o", str(target))
    code, _, err = call("plan", f"{target}:build", *options)
    assert code == 2
    assert "take the place of the file that it is made from" in err
    assert target.read_text(encoding="utf-8") == text


def test_results_are_refused_before_the_work(
    plan_file: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that cannot be written, one of two results, and one of a file that is read."""

    def worked(*_: object) -> None:
        raise AssertionError("it began to work")

    monkeypatch.setattr("pdcompile.workload.load_target", worked)
    monkeypatch.setattr("pdcompile.cli.options.load_target", worked)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("kept", encoding="utf-8")
    target = "target.py:build"
    taken = "take the place of the file that it is made from, or of another result"
    for words, said in (
        (("plan", target, "-o", f"{plan_file}/plan.json"), "cannot write the file"),
        (("plan", target, "-o", str(tmp_path)), "cannot write the file: Is a directory"),
        (("plan", target, "--cluster", str(cluster), "-o", str(cluster)), taken),
        (("plan", target, "--optimizer", f"{cluster}:sgd", "-o", str(cluster)), taken),
        (("run", target, "--trace", f"{plan_file}/t.json"), "cannot write the file"),
        (("run", target, "--plan", str(plan_file), "--trace", str(plan_file)), taken),
        (("run", target, "--save", str(plan_file)), "cannot write the file"),
        (("dump", target, "-o", f"{plan_file}/stages"), "cannot write the file"),
        (("simulate", str(plan_file), *("--html", "one", "--trace", "./one")), taken),
    ):
        code, _, err = call(*words)
        assert (code, said in " ".join(err.split())) == (2, True), (words, err)
    assert cluster.read_text(encoding="utf-8") == "kept"
    assert not Path("one").exists()


def test_places_of_results_are_tried_without_a_trace(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that name no file are none; folders are made with the result, and links are kept."""
    monkeypatch.chdir(tmp_path)
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "beyond" / "plan.json")
    for words in (
        ("--cluster", "1x2", "-o", "1x2"),
        ("--microbatches", "4", "-o", "4"),
        ("-o", "new/folder/plan.json"),
        ("-o", "link.json"),
    ):
        code, _, err = call("plan", "nothing.py:build", *words)
        assert (code, "nothing.py" in err, "take the place" in err) == (2, True, False), err
    assert [*tmp_path.iterdir()] == [link]
    assert link.is_symlink()


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_simulate_leaves_its_plan_as_it_is(plan_file: Path, call: Call, option: str) -> None:
    before = plan_file.read_bytes()
    other = plan_file.parent / "beside" / ".." / plan_file.name  # the same file by another path
    other.parents[1].mkdir()
    code, _, err = call("simulate", str(plan_file), option, str(other))
    assert code == 2
    assert "take the place of the file that it is made from" in err
    assert plan_file.read_bytes() == before


def test_times_are_taken_with_the_threads_of_a_run(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: Flags) -> None:
        seen.append(os.environ.get("OMP_NUM_THREADS"))

    seen: list[str | None] = []
    monkeypatch.setattr(Flags, "check", check)  # which imports torch
    for given, expected in ((None, "1"), ("3", "3")):
        if given is None:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        call("plan", "nothing.py:build")
        assert os.environ["OMP_NUM_THREADS"] == expected == seen.pop()


def test_steps_are_timed_when_the_pipeline_is_full() -> None:
    assert step_seconds([]) is None
    assert step_seconds([9.0, 11.0, 12.0]) is None
    assert step_seconds([9.0, 11.0, 12.0, 13.0]) == 1.0
    assert step_seconds([9.0, 11.0, 12.0, 13.0, 17.0]) == 2.0


def test_json_of_a_plan_has_its_certificate(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = SimpleNamespace(summary="")
    result = SimpleNamespace(plan=plan(), proof=proof, verification=None)
    monkeypatch.setattr("pdcompile.cli.options.compiled", lambda *_, **__: (None, result))
    code, out, _ = call("plan", "model.py:build", "--json")
    document = json.loads(out)
    assert code == 0
    assert document.pop("plan") == json.loads(
        replace(plan(), command=("model.py:build",)).to_json()
    )
    certificate = plan().certificate
    assert document == {
        "status": certificate.status,
        "objective": certificate.objective_seconds,
        "bound": certificate.bound_seconds,
        "gap": certificate.gap,
        "seconds": certificate.seconds,
        "prover": certificate.prover,
        "scope": certificate.scope,
        "verification": None,  # switched off
    }
