"""``pdcompile run``: a target that prints, an op that cannot take a minibatch, an optimizer of a
function."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdcompile.errors import ConfigError, InputError
from pdcompile.options.texts import optimizer_of
from pdcompile.runtime.failure.first_cause import raised_by_op
from tests.helpers.alike import Call

TARGET = """
import torch

import pdcompile

def build():
    torch.manual_seed(0)
    print("made the model")
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))

    def batches():
        for i in range(4):
            tokens = torch.randint(0, 50, (4, 3))
            if i == 2:
                tokens[1, 1] = 50  # one too many
            yield tokens, torch.zeros(4, 3, dtype=torch.long)

    def loss_fn(output, target):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    return pdcompile.Workload(model, torch.zeros(4, 3, dtype=torch.long), loss_fn, batches)

def raising(params):
    raise KeyError("no such group")

def groups(params):
    kinds = [[p for n, p in params.named if n.endswith(end)] for end in ("weight", "bias")]
    return torch.optim.SGD([{"params": one} for one in kinds if one], lr=0.5)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "target.py"
    path.write_text(TARGET)
    return f"{path}:build"


def trained(call: Call, target: str, *options: str) -> tuple[int, str, str]:
    given = ("--cluster", "local:2", "--costs", "estimated", *options)
    return call("run", target, *given)


def test_json_is_alone_where_the_target_prints(target: str, call: Call) -> None:
    code, out, err = trained(call, target, "--steps", "2", "--json")
    assert code == 0
    assert json.loads(out)["status"] == "done"
    assert "made the model" in err
    assert "made the model" in trained(call, target, "--steps", "1")[1]


def test_an_op_that_cannot_take_a_minibatch_is_an_error_with_its_place(
    target: str, call: Call
) -> None:
    code, out, err = trained(call, target, "--steps", "4", "--json")
    assert code == 2
    found = json.loads(out)["error"]
    assert found["kind"] == "InputError"
    assert found["message"] == "an op raised IndexError: index out of range in self"
    place = r"rank 0, stage 0, forward of minibatch 2, microbatch 1, stage_0.py:"
    assert found["where"].startswith(place)
    assert "Traceback" not in err


class OfUser(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch.zeros(2)[torch.tensor(3)]", "an op raised IndexError: index 3 is out of bounds"),
        ("mine.apply(torch.zeros(1))", None),  # its traceback says where
        ("out_of_memory()", None),
    ],
)
def test_errors_of_the_users_own_python_keep_their_traceback(
    line: str, expected: str | None
) -> None:
    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("full")

    names = {"torch": torch, "mine": OfUser, "out_of_memory": out_of_memory}
    with pytest.raises(Exception, match=r".") as caught:
        exec(compile(line, "<pdcompile_stages_1_stage_1.py>", "exec"), names)
    found = raised_by_op(caught.value)
    assert found is None if expected is None else str(found).startswith(expected)


def test_an_error_from_elsewhere_is_none_of_an_op() -> None:
    for file in ("train.py", "/home/stage_3/train.py", "stage_times.py", "stage_1.pyx"):
        with pytest.raises(ValueError, match="invalid literal") as caught:
            exec(compile("int('x')", file, "exec"))
        assert raised_by_op(caught.value) is None
    assert raised_by_op(InputError("known")) is None


def test_an_optimizer_of_a_function(target: str, call: Call) -> None:
    function = target.replace(":build", ":groups")
    losses = [
        json.loads(trained(call, target, "--steps", "2", "--json", *given)[1])["losses"]["1"]
        for given in (("--optimizer", function), ("--optimizer", "SGD", "--lr", "0.5"), ())
    ]
    assert losses[0] == losses[1] != losses[2]
    for name in (function, "none"):
        with pytest.raises(ConfigError, match=r"--lr 0\.1 would have no effect"):
            optimizer_of(name, 0.1)


@pytest.mark.parametrize("optimizer", ["muon", "raising"])
def test_an_optimizer_that_cannot_be_made(optimizer: str, target: str, call: Call) -> None:
    """Muon takes no bias; the user's own may raise anything."""
    name = optimizer if optimizer == "muon" else target.replace(":build", ":raising")
    code, _, err = trained(call, target, "--steps", "1", "--optimizer", name)
    assert code == 2
    said = {"muon": "ValueError: Muon only supports 2D", "raising": "KeyError: 'no such group'"}
    assert f"error: optimizer= raised: {said[optimizer]}" in " ".join(err.split())


def test_a_resumed_run_counts_its_own_steps(
    target: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--steps` counts those before it; the seconds are of those that ran now."""
    looks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(looks) / 1000)  # no slow machine's
    common = ("run", target, "--costs", "estimated", "--save", str(tmp_path / "saved"), "--resume")
    for steps in ("1", "2"):
        code, out, err = call(*common, "--steps", steps)
        assert code == 0, err
        assert re.search(r"\n1 step in .* s: [\d,]+ samples/s, [\d,]+ tokens/s\n", out)
    _, out, _ = call(*common, "--steps", "2")
    assert "the run was finished: 2 steps are done, as --steps says\n" in out


def test_a_target_without_a_loss_is_refused_before_anything_is_planned(
    tmp_path: Path, call: Call
) -> None:
    file = tmp_path / "pairs.py"
    file.write_text(PAIRS)
    code, _, err = call("run", f"{file}:build", "--steps", "1", "--cluster", "local:2")
    assert code == 2
    assert "a target was given, but there is no loss_fn to use it" in " ".join(err.split())
    assert "graph" not in err
    code, out, err = call("run", f"{file}:drawn", "--steps", "2", "--every", "1", "--json")
    assert code == 0, err
    torch.manual_seed(0)
    first = torch.randn(4, 8).square().mean()
    assert json.loads(out)["losses"]["0"] == pytest.approx(float(first))


PAIRS = """
import torch
from torch import nn

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
    def forward(self, x):
        return {"loss": (x * self.scale).square().mean()}

def build():
    return nn.Linear(8, 8), torch.ones(4, 8), None, lambda: [(torch.ones(4, 8), torch.ones(4, 8))]

def drawn():
    torch.manual_seed(0)
    return Whole(), torch.ones(4, 8), None, lambda: ((torch.randn(4, 8), None) for _ in range(2))
"""
