"""Plans for torch.distributed.pipelining: scripts that equal plain PyTorch, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdcompile import (
    Cluster,
    ConfigError,
    CutBefore,
    PlanError,
    SourceError,
    Workload,
    driver,
)
from pdcompile.eager.autocast import NO_CASTS
from pdcompile.passes.export.torch_pipelining import imported, unlike_torchs
from tests.helpers import exported, launch
from tests.helpers.alike import Call
from tests.helpers.exported import export, made

HERE = "tests.helpers.exported"


def trained(folder: Path, ranks: int, *changes: tuple[str, str]) -> launch.Run:
    """Runs train.py in forks, with some of its text changed."""
    text = (folder / "train.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "train.py").write_text(text, encoding="utf-8")
    script = f"""
        import os, runpy, sys
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
        sys.path.insert(0, {str(folder)!r})
        runpy.run_path({str(folder / "train.py")!r}, run_name="__main__")
    """
    work = folder / "run"
    work.mkdir(exist_ok=True)
    return launch.processes(script, ranks, work)


def test_cuts_may_lie_anywhere(tmp_path: Path) -> None:
    """Stages are source, of a module that a cut goes through too."""
    plan = exported.planned(exported.gpt(), 2, constraints=(CutBefore("blocks.0.up"),))
    export(plan, f"{HERE}:gpt", tmp_path)
    run = trained(tmp_path, 2)
    assert run.code == 0, run


def test_a_script_equals_plain_pytorch_bit_for_bit(tmp_path: Path) -> None:
    made("mlp", 2, tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    run = trained(tmp_path, 2)
    assert run.code == 0, run
    assert run.output.count("equal bit for bit") == 3  # gradients, weights, buffers
    assert {"train.py", "stage_0.py", "pipeline.py", "plan.json"} <= files


@pytest.mark.slow
def test_tied_weights_stay_tied_and_a_script_that_unties_them_fails(tmp_path: Path) -> None:
    done = made("gpt", 2, tmp_path)
    assert any("tied weight" in note for note in done)
    run = trained(tmp_path, 2)
    assert run.code == 0, run
    broken = trained(tmp_path, 2, ("        sum_tied(parts, groups)\n", ""))
    assert broken.code == 1, broken


def test_skip_connections_are_handed_on(tmp_path: Path) -> None:
    done = made("crossing", 3, tmp_path)
    assert any("hands value" in note for note in done)
    text = (tmp_path / "train.py").read_text(encoding="utf-8")
    assert "INPUTS = ['x']" in text
    assert "LATER = ['x', 'scale']" in text or "LATER = ['scale', 'x']" in text
    assert "MEAN_SCALE.weight" in text  # is tied, and keeps its name
    run = trained(tmp_path, 3)
    assert run.code == 0, run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("vgg", 3, {}),
        ("gpt", 2, {"schedule": "gpipe"}),
        ("gpt", 2, {"schedule": "interleaved", "cluster": "2"}),
        ("gpt", 2, {"schedule": "zb-v", "cluster": "2"}),
        ("gpt", 2, {"max_grad_norm": 0.1, "recompute": True}),
        ("mlp", 2, {"loss_reduction": "sum"}),
        ("mlp", 2, {"autocast": "bfloat16"}),
        ("layered", 2, {}),
        ("llama", 3, {}),
        ("t5", 3, {}),
        ("as_tuple", 2, {}),
    ],
)
def test_other_models_and_schedules(
    name: str, ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = exported.planned_for("mlp" if name == "as_tuple" else name, ranks, **options)
    export(plan, f"{HERE}:{name}", tmp_path)
    run = trained(tmp_path, ranks)
    assert run.code == 0, run
    assert run.output.endswith("equal\n")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "said"), [("a100-80", True), ("cpu", False)])
def test_a_script_for_gpus_that_would_cast_nothing_does_not_begin(
    kind: str, said: bool, tmp_path: Path
) -> None:
    cluster = Cluster.local(2, kind=kind)
    made("mlp", 2, tmp_path, cluster=cluster, autocast="bfloat16")
    run = trained(tmp_path, 2)
    assert (run.code == 1) == said, run
    assert (NO_CASTS in run.output) == said


def test_a_model_without_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = exported.planned(exported.mlp(), 2)

    def meta() -> Workload:
        workload = exported.mlp()
        return replace(workload, model=workload.model.to("meta"))

    monkeypatch.setattr(exported, "meta", meta, raising=False)
    with pytest.raises(ConfigError, match="on the meta device, and the script compares it"):
        export(plan, f"{HERE}:meta", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "vgg", "mlp"])
def test_scripts_run_under_torchrun(name: str, tmp_path: Path) -> None:
    """GPT-2 of Hugging Face, a VGG-like net and an MLP under torch's Schedule1F1B."""
    made(name, 2, tmp_path)
    text = (tmp_path / "train.py").read_text(encoding="utf-8")
    assert "schedule = Schedule1F1B(" in text
    run = launch.torchrun(text, 2, tmp_path)
    assert run.code == 0, run


