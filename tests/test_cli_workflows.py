"""Verbs of the command line one after the other, on small models."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from pdcompile.cli.run import report
from tests.helpers.alike import Call


def test_a_loss_that_is_a_sum_or_a_mean_over_items(tmp_path: Path, call: Call) -> None:
    target = tmp_path / "counted.py"
    target.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def count(args, kwargs, target):\n"
        "    return (target != -100).sum()\n"
        "def build():\n"
        "    x, y = torch.randn(4, 8), torch.tensor([1, -100, -100, 2])\n"
        "    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))\n"
        "    return model, x, nn.functional.cross_entropy, lambda: [(x, y)]\n",
        encoding="utf-8",
    )
    flags = ("--cluster", "local:2", "--costs", "estimated", "--microbatches", "2", "--json")
    for given, kept in (("sum", "sum"), (f"{target}:count", "callable")):
        code, out, _ = call("plan", f"{target}:build", *flags, "--loss-reduction", given)
        assert code == 0
        assert json.loads(out)["plan"]["training"]["loss_reduction"] == kept
    code, _, err = call("plan", f"{target}:build", *flags, "--loss-reduction", f"{target}:counts")
    assert code == 2
    assert "no function 'counts'" in err


def test_constraints_reach_the_plan_and_explain(tmp_path: Path, call: Call) -> None:
    (tmp_path / "cli_cuts.py").write_text(SMALL, encoding="utf-8")
    target, plan_path = f"{tmp_path}/cli_cuts.py:build", str(tmp_path / "plan.json")
    flags = ("--cluster", "1x2", "--costs", "estimated", "-o", plan_path)
    assert call("plan", target, *flags, "--pin", "0=0", "--cut-at", "2", "--cut-at", "0")[0] == 0
    plan = json.loads(Path(plan_path).read_text(encoding="utf-8"))
    assert "constraints Pin('0', 0), CutAt('2', '0')" in plan["certificate"]["scope"]
    shown = call("explain", plan_path)[1].splitlines()
    *_, uncut, unpinned = (line.partition("#")[0] for line in shown)
    assert "--cut-at=2 --cut-at=0" in unpinned
    assert "--pin" not in unpinned
    assert "--pin=0=0" in uncut
    assert "--cut-at" not in uncut  # together they say where cuts may lie
    for wrong, place, remedy in (
        (("--cut-at", "blocks.*"), "CutAt('blocks.*')", "did you mean '0'"),
        (("--pin", "0"), "--pin", '--pin "h.0=1"'),
        (("--apart", "0,1", "--pin", "1=0"), "cannot hold", "leave out Apart('0', '1')"),
        (("--plan", plan_path, "--pin", "0=0"), "No such option", ""),
    ):
        code, _, err = call("plan", target, *flags[:-2], *wrong)
        assert code in (2, 3)
        assert place in err
        assert remedy in err
    for given, name in (("--pin", "0=0"), "constraints"), (("--cut-tolerance", "0.1"), "cut_tol"):
        code, _, err = call("dump", target, "--plan", plan_path, *given, "-o", str(tmp_path))
        assert code == 2
        assert name in err
        assert "would have no effect" in err


SMALL = """
import torch
def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    batch = (torch.ones(8, 4), torch.zeros(8, 4))
    return model, batch[0], torch.nn.functional.mse_loss, lambda: [batch]
