"""The examples learn what they claim to, and the README shows the file that runs."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdcompile import load_target
from tests.helpers.launch import Run, processes, torchrun
from tests.zoo.torchvision_path import reason

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "steps", "factor"),
    [
        ("mlp", 120, 0.5),
        ("convnet", 15, 0.8),
        pytest.param("unet", 25, 0.8, marks=pytest.mark.slow),
        pytest.param("gpt", 6, 0.9, marks=pytest.mark.slow),
    ],
)
def test_plain_pytorch_lowers_the_loss(name: str, steps: int, factor: float) -> None:
    workload = load_target(f"{EXAMPLES / name}.py:build")
    assert workload.loss_fn is not None
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-3)
    losses = []
    for inputs, target in itertools.islice(workload.stream(), steps):
        optimizer.zero_grad()
        loss = workload.loss_fn(workload.model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < factor * losses[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mlp", "convnet", "unet", "gpt"])
def test_examples_are_the_same_every_time(name: str) -> None:
    first, second = (load_target(f"{EXAMPLES / name}.py:build") for _ in range(2))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for (x, y), (u, v) in zip(
        itertools.islice(first.stream(), 2), itertools.islice(second.stream(), 2), strict=True
    ):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    assert torch.equal(first.example_inputs, next(first.stream())[0])


def test_gpt_ties_embedding_and_head_and_predicts_the_next_byte() -> None:
    workload = load_target(f"{EXAMPLES / 'gpt.py'}:build")
    parameters = dict(workload.model.named_parameters(remove_duplicate=False))
    assert parameters["head.weight"] is parameters["tokens.weight"]
    inputs, target = next(workload.stream())
    assert torch.equal(inputs[:, 1:], target[:, :-1])
    assert int(inputs.max()) < 256


def test_readme_shows_the_example_that_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n# examples/train.py\n(.*?)```", readme, re.DOTALL)
    code = (EXAMPLES / "train.py").read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    assert shown == code
    assert len([line for line in code.splitlines() if line.strip()]) <= 24


def run(*command: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lines"), [("train", 4), ("kimi", 5)])
def test_it_prints_the_same_losses_in_one_process_and_in_two(
    name: str, lines: int, tmp_path: Path
) -> None:
    alone = run(f"examples/{name}.py")
    assert len(alone.splitlines()) == lines
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run(*torchrun, "--redirects=3", f"--log-dir={tmp_path}", f"examples/{name}.py")
    logs = [file.read_text(encoding="utf-8") for file in tmp_path.rglob("stdout.log")]
    assert logs == [alone, alone]


def test_own_loop_ends_with_the_weights_of_a_plain_model(tmp_path: Path) -> None:
    script = f"import runpy; runpy.run_path({str(EXAMPLES / 'own_loop.py')!r}, run_name='__main__')"
    done = processes(script, 1, tmp_path)
    assert done.code == 0, done
    lines = done.output.splitlines()
    losses = [float(line.split()[3].rstrip(",")) for line in lines[:10]]
    assert losses[-1] < losses[0]
    assert [line.split(": ")[0] for line in lines[10:]] == ["evaluated", "plain PyTorch"]
    assert lines[10].split()[-1] == lines[11].split()[-1]


# Examples that run as they are, with an argument.
PROGRAMS = (
    "gnmt.py", "t5.py", "experts.py", "switch.py", "int8.py", "edited_stage.py",
    "finetune.py gpt2", "finetune.py llama", "vision.py resnet50", "vision.py vgg16",
)  # fmt: skip


def program(text: str, ranks: int, folder: Path) -> Run:
    name, *arguments = text.split()
    if name == "vision.py" and reason():
        pytest.skip(reason())
    script = f"import runpy, sys\nsys.argv = {[str(EXAMPLES / name), *arguments]}\n"
    if name == "vision.py":
        script += "from tests.zoo.torchvision_path import enable\nenable()\n"
    script += "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    done = (processes if ranks == 1 else torchrun)(script, ranks, folder)
    assert done.code == 0, done
    return done


def losses_of(done: Run) -> list[list[float]]:
    """The losses of each training, by what is printed in between."""
    parts = done.output.split("edited: ")
    return [[float(found) for found in re.findall(r": loss ([\d.]+)", part)] for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("text", PROGRAMS)
def test_programs_lower_the_loss(text: str, tmp_path: Path) -> None:
    found = losses_of(program(text, 1, tmp_path))
    for losses in found:
        assert len(losses) >= 3
        assert losses[-1] < 0.9 * losses[0]
    assert len(found) == 1 or found[0][1:] != found[1][1:]  # the edit is another function


@pytest.mark.slow  # test_forward compares bits of int8 as well
def test_int8_predicts_the_same_bits(tmp_path: Path) -> None:
    assert "equal to the last bit: True" in program("int8.py", 1, tmp_path).output


@pytest.mark.slow
@pytest.mark.parametrize("text", PROGRAMS)
def test_programs_print_the_same_losses_on_two_ranks(text: str, tmp_path: Path) -> None:
    alone, both = (program(text, ranks, tmp_path) for ranks in (1, 2))
    assert losses_of(both) == losses_of(alone)


@pytest.mark.slow
def test_demo_passes(tmp_path: Path) -> None:
    out = run("examples/demo.py", "--steps", "3", "--out", str(tmp_path))
    assert "PASS" in out
    assert "FAIL" not in out
    assert out.count("equal, bit for bit") == 2
    for schedule in ("1f1b", "2bw"):
        assert {"stage_0.py", "stage_1.py"} <= {
            file.name for file in (tmp_path / schedule).iterdir()
        }


@pytest.mark.slow
def test_a_killed_training_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """torchrun starts the ranks again, and what they resume ends with the same loss."""
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = []
    for name, more in (("killed", ["--max-restarts=2"]), ("whole", ["--max-restarts=0"])):
        script = EXAMPLES / "elastic.py"
        if name == "whole":
            text = script.read_text(encoding="utf-8")
            script = tmp_path / "whole.py"
            script.write_text(text.replace("t == 15", "t == 1500"), encoding="utf-8")
        done = subprocess.run(
            [*started, *more, str(script), str(tmp_path / name)],
            capture_output=True, text=True, check=False, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(re.findall(r"attempt (\d), (minibatch \d+: loss [\d.]+)", done.stdout))
    killed, whole = printed
    assert [attempt for attempt, _ in killed] == ["0", "1", "1"]
    assert [line for _, line in killed] == [line for _, line in whole]
