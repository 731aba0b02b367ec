"""Models on the meta device: planned from shapes alone; no numbers are compared, which is said."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdcompile import load_target
from pdcompile.batch import example_call, resolve_batch
from pdcompile.cli import main
from pdcompile.eager.meta import refuse_mostly_estimated, without_values
from pdcompile.errors import CostError
from pdcompile.passes.trace import capture
from tests.helpers import models
from tests.helpers.costed import profile

LLAMA = Path(__file__).parent.parent / "examples" / "llama.py"
TWO_LAYERS = f"{Path(__file__).parent / 'helpers' / 'few_layers.py'}:build"


def test_the_example_has_the_published_sizes() -> None:
    for name, billions in (("8b", 8.0), ("70b", 70.6), ("405b", 405.9)):
        model = load_target(f"{LLAMA}:build_{name}").model
        assert all(parameter.is_meta for parameter in model.parameters())
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count / 1e9 == pytest.approx(billions, abs=0.1)


@pytest.mark.slow
def test_a_plan_from_shapes_alone_says_what_was_not_verified(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", f"{LLAMA}:build_tiny", "--cluster", "1x2", "--costs", "estimated",
              "--time-limit", "0", "--json"])  # fmt: skip
    assert not stop.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["verification"]["rows"] == []
    assert found["verification"]["ops"] > 100
    assert re.search(r"all \d+ parameters and buffers", found["verification"]["unverified"])
    assert len(found["plan"]["stages"]) == 2
    assert all(stage["parameter_bytes"] > 0 for stage in found["plan"]["stages"])


@pytest.mark.parametrize("verb", [pytest.param("plan", marks=pytest.mark.slow), "verify"])
def test_it_is_said_that_ops_and_no_numbers_were_compared(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, TWO_LAYERS, "--cluster", "1x2", "--costs", "estimated",
              "--time-limit", "0"])  # fmt: skip
    assert not stop.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert "the stages have the ops of the model, no numbers were compared (" in said
    assert "are on the meta device and have no values)" in said


def test_what_can_be_compared_has_no_such_reason() -> None:
    assert without_values(models.mlp()) == ""


def test_a_model_with_some_memory_is_named_by_what_has_none() -> None:
    model = models.mlp()
    model.layers[0].to("meta")
    assert re.match(r"2 of \d+ parameters and buffers \(layers\.0\.weight", without_values(model))


def test_measured_costs_of_what_is_too_large_are_refused_with_the_remedy() -> None:
    workload = load_target(TWO_LAYERS)
    flat = example_call(workload.model, workload.example_inputs)
    graph = capture(workload.model, flat, resolve_batch(flat, 0), None).train
    guessed = profile(graph, workload.model, microbatch_size=8, costs="estimated")
    with pytest.raises(CostError, match="100% of the time, are too large") as caught:
        refuse_mostly_estimated(guessed, workload.model)
    assert "--costs estimated" in (caught.value.remedy or "")
    assert "llama.py:" in (caught.value.where or "")
    measured = profile(graph, workload.model, microbatch_size=8)
    refuse_mostly_estimated(measured, workload.model)
    refuse_mostly_estimated(guessed, workload.model.to_empty(device="cpu"))


@pytest.mark.slow
def test_70_billion_parameters_are_planned_in_little_memory() -> None:
    command = [
        sys.executable, "-m", "pdcompile", "plan", f"{LLAMA}:build_70b", "--cluster", "4x8",
        "--costs", "estimated", "--time-limit", "5", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit  # of any child so far
    plan = json.loads(done.stdout)["plan"]
    assert len(plan["stages"]) == 32
    assert sum(stage["parameter_bytes"] for stage in plan["stages"]) == pytest.approx(
        141e9, rel=0.01
    )
    assert resident < 2 << 30


def test_nothing_of_the_example_is_random() -> None:
    before = torch.random.get_rng_state()
    load_target(f"{LLAMA}:build_tiny")
    assert torch.equal(before, torch.random.get_rng_state())
