"""README and docs: every block of Python runs, every command is one, the site builds."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

import pdcompile
from tests.helpers.alike import Call

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```(\w*).*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"(?:\$ )?((?:\w+=\S+ )*(?:pdcompile|torchrun|python|make) .+)")
CONSOLE = re.compile(r"^```console\n\$ pdcompile ([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BY_PROCESSES = "# torchrun --nproc-per-node="  # how such a block begins


def blocks() -> Iterator[Any]:
    """Every block of Python; what starts processes, or transformers, is slow."""
    for page in PAGES:
        for index, found in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8"))):
            code = found.group(1)
            heavy = code.startswith(BY_PROCESSES) or "LlamaForCausalLM" in code
            marks = [pytest.mark.slow] if heavy else []
            yield pytest.param(page, code, id=f"{page.stem}-{index}", marks=marks)


def commands(page: Path) -> list[str]:
    """The commands of a page: in blocks that are not Python, indented, and within sentences."""
    text = page.read_text(encoding="utf-8")
    lines = [
        line
        for found in FENCED.finditer(text)
        if found.group(1) != "python"
        for line in found.group(2).replace("\\\n", " ").splitlines()
    ]
    prose = FENCED.sub("", text).replace("\\\n", " ")
    lines += [line[4:] for line in prose.splitlines() if line.startswith("    ")]
    lines += INLINE.findall(prose)
    return [found.group(1) for line in lines if (found := COMMAND.fullmatch(line))]


def given() -> dict[str, Any]:
    """The names that pages use for what the reader has."""
    torch.manual_seed(0)
    inputs, target = torch.randn(8, 16), torch.randn(8, 16)
    return {
        "__name__": "page",
        "torch": torch,
        "nn": nn,
        "Tensor": Tensor,
        "pdcompile": pdcompile,
        "partial": partial,
        "BatchSampler": BatchSampler,
        "RandomSampler": RandomSampler,
        "model": nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))),
        "loss_fn": nn.functional.mse_loss,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "inputs": inputs,
        "target": target,
        "batches": [(inputs, target)] * 101,
        "dataset": TensorDataset(torch.randn(64, 16), torch.randn(64, 16)),
    }


def saved_before(names: dict[str, Any]) -> None:
    """A training that was saved, and a plain model and optimizer that go on with it."""
    pipe = pdcompile.compile(
        names["model"], loss_fn=names["loss_fn"], optimizer=names["optimizer"], keep_model=True
    )
    pipe.step(names["inputs"], target=names["target"])
    pipe.save("checkpoints")
    pipe.close()
    names["optimizer"] = names["optimizer"](names["model"].parameters())


def tiny_llama(names: dict[str, Any]) -> None:
    """A small model of transformers, and its weights in a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained("checkpoint")
    ids = torch.randint(0, 32, (8, 4))
    names.update(LlamaForCausalLM=LlamaForCausalLM, config=config)
    names.update(call={"input_ids": ids, "labels": ids})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.rnn(x, state)  # type: ignore[no-any-return]


def recurrent(names: dict[str, Any]) -> None:
    names.update(model=Recurrent(), x=torch.randn(4, 3, 16), state=torch.randn(1, 4, 16))


BEFORE: dict[str, Callable[[dict[str, Any]], None]] = {  # by what a block has in it
    "pdcompile.trace(": recurrent,
    "load_checkpoint(": saved_before,
    "LlamaForCausalLM(": tiny_llama,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("page", "code"), [*blocks()])
