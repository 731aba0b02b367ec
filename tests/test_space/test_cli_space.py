"""`pdcompile plan` with replicas, recomputation, schedule and microbatches left open."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import pdcompile
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import SizeRange
from pdcompile.options import Options
from pdcompile.options.configuration import capture_size, configure, search_space
from pdcompile.plan import Plan
from pdcompile.workload import load_target
from tests.helpers.alike import WORKLOAD, Call

OPEN = ("--replicas", "any", "--recompute", "auto", "--schedule", "auto", "--max-staleness", "1")


def test_plan_simulate_and_run(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "plan.json"
    common = ("--cluster", "2x2", "--costs", "estimated", "-o", str(file))
    code, out, err = call("plan", WORKLOAD, *OPEN, *common, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["status"] in ("optimal", "feasible")
    plan = Plan.from_json(file.read_text())
    used = {rank for stage in document["plan"]["stages"] for rank in stage["ranks"]}
    assert plan.num_ranks == len(used)
    assert "replicas any" in plan.certificate.scope
    code, out, err = call("simulate", str(file), "--json")
    assert code == 0, err
    assert json.loads(out)["forecast"]["step_seconds"] > 0

    code, _, err = call("plan", WORKLOAD, "--replicas", "equal", "--stages", "1", *common, "--json")
    assert code == 0, err
    assert Plan.from_json(file.read_text()).stages[0].replicas > 1
    code, out, err = call("explain", str(file))
    assert code == 0, err
    code, out, err = call("run", WORKLOAD, "--plan", str(file), "--steps", "1")
    assert code == 0, err
    assert "loss" in out


def test_auto_means_the_same_to_compile_and_to_the_command_line(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "plan.json"
    flags = ("--cluster", "2", "--stages", "2", "--costs", "estimated", "-o", str(file))
    auto = ("--schedule", "auto", "--max-staleness", "1")
    code, _, err = call("plan", WORKLOAD, *auto, *flags)
    assert code == 0, err
    workload = load_target(WORKLOAD)
    with pdcompile.compile(
        workload.model,
        workload.example_inputs,
        example_target=next(iter(workload.batches()))[1],
        loss_fn=workload.loss_fn,
        cluster="2",
        stages=2,
        schedule="auto",
        max_staleness=1,
        costs="estimated",
    ) as pipe:
        told, ours = Plan.from_json(file.read_text()), pipe.plan
    assert ours.training.schedule == told.training.schedule == "2bw"
    assert ours.training.num_microbatches == told.training.num_microbatches
    assert ours.training.warmup == told.training.warmup
    assert ours.certificate.scope == told.certificate.scope
    assert [stage.ops for stage in ours.stages] == [stage.ops for stage in told.stages]


@pytest.mark.slow
def test_everything_open_means_the_same_to_compile_and_to_the_command_line(
    tmp_path: Path, call: Call
) -> None:
    file = tmp_path / "plan.json"
    # Else compile keeps what the command line leaves out for its size: stages are in one process.
    flags = ("--cluster", "2x2", "--costs", "estimated", "--memory", "1 GB", "-o", str(file))
    flags += ("--outputs", "last")
    auto = ("--schedule", "auto", "--replicas", "any", "--recompute", "auto")
    code, _, err = call("plan", WORKLOAD, *auto, *flags)
    assert code == 0, err
    told = re.findall(
        r"^compiling: plan after \S+ s: (.*) a step, gap (.*) %: (.*)$", err, re.MULTILINE
    )
    assert told
    workload = load_target(WORKLOAD)
    with pdcompile.compile(
        workload.model,
        workload.example_inputs,
        example_target=next(iter(workload.batches()))[1],
        loss_fn=workload.loss_fn,
        cluster="2x2",
        schedule="auto",
        replicas="any",
        recompute="auto",
        outputs="last",
        memory="1 GB",
        costs="estimated",
    ) as pipe:
        ours = pipe.plan
    file_plan = Plan.from_json(file.read_text())
    assert ours.certificate.objective_seconds == file_plan.certificate.objective_seconds
    assert ours.certificate.bound_seconds == file_plan.certificate.bound_seconds
    assert ours.certificate.scope == file_plan.certificate.scope
    assert ours.stages == file_plan.stages
    assert ours.training == file_plan.training
    assert f"{ours.training.num_microbatches} microbatches" in told[-1][-1]


def test_a_plan_of_stages_that_recompute_runs_and_is_explained(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "plan.json"
    flags = ("--cluster", "local:2", "--costs", "estimated", "--recompute", "1,0")
    code, _, err = call("plan", WORKLOAD, *flags, "-o", str(file))
    assert code == 0, err
    plan = Plan.from_json(file.read_text())
    assert [stage.recompute for stage in plan.stages] == [True, False]
    assert "recomputation on stages 0" in plan.certificate.scope
    code, out, _ = call("explain", str(file))
    assert code == 0
    assert "recomputes" in out
    losses = []
    for given in (("--plan", str(file)), (*flags[:4], "--recompute", "off")):
        code, out, err = call("run", WORKLOAD, *given, "--steps", "2", "--every", "1", "--json")
        assert code == 0, err
        losses.append(json.loads(out)["losses"])
    assert losses[0] == losses[1]
    code, _, err = call("run", WORKLOAD, "--plan", str(file), "--recompute", "on")
    assert code == 2
    assert "the plan has recompute=(True, False)" in " ".join(err.split())
    code, _, err = call("run", WORKLOAD, *flags[:4], "--recompute", "1,0,1")
    assert code == 2
    assert "recompute=(True, False, True) has 3" in " ".join(err.split())


ON_TWO = (
    "on a cluster of 2 devices remedy: give stages=2 or a cluster of 4 devices: one stage a "
    "device; 2 stages on each run"
)
SEVERAL = "gpipe or interleaved or zb-v"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--replicas", "2,0"), "--replicas 2,0 is not a valid value"),
        (("--recompute", "some"), "--recompute some is not a valid value"),
        (("--microbatches", "2,x"), "--microbatches 2,x is not a valid value"),
        (("--microbatches", "2,9"), "9 microbatches of a minibatch of 8"),
        (("--warmup", "-1"), "--warmup -1 is not a valid value"),
        (("--max-staleness", "2"), "--max-staleness 2 is not a valid value"),
        (("--schedule", "auto", "--stages", "4"), f"4 stages {ON_TWO} under schedule {SEVERAL}"),
        (
            ("--schedule", "gpipe", "--stages", "4", "--replicas", "any"),
            f"4 stages {ON_TWO} under schedule {SEVERAL}, with replicas='equal'",
        ),
        (
            ("--stages", "1", "--replicas", "3"),
            "1 stages on 3 ranks on a cluster of 2 devices remedy: give a cluster of 3 devices, or "
            "replicas=2 (--replicas 2)",
        ),
    ],
)
def test_wishes_that_cannot_be(flags: tuple[str, ...], message: str, call: Call) -> None:
    code, _, err = call("plan", WORKLOAD, "--cluster", "2", "--costs", "estimated", *flags)
    assert code == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize("more", [("--schedule", "gpipe"), ("--replicas", "equal")])
def test_several_stages_a_rank_are_planned_as_the_remedy_says(
    more: tuple[str, ...], call: Call
) -> None:
    flags = ("--stages", "4", "--schedule", "gpipe", "--cluster", "2", "--costs", "estimated")
    code, _, err = call("plan", WORKLOAD, *flags, *more)
    assert code == 0, err


@pytest.mark.parametrize("counts", [(4, 8), (8, 4)])
def test_sizes_of_another_graph_are_planned_apart(counts: tuple[int, ...]) -> None:
    """The remedy names what was not given, whatever comes first."""
    options = Options(
        schedule="auto", replicas="1", microbatch_counts=counts, microbatches=counts[0], stages=2,
        costs="estimated",
    )  # fmt: skip
    chosen = configure(options, batch_size=8, splits=True, num_ranks=None)
    assert capture_size(options, chosen) == 2
    with pytest.raises(ConfigError, match="8 microbatches of 8 samples have 1 sample each") as told:
        search_space(options, chosen, SizeRange(2, None, "expand where a batch of 1 runs getitem"))
    assert "plan apart: --microbatches 4, and --microbatches 8" in str(told.value)
    assert "expand where a batch of 1" in str(told.value)
    assert search_space(options, chosen, SizeRange()).microbatches == counts
