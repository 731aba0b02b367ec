"""The zoo: real models, cut into stages, equal to eager to the last bit.

`python benchmarks/coverage.py` runs the same checks with more cuts, and writes
benchmarks/results/coverage.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdcompile.batch import example_call, output_leaves, resolve_batch
from pdcompile.passes.codegen import generate
from pdcompile.passes.trace import capture, trace
from pdcompile.passes.trace.comparison.step_values import same as equal
from tests.helpers.launch import processes
from tests.zoo import check as checking
from tests.zoo.case import BATCH, build
from tests.zoo.check import Report, check
from tests.zoo.isolate import apart
from tests.zoo.models import ENTRIES
from tests.zoo.random_cuts import random_cut
from tests.zoo.table import page, summary

ROOT = Path(__file__).parents[1]
PLAIN = ("unet", "gnmt", "vae")
FOREIGN = ("gpt2", "t5")


def checked(folder: Path, *arguments: str) -> dict[str, Report]:
    """Reports of the command, which forks a process for every model: no test may do that here,
    where torch's threads have been used."""
    file = folder / "reports.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/coverage.py", "--quick", *arguments, "--json", str(file)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    reports = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        del data["peers"]
        reports[data["name"]] = Report.from_dict(data)
    return reports


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [
        "unet",
        "gpt2",
        "message_passing",
        pytest.param("bloom", marks=pytest.mark.slow),
        pytest.param("t5", marks=pytest.mark.slow),
        pytest.param("gnmt", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:every microbatch")
def test_a_graph_as_a_module_is_the_model(name: str) -> None:
    if ENTRIES[name].missing:
        pytest.importorskip(ENTRIES[name].library)
    case = build(ENTRIES[name], 0.1)
    dims = 0 if case.batch_dims == 0 else None  # the example's shapes alone
    module = trace(case.model, case.inputs(0), batch_dims=dims).to_module()
    assert list(module.state_dict()) == list(case.model.state_dict())
    for training in (True, False):
        for step in range(2):
            found = []
            for run in (case.model.train(training), module.train(training)):
                torch.manual_seed(step)
                call = case.inputs(step)
                output = run(**call) if isinstance(call, dict) else run(*call)
                leaves = output_leaves(output)
                found.append((type(output), leaves, torch.get_rng_state()))
            (kind, leaves, after), (other, same, there) = found
            assert kind is other
            assert torch.equal(after, there)
            assert len(leaves) == len(same)
            assert all(equal(a, b) for a, b in zip(leaves, same, strict=True))


def test_the_list_has_what_was_promised() -> None:
    assert len(ENTRIES) >= 60
    assert sum("pippy" in entry.lists for entry in ENTRIES.values()) >= 19
    assert {"t5", "whisper", "mixtral", "detr", "llava", "mamba", "unet", "gnmt"} <= set(ENTRIES)


@pytest.mark.slow
def test_plain_models(tmp_path: Path) -> None:
    reports = checked(tmp_path, "--only", *PLAIN)
    assert {name: report.line() for name, report in reports.items() if not report.passed} == {}
    assert set(reports) == set(PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_models_of_libraries(name: str, tmp_path: Path) -> None:
    if ENTRIES[name].missing:
        pytest.skip(ENTRIES[name].missing)
    (report,) = checked(tmp_path, "--only", name).values()
    assert report.passed, report.line()


@pytest.mark.slow
def test_models_of_libraries_between_processes(tmp_path: Path) -> None:
    names = ("qwen3", "squeezebert")  # values and gradients that are no dense tensors at cuts
    if ENTRIES[names[0]].missing:
        pytest.skip(ENTRIES[names[0]].missing)
    script = f"""
        import sys
        from tests.zoo.distributed import main
        sys.exit(main({names!r}))
    """
    run = processes(script, 2, tmp_path)
    assert run.code == 0, run
    assert run.output.count(" tensors, exact") == 2 * len(names)


@pytest.mark.slow
def test_a_model_that_a_stage_changes_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> object:
        sources = generate(*arguments)  # type: ignore[arg-type]
        text = sources.files["stage_0.py"].replace("nn.Tanh()", "nn.Sigmoid()")
        return replace(sources, files={**sources.files, "stage_0.py": text})

    monkeypatch.setattr(checking.codegen, "generate", wrong)
    report = check(ENTRIES["gumbel"], thorough=False)
    assert report.result == "caught"
    assert "differs" in report.detail
    assert not report.passed


@pytest.mark.slow
def test_a_difference_that_verify_misses_is_called_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = checking.follow
    runs: list[object] = []

    def follow(runner: object, case: object) -> object:
        found = plain(runner, case)  # type: ignore[arg-type]
        runs.append(runner)
        if len(runs) > 1:  # the first is eager
            found.tensors["loss of step 1"].add_(1)  # type: ignore[union-attr]
        return found

    monkeypatch.setattr(checking, "follow", follow)
    report = check(ENTRIES["gumbel"], thorough=False)
    assert (report.result, report.failed_step) == ("silent", "run")
    assert report.detail.startswith("loss of step 1 differs by up to 1")


def test_a_refusal_is_told_from_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> object:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(checking.codegen, "generate", broken)
    report = check(ENTRIES["gumbel"], thorough=False)
    assert (report.result, report.detail) == ("crashed", "ZeroDivisionError: a bug")
    assert report.where.startswith("main/tests/test_zoo.py:") or "test_zoo.py:" in report.where


@pytest.mark.slow
def test_a_process_that_dies_is_reported(tmp_path: Path) -> None:
    script = (
        "import os, signal\n"
        "from tests.zoo.isolate import apart\n"
        "def work(send):\n"
        "    send('begun')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print(apart(work, 10, 8 << 30))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"(['begun'], 'the process ended with status {signal.SIGKILL}')"
    assert callable(apart)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shuffled", [False, True])
def test_random_cuts_are_feasible_and_differ(shuffled: bool) -> None:
    case = build(ENTRIES["unet"], 0.1)
    flat = example_call(case.model, case.inputs(0), case.target(0))
    found = capture(case.model, flat, resolve_batch(flat), case.loss_fn, microbatch_size=2)
    plans = [random_cut(found, 3, BATCH, 2, seed, shuffled=shuffled) for seed in range(5)]
    graph = found.train
    cuts = set()
    for plan in plans:
        assert plan is not None
        stage_of = {name: stage.index for stage in plan.stages for name in stage.ops}
        assert set(stage_of) == {op.name for op in graph.ops}
        for op in graph.ops:
            assert all(
                stage_of[name] <= stage_of[op.name] for name in op.inputs if name in stage_of
            )
        assert stage_of[graph.loss or ""] == 2
        cuts.add(tuple(stage.ops for stage in plan.stages))
    assert len(cuts) == 5


def test_the_page_shows_results_and_peers() -> None:
    passed = Report("gpt2", "text decoder", train_ops=90, eval_ops=80)
    kept = Report("t5", "encoder-decoder", train_ops=90, opaque=("decoder",), opaque_flops=0.5)
    failed = Report("vae", "plain vision", "refused", failed_step="capture", detail="a | b")
    peers = {"gpt2": {"torch.export": ("refused", "why")}, "vae": {"torch.export": ("wrong", "")}}
    text = page([passed, kept, failed], peers, quick=True)
    assert "| gpt2 | exact | 90 / 80 |  |  | refused |  |" in text
    assert "| t5 | too much opaque | 90 / 0 | 50% of FLOPs, 0% of parameters |" in text
    assert "capture: a \\| b" in text
    assert "1 of 3 models pass (33.3%): 1 exact, 1 too much opaque, 1 refused" in text
    assert "torch.export: 0 exact, 1 wrong, 1 refused of 2" in summary([passed], peers)
