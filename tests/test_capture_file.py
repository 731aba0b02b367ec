"""The capture beside a plan: dump and export read it, whatever trains or compares does not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdcompile import driver
from pdcompile.batch import example_call, resolve_batch
from pdcompile.files import capture_beside
from pdcompile.ir import graph_json
from pdcompile.ir.graph import Capture
from pdcompile.passes.stages.capture_file import read_capture
from pdcompile.passes.trace.subject import CaptureCall
from pdcompile.plan import Plan
from pdcompile.workload import Workload, load_target
from tests.helpers.alike import Call
from tests.helpers.exported import export

MODEL = """
import functools, torch, torch.nn as nn, torch.nn.functional as F, pdcompile
CONFIG = {"repeats": 1, "width": 8}
TABLE = torch.ones(4)

@functools.lru_cache
def repeats():
    return CONFIG["repeats"]

class Net(nn.Module):
    def __init__(self, by_table):
        super().__init__()
        self.a = nn.Linear(CONFIG["width"], CONFIG["width"])
        self.drop = nn.Dropout(0.5)
        self.b = nn.Linear(CONFIG["width"], 4)
        self.by_table = by_table

    def forward(self, x):
        for _ in range(repeats()):
            x = torch.tanh(self.a(x))
        y = self.b(self.drop(x))
        return y * TABLE if self.by_table else y

def fill(name, tensor):
    tensor.fill_(0.1)

def made(model, width):
    batch = (torch.ones(8, width), torch.zeros(8, 4))
    return pdcompile.Workload(model, batch[0], F.mse_loss, lambda: iter([batch] * 5),
        fill if model.a.weight.is_meta else None)

def build():
    return made(Net(False), CONFIG["width"])

def by_table():
    return made(Net(True), CONFIG["width"])

def on_meta():
    with torch.device("meta"):
        model = Net(False)
    return made(model, CONFIG["width"])