@pytest.mark.slow
def test_modules_keep_their_mode_and_a_stage_may_have_no_parameters(tmp_path: Path) -> None:
    made("frozen", 2, tmp_path, constraints=(CutBefore("last"),))
    run = trained(tmp_path, 2)
    assert run.code == 0, run
    assert run.output.endswith("equal\n")


_LAST = "        optimizer.step()\n        if last in parts"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, ("        part.load_state_dict(own, strict=False)\n", "")),
        ({}, (_LAST, f"        next(iter(own)).grad.mul_(1.01)\n{_LAST}")),
        ({"autocast": "bfloat16"}, (_LAST, f"        next(iter(own)).grad = None\n{_LAST}")),
        ({"autocast": "bfloat16"}, (_LAST, f"        next(iter(own)).grad.mul_(1.05)\n{_LAST}")),
    ],
    ids=["weights", "a gradient", "none in bfloat16", "a gradient in bfloat16"],
)
def test_a_script_says_what_differs(
    options: dict[str, Any], change: tuple[str, str], tmp_path: Path
) -> None:
    """1 is the exit code."""
    made("mlp", 2, tmp_path, **options)
    run = trained(tmp_path, 2, change)
    assert run.code == 1, run
    assert "NOT EQUAL" in run.output


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "code"), [(5e-10, 0), (1e-4, 1)])
def test_adam_makes_no_difference_of_rounding(noise: float, code: int, tmp_path: Path) -> None:
    """Biases before batch norm have gradients around 1e-9, where others have 1e-2."""
    made("vgg", 2, tmp_path)
    more = f"        for p in own:\n            p.grad.add_({noise} * torch.randn_like(p.grad))\n"
    run = trained(tmp_path, 2, (_LAST, more + _LAST))
    assert run.code == code, run
    assert "gradients that are rounding: features.0.bias features.4.bias" in run.output


@pytest.mark.slow
def test_a_script_says_that_ranks_draw_weights_of_their_own(tmp_path: Path) -> None:
    made("unseeded", 2, tmp_path)
    run = trained(tmp_path, 2)
    assert run.code == 1
    assert (
        "ranks have different weights: each makes its own, so unseeded() has to seed" in run.output
    )
    assert "NOT EQUAL" not in run.output


def test_a_script_says_what_it_needs(tmp_path: Path) -> None:
    target = tmp_path / "target.py"
    target.write_text("from tests.helpers.exported import mlp\n", encoding="utf-8")
    folder = tmp_path / "out"
    plan = exported.planned(exported.mlp(), 2)
    export(plan, f"{target}:mlp", folder)
    script = f"""
        import os, runpy, sys
        sys.path.insert(0, {str(folder)!r})
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
        runpy.run_path({str(folder / "train.py")!r}, run_name="__main__")
    """
    alone = launch.processes(script, 1, tmp_path)
    assert (alone.code, alone.output) == (1, "start it with torchrun --nproc-per-node=2\n")
    target.unlink()
    run = trained(folder, 2)
    assert run.code == 1
    assert "target.py is missing: say at TARGET where the model is" in run.output