"""


def test_plan_then_dump_then_verify_then_run(tmp_path: Path, call: Call) -> None:
    (tmp_path / "cli_small.py").write_text(SMALL, encoding="utf-8")
    target = f"{tmp_path}/cli_small.py:build"
    plan_path, folder = str(tmp_path / "plan.json"), str(tmp_path / "stages")
    made_with = ("--cluster", "1x2", "--seed", "5", "--max-grad-norm", "1", "--costs", "estimated")
    assert call("plan", target, *made_with, "-o", plan_path)[0] == 0
    # The plan file answers without the model.
    assert "crosses" in call("explain", plan_path)[1]
    found = json.loads(call("whatif", target, plan_path, "--devices", "3", "--json")[1])
    assert len(found["plan"]["stages"]) == 3
    # What the plan was made with need not be said again.
    assert call("dump", target, "--plan", plan_path, "-o", folder)[0] == 0
    code, out, _ = call("verify", target, "--sources", folder)
    assert (code, "bit for bit" in out) == (0, True)
    # What contradicts it is refused.
    code, _, err = call("dump", target, "--plan", plan_path, "--stages", "1", "-o", folder)
    assert code == 2
    assert "stages=2, but the options ask for 1" in err

    stage = next(file for file in Path(folder).glob("stage_*.py") if "nn.GELU" in file.read_text())
    text = stage.read_text(encoding="utf-8")
    stage.write_text(text.replace("nn.GELU", "nn.ReLU"), encoding="utf-8")
    code, _, err = call("verify", target, "--sources", folder)
    assert code == 2
    assert "is not what this plan and model generate" in err
    command = re.search(r"remedy: `pdcompile (.+?)`", " ".join(err.split()))
    assert command is not None, err
    code, out, _ = call(*shlex.split(command[1]), "--json")  # it works when copied
    assert code == 1
    assert json.loads(out)["differences"] > 0
    code, out, _ = call(
        "run", target, "--sources", folder, "--allow-edited", "--steps", "2", "--json"
    )
    assert (code, json.loads(out)["steps"]) == (0, 2)
    _, out, _ = call("run", target, "--sources", folder, "--allow-edited", "--steps", "1")
    assert f"edited ({stage.name}): the stages differ from eager in" in out


def test_a_schedule_by_its_name(tmp_path: Path, call: Call) -> None:
    """One that splits backward: planned, drawn with both parts, and run."""
    (tmp_path / "cli_split.py").write_text(SMALL, encoding="utf-8")
    target, plan_path = f"{tmp_path}/cli_split.py:build", str(tmp_path / "plan.json")
    options = ("--cluster", "1x2", "--schedule", "zb-h1", "--costs", "estimated")
    assert call("plan", target, *options, "-o", plan_path)[0] == 0
    trace, report = tmp_path / "trace.json", tmp_path / "report.html"
    code, out, _ = call("simulate", plan_path, "--trace", str(trace), "--html", str(report))
    assert code == 0
    names = {one["name"] for one in json.loads(trace.read_text())["traceEvents"]}
    assert {"F 0", "I 0", "W 0"} <= names
    assert "backward to weights" in report.read_text(encoding="utf-8")
    measured = tmp_path / "measured.json"
    code, out, _ = call(
        "run", target, "--plan", plan_path, "--steps", "4", "--json", "--trace", str(measured)
    )
    document = json.loads(out)
    assert (code, document["steps"], document["trace"]) == (0, 4, str(measured))
    code, out, _ = call("run", target, "--plan", plan_path, "--steps", "2")
    assert code == 0
    assert out.startswith("zb-h1: 2 stages on 2 ranks")
    assert "forecast" in out
    assert "certificate" in out
    assert document["step_seconds"] > 0
    assert document["forecast_step_seconds"] > 0
    names = {one["name"] for one in json.loads(measured.read_text())["traceEvents"]}
    assert {"F 0", "I 0", "W 0"} <= names
    code, out, _ = call("simulate", plan_path, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["critical_path"][0]["seconds"] > 0


def test_a_plan_without_a_loss_says_so(tmp_path: Path, call: Call) -> None:
    target = f"{tmp_path / 'lossless.py'}:build"
    (tmp_path / "lossless.py").write_text(
        "import torch, pdcompile\n"
        "def build():\n"
        "    return pdcompile.Workload(torch.nn.Linear(4, 4), torch.ones(8, 4))\n",
        encoding="utf-8",
    )
    flags = ("--cluster", "local:1", "--costs", "estimated")
    for more, said in (((), True), (("--schedule", "forward"), False)):
        code, out, err = call("plan", target, *flags, *more)
        assert code == 0, err
        assert ("there is no loss_fn, and the model returns no loss" in out) is said


def test_microbatches_that_a_schedule_has_not_are_refused_before_the_target_is_loaded(
    call: Call,
) -> None:
    code, _, err = call("plan", "nothing.py:build", "--schedule", "stash", "--microbatches", "4")
    assert code == 2
    assert "error: microbatches=4 under schedule='stash'" in err


def test_a_schedule_that_there_is_not_is_refused_before_the_target_is_loaded(
    tmp_path: Path, call: Call
) -> None:
    (tmp_path / "slow.py").write_text("raise AssertionError('loaded')\n", encoding="utf-8")
    code, _, err = call("plan", f"{tmp_path / 'slow.py'}:build", "--schedule", "zbh1")
    assert code == 2
    assert "did you mean 'zb-h1'" in err


@pytest.mark.parametrize(("ranks", "load", "said"), [
    (2, 3.5, "this host does other work too (load 3.5, 2 cores)"), (2, 2.9, ""),
    (3, 9.0, "3 ranks share 2 cores"),
])  # fmt: skip
def test_a_run_says_what_else_its_host_does(
    ranks: int, load: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {"losses": {}, "steps": 8, "seconds": 1.0, "step_seconds": 0.1,
                "forecast_step_seconds": 0.05}  # fmt: skip
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", str(ranks)),
        ("LOCAL_WORLD_SIZE", str(ranks)),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pdcompile.hardware.host.cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("pdcompile.cli.run.under_torchrun", lambda: True)
    notes = [str(one) for one in report(document, "80 samples/s").shown if "note: " in str(one)]
    assert said in "".join(notes)
    assert bool(notes) is bool(said)