"""
LOCAL = ("--cluster", "local:2", "--costs", "estimated")


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    """A model's file, of which this process keeps nothing."""
    path = tmp_path / "captured_model.py"
    path.write_text(MODEL, encoding="utf-8")
    before = list(sys.path)
    yield f"{path}:build"
    sys.path[:] = before
    sys.modules.pop("captured_model", None)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that were captured."""
    seen: list[Any] = []
    own = driver.capture

    def noted(model: Any, *rest: Any, **named: Any) -> Capture:
        seen.append(model)
        return own(model, *rest, **named)

    monkeypatch.setattr("pdcompile.driver.capture", noted)
    return seen


def text_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}


def test_who_reads_it(tmp_path: Path, target: str, captures: list[Any], call: Call) -> None:
    plan, folder = tmp_path / "plan.json", tmp_path / "stages"
    assert call("plan", target, *LOCAL, "-o", str(plan))[0] == 0
    beside = capture_beside(plan)
    assert beside.name == "plan.capture.json"
    given = ("--plan", str(plan))
    captures.clear()

    code, _, err = call("dump", target, *given, "-o", str(folder))
    assert (code, captures) == (0, [])
    assert f"the ops are those of {beside}" in err
    assert "not compared with the model" in err
    export(plan, target, tmp_path / "exported")
    assert captures == []

    assert call("verify", target, "--sources", str(folder))[0] == 0  # the texts are equal too
    assert call("run", target, *given, "--steps", "1")[0] == 0
    assert len(captures) == 2

    beside.unlink()
    code, _, err = call("dump", target, *given, "-o", str(tmp_path / "anew"))
    assert (code, len(captures)) == (0, 3)
    assert f"captured again: there is no {beside} beside the plan" in err
    assert text_of(tmp_path / "anew") == text_of(folder)


def test_a_dumped_folder_has_its_capture(
    tmp_path: Path, target: str, captures: list[Any], call: Call
) -> None:
    folder = tmp_path / "stages"
    assert call("dump", target, *LOCAL, "-o", str(folder))[0] == 0
    captures.clear()
    given = ("--plan", str(folder / "plan.json"))
    assert call("dump", target, *given, "-o", str(tmp_path / "again"))[0] == 0
    export(folder / "plan.json", target, tmp_path / "exported")
    assert captures == []
    assert text_of(tmp_path / "again") == text_of(folder)


def test_a_model_without_values_is_trained_as_it_is_now(
    tmp_path: Path, target: str, call: Call
) -> None:
    """`verify` cannot compare stages with a model on meta: an older capture would be trained."""
    module = load_target(target).model.__module__
    target = target.replace(":build", ":on_meta")
    run = ("run", target, *LOCAL, "--steps", "1", "--json")
    losses = []
    plan = str(tmp_path / "plan.json")
    for repeats in (1, 9):
        sys.modules[module].CONFIG["repeats"] = repeats
        sys.modules[module].repeats.cache_clear()
        if repeats == 1:
            assert call("plan", target, *LOCAL, "-o", plan)[0] == 0
        code, out, err = call(*run)
        assert code == 0, err
        losses.append(json.loads(out)["losses"])
    assert losses[0] != losses[1]
    code, _, err = call(*run, "--plan", plan)
    assert code == 2
    assert "the plan is of another model" in err


def read(plan: Path, workload: Workload, target: str) -> Capture | str:
    made = Plan.load(plan)
    flat = example_call(workload.model, *workload.example())
    size = made.training.batch_size // made.training.num_microbatches
    layout = resolve_batch(flat, 0)
    call = CaptureCall(workload.model, flat, layout, None, size)
    return read_capture(capture_beside(plan), made, call, target)


def test_what_is_no_longer_of_the_model_is_captured_again(
    tmp_path: Path, target: str, call: Call
) -> None:
    plan = tmp_path / "plan.json"
    beside = capture_beside(plan)
    assert call("plan", target, *LOCAL, "-o", str(plan))[0] == 0
    whole = json.loads(beside.read_text(encoding="utf-8"))
    workload = load_target(target)
    found = read(plan, workload, target)
    assert isinstance(found, Capture)
    assert found.train.origin.model() is workload.model
    assert not found.eval.training

    def told(change: Any) -> str:
        beside.write_text(change if isinstance(change, str) else json.dumps(change), "utf-8")
        said = read(plan, workload, target)
        assert isinstance(said, str)
        return said

    for damaged in ("", "{", "[]", {**whole, "train": 3}, {**whole, "eval": {}}, {"schema": ""}):
        assert f"{beside} cannot be read" in told(damaged)
    assert "is of pdcompile 0" in told({**whole, "made_with": "pdcompile 0, torch 1"})
    assert "was changed since" in told(json.dumps(whole).replace("torch.tanh", "torch.sin"))
    graph = found.train
    ops = tuple(replace(op, target=op.target.replace("tanh", "sin")) for op in graph.ops)
    for changed, said in (
        (replace(graph, ops=ops), "is of another plan"),
        (replace(graph, batch_size=3), "microbatches of 3 samples"),
    ):
        assert said in told({**whole, "train": graph_json.to_record(changed)})

    beside.write_text(json.dumps(whole), "utf-8")
    assert isinstance(read(plan, workload, target), Capture)
    module = sys.modules[workload.model.__module__]
    module.CONFIG["width"] = 16
    assert "has another" in str(read(plan, module.build(), target))
    del module.CONFIG["width"]
    file = Path(target.partition(":")[0])
    assert f"is of {target}" in str(read(plan, workload, target.replace("build", "by_table")))
    before = file.stat()
    file.write_text(MODEL.replace("0.5", "0.1"), encoding="utf-8")
    os.utime(file, (before.st_atime, before.st_mtime))  # as copies and archives keep it
    assert f"{file} was changed since" in str(read(plan, workload, target))


def test_a_tensor_that_is_no_buffer_is_not_written(tmp_path: Path, target: str, call: Call) -> None:
    plan = tmp_path / "plan.json"
    capture_beside(plan).write_text("of an earlier plan", encoding="utf-8")
    code, _, err = call("plan", target.replace(":build", ":by_table"), *LOCAL, "-o", str(plan))
    assert code == 0
    assert "the capture is not kept beside the plan: forward uses a tensor" in err
    assert not capture_beside(plan).exists()