def test_a_file_as_target_is_found_from_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    found = imported(str(tmp_path / "train.py") + ":build", folder)
    assert found == "../../train.py:build"  # not the script of that name
    assert imported("package.module:build", folder) == "package.module:build"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "2bw"}, "torch has no schedule '2bw'"),
        ({"replicas": 2, "cluster": "4"}, "stage 0 has 2 replicas"),
        ({"microbatches": 3}, "8 samples in 3 microbatches"),
    ],
)
def test_plans_that_torch_cannot_run_are_refused(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    stages = 4 if "replicas" in options else 2
    with pytest.raises(ConfigError, match=said):
        made("mlp", stages, tmp_path, **options)
    assert not list(tmp_path.iterdir())


class Odd(nn.Module):
    """Takes its inputs in a container, or without samples, or draws more than dropout does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Any, scale: Any = None) -> Tensor:
        y = x[0] if self.how == "container" else x
        for block in self.blocks:
            y = torch.tanh(block(y))
        if self.how == "noise":
            y = y + torch.randn_like(y)
        if self.how == "buffers":
            y = self.norm(y)
        return y if scale is None else y * scale


def odd(how: str) -> Workload:
    torch.manual_seed(0)
    x: Any = torch.randn(8, 4)
    inputs = {"container": ([x, x],), "rows": (x, torch.rand(1, 4))}.get(how, (x,))
    target: Any = {"a": x} if how == "target" else x

    def loss_fn(output: Tensor, target: Any) -> Tensor:
        return (output - (target["a"] if how == "target" else target)).square().mean()

    return Workload(Odd(how), inputs, loss_fn, lambda: [(inputs, target)])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        ("container", {}, "input 'x\\[0\\]' is inside of a container"),
        ("target", {}, "is inside of a container"),
        ("rows", {}, "input 'scale' has no row for each sample"),
        ("noise", {}, "draws random numbers"),
        ("buffers", {"recompute": True}, "recomputes and writes buffer 'norm.num_batches_tracked'"),
    ],
)
def test_models_that_a_script_would_get_wrong_are_refused(
    how: str, options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported, "odd", lambda: odd(how), raising=False)
    plan = exported.planned(odd(how), 2, **options)
    with pytest.raises(ConfigError, match=said):
        export(plan, f"{HERE}:odd", tmp_path)
    assert not list(tmp_path.iterdir())


# The command


def test_a_script_that_was_edited_stays(tmp_path: Path) -> None:
    plan = exported.planned(exported.mlp(), 2)
    export(plan, f"{HERE}:mlp", tmp_path)
    with (tmp_path / "train.py").open("a", encoding="utf-8") as script:
        script.write("# mine\n")
    with pytest.raises(SourceError, match=r"train\.py is there already, and was edited"):
        export(plan, f"{HERE}:mlp", tmp_path)


def test_a_plan_is_made_where_none_is_given(tmp_path: Path, call: Call) -> None:
    words = ("--cluster", "local:2", "--microbatches", "4", "--costs", "estimated", "--torch")
    code, _, err = call("dump", f"{HERE}:mlp", *words, "-o", str(tmp_path / "out"))
    assert code == 0, err
    assert (tmp_path / "out" / "train.py").is_file()


def test_the_command_lists_what_it_writes(tmp_path: Path, call: Call) -> None:
    plan = exported.planned_for("mlp", 3)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    more = ("-o", str(tmp_path / "out"))
    words = ("dump", f"{HERE}:mlp", "--torch", "--plan", str(path), *more)
    code, out, err = call(*words)
    assert code == 0, err
    assert "train.py" in out
    code, out, _ = call(*words, "--json")
    found = json.loads(out)
    assert code == 0
    assert {"train.py", "stage_0.py"} <= {*found["lines"]}
    assert any("torchrun --nproc-per-node=3" in note for note in found["notes"])


def test_another_models_plan_is_not_blamed_on_the_size_of_its_minibatches(tmp_path: Path) -> None:
    plan = exported.planned(exported.mlp(), 2)
    other = replace(plan, training=replace(plan.training, batch_size=24))
    with pytest.raises(
        PlanError, match=r"another model: .* the parameter '.*' on stage \d+ is only in the plan"
    ):
        export(other, f"{HERE}:gpt", tmp_path / "out")


def test_what_a_plan_tells_is_refused_before_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def captures(*_: Any, **__: Any) -> Any:
        raise AssertionError("captured first")

    plan = exported.planned(exported.mlp(), 2)
    odd = replace(plan, training=replace(plan.training, num_microbatches=3))
    monkeypatch.setattr(driver, "build", captures)
    with pytest.raises(ConfigError, match="3 microbatches are not of one size"):
        export(odd, f"{HERE}:mlp", tmp_path)
    parts = replace(plan, training=replace(plan.training, parts=2, split="width"))
    assert any("stages of 2 parts" in message for message, _ in unlike_torchs(parts))


def test_the_file_of_another_models_plan_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(exported.planned(exported.mlp(), 2).to_json(), encoding="utf-8")
    with pytest.raises(PlanError, match="the plan is of another model") as caught:
        export(path, f"{HERE}:crossing", tmp_path / "out")
    assert caught.value.where == f"{path}: stages[0].parameters"