def test_python_of_the_pages_runs(
    page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if code.startswith(BY_PROCESSES):
        under_torchrun(code, tmp_path)
        return
    names = given()
    for mark, prepare in BEFORE.items():
        if mark in code:
            prepare(names)
    exec(compile(code, str(page), "exec"), names)
    if "build" in names:  # a workload
        inputs, target = next(names["build"]().stream())
        assert inputs.shape == target.shape
    pipe = names.get("pipe")
    if pipe is not None and not pipe.position.minibatches:
        call = names.get("call") or {"input": names["inputs"], "target": names["target"]}
        assert math.isfinite(float(pipe.step(**call).loss))
    if pipe is not None:
        pipe.close()


def under_torchrun(code: str, folder: Path) -> None:
    """Run a block as its first line says; it prints what examples/train.py does."""
    (folder / "page.py").write_text(code, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone"]
    count = code.splitlines()[0].removeprefix("# torchrun ")
    printed = []
    for command in ([*launch, count, "page.py"], [str(ROOT / "examples" / "train.py")]):
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append([float(line.split()[1]) for line in done.stdout.splitlines()])
    assert len(printed[0]) == 4
    assert printed[0] == pytest.approx(printed[1], rel=1e-5)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_pages_are_commands(page: Path) -> None:
    for command in commands(page):
        words = [word for word in shlex.split(command, comments=True) if word != "…"]
        if "pdcompile" in words:
            of_pdcompile(words[words.index("pdcompile") + 1 :], command)
        elif words[0] == "make":
            assert f"\n{words[1]}:" in MAKEFILE, command
        for word in words:
            if word.startswith(("examples/", "benchmarks/", "docs/")):
                assert (ROOT / word.partition(":")[0]).exists(), command


@cache
def command_line() -> Any:
    """The group of all verbs, which takes long to make."""
    from typer.main import get_command

    import pdcompile.__main__  # adds the verbs
    from pdcompile.cli.app import app

    assert pdcompile.__main__
    return get_command(app)


def of_pdcompile(words: list[str], command: str) -> None:
    """Parse as the command line does; a verb may be named without what it needs."""
    group = command_line()
    while hasattr(group, "commands") and words and not words[0].startswith("-"):
        assert words[0] in {*group.commands, "VERB"}, command
        group = group.commands.get(words.pop(0), group)
    if hasattr(group, "commands") or "--help" in words:  # of the front page, which act at once
        assert {*words} <= {"--help", *(name for one in group.params for name in one.opts)}, command
    elif words:
        group.make_context(group.name, words)  # raises where an option or an argument is not one


def test_commands_are_found() -> None:
    """Else the test above would hold for pages whose commands it does not see."""
    counts = {page.name: len(commands(page)) for page in PAGES}
    assert counts["README.md"] >= 12
    assert counts["command_line.md"] >= 14
    assert counts["machines.md"] >= 6
    several = commands(ROOT / "docs" / "more_devices.md")
    assert any("torchrun" in one and "--schedule 2bw" in one for one in several)
    with pytest.raises(AssertionError):
        of_pdcompile(["plane", "x.py:build"], "a verb that there is not")
    with pytest.raises(Exception, match="No such option"):
        of_pdcompile(["plan", "x.py:build", "--clusters", "1x2"], "an option that there is not")


def plain(text: str) -> str:
    """Text without numbers and units, and without the line breaks that depend on their length."""
    number = r"[+-]?\d[\d.,]*(?:e[+-]?\d+)?(?: (?:%|[munp]?s|[kMGT]?B)(?!\w))?"
    return " ".join(re.sub(number, "#", text).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if CONSOLE.search(page.read_text("utf-8"))]
)
def test_pages_show_what_is_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """The commands of a page in order; `…` stands for what the page leaves out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command, shown in CONSOLE.findall(page.read_text(encoding="utf-8")):
        code, printed, _ = call(*shlex.split(command))
        assert code == 0, command
        left = plain(printed)
        for part in filter(None, map(plain, shown.split("…\n"))):
            assert part in left, f"{page.name}: {command}\n{printed}"
            left = left.partition(part)[2]


@pytest.mark.slow
def test_commands_of_the_systems_run(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.chdir(ROOT)
    ours = [one for one in commands(ROOT / "docs" / "systems.md") if one.startswith("pdcompile ")]
    assert len(ours) >= 14
    for command in ours:
        code, printed, _ = call(*shlex.split(command)[1:])
        assert code == 0, f"{command}\n{printed}"


def links(page: Path) -> Iterator[str]:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    yield from re.findall(r"(?<!`)\]\(([^)#\s]+)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    for link in links(page):
        assert "://" in link or (page.parent / link).exists(), link


def test_there_are_few_pages_and_few_links_at_the_end_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 160
    assert text.partition("## Where to read on")[2].count("](") <= 12
    assert len([*ROOT.glob("docs/**/*.md")]) <= 21
    assert len((ROOT / "docs" / "architecture.md").read_text("utf-8").splitlines()) <= 160


def test_the_comparison_counts_lines() -> None:
    pages = (ROOT / "README.md", ROOT / "docs" / "other_tools.md")
    own, other = (BLOCK.search(page.read_text(encoding="utf-8")) for page in pages)
    assert own is not None
    assert other is not None
    counts = [
        sum(bool(line.partition("#")[0].strip()) for line in one[1].splitlines())
        for one in (own, other)
    ]
    assert f"{counts[0]} lines" in pages[1].read_text(encoding="utf-8")
    assert f"it is {counts[1]}, with the cut by hand" in pages[1].read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    assert mkdocs
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "readme.html", "command_line.html", "api.html"} <= pages
    verbs = (tmp_path / "command_line.html").read_text(encoding="utf-8")
    assert "--time-limit" in verbs
    assert "[bold]" not in verbs
    assert "Plan TARGET again on other machines or with other options, and compare." in verbs
    names = (tmp_path / "api.html").read_text(encoding="utf-8")
    documented = set(re.findall(r'id="pdcompile\.(?:errors\.|reference\.)?(\w+)"', names))
    assert {*pdcompile.__all__} - documented == set()
