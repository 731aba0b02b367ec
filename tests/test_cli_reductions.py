"""A loss reduction that is a function, from planning to dumping: plans do not hold it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcompile.plan import Plan
from tests.helpers.alike import Call

TARGET = """
import torch
from torch import nn
from pdcompile import Workload

def count(args, kwargs, target):
    return (target >= 0).sum()

def loss(output, target):
    return nn.functional.cross_entropy(output, target, ignore_index=-1)

def build(depth=3, **more):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
    x, y = torch.randn(8, 8), torch.randint(0, 8, (8,))
    return Workload(model, x, loss, example_target=y, **more)

def counted():
    return build(loss_reduction=count)

def other():
    return build(5)

def smaller():
    return build(2)
"""


def test_it_is_asked_for_only_where_nothing_tells_it(tmp_path: Path, call: Call) -> None:
    file, plan, stages = tmp_path / "reduced.py", tmp_path / "plan.json", tmp_path / "stages"
    file.write_text(TARGET, encoding="utf-8")
    others = tmp_path / "elsewhere.py"
    others.write_text(TARGET, encoding="utf-8")
    flags = ("--cluster", "local:2", "--costs", "estimated", "-o", str(plan))
    dump = ("--plan", str(plan), "-o", str(stages))

    # The target has it: nobody names it again.
    code, _, err = call("plan", f"{file}:counted", *flags)
    assert code == 0, err
    assert Plan.load(plan).training.loss_reduction == "callable"
    assert call("dump", f"{file}:counted", *dump)[0] == 0
    code, _, err = call("dump", f"{file}:build", *dump)
    assert code == 2
    assert "--loss-reduction FILE:FUNCTION" in err

    # The command named it: the plan's own file is run again anyway, another one is not.
    for place in (file, others):
        code, _, err = call("plan", f"{file}:build", *flags, "--loss-reduction", f"{place}:count")
        assert code == 0, err
        code, _, err = call("dump", f"{file}:build", *dump)
        assert (code == 0) == (place == file), err
    assert f"--loss-reduction{others}:count" in "".join(err.split())

    # A plan of another model is called that.
    code, _, err = call("dump", f"{file}:smaller", *dump)
    assert code == 2
    assert "the plan is of another model" in err
    assert "the parameter '2.bias' on stage 1 is only in the plan" in " ".join(err.split())


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_targets_training_is_that_of_its_plans(schedule: str, tmp_path: Path, call: Call) -> None:
    file, plan = tmp_path / "clipped.py", tmp_path / "plan.json"
    source = TARGET.replace("return build(5)", "return build(max_grad_norm=0.5, seed=3)")
    file.write_text(source, encoding="utf-8")
    flags = ("--cluster", "local:2", "--costs", "estimated", "--schedule", schedule)
    code, _, err = call("plan", f"{file}:other", *flags, "--seed", "4", "-o", str(plan))
    assert code == 0, err
    training = Plan.load(plan).training
    assert (training.max_grad_norm, training.seed) == (0.5, 4)
