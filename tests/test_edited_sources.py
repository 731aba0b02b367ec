"""Generated source is there to be edited: it is loaded, verified anew, and runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import pdcompile
from pdcompile.errors import SourceError
from tests.helpers import models


def compiled(**options: Any) -> Any:
    torch.manual_seed(0)
    model = models.gpt(layers=1)
    x, y = models.batch_for(model, 8, 0)
    settings: dict[str, Any] = {"stages": 2, "costs": "estimated", "microbatches": 4} | options
    return pdcompile.compile(model, x, example_target=y, loss_fn=models.loss_for(model), **settings)


def losses(pipe: Any, steps: int = 3) -> list[float]:
    x, y = models.batch_for(models.gpt(), 8, 0)
    return [float(pipe.step(x, target=y).loss) for _ in range(steps)]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumped") / "stages"
    compiled(verify="off").dump(str(folder))
    return folder


@pytest.fixture
def folder(dumped: Path, tmp_path: Path) -> Path:
    """Generated source of a test's own."""
    return Path(shutil.copytree(dumped, tmp_path / "stages"))


def test_an_untouched_folder_runs_as_generated(folder: Path) -> None:
    pipe = compiled(sources=folder)
    assert "edited" not in pipe.explain()
    assert losses(pipe) == losses(compiled())


def test_another_activation(folder: Path) -> None:
    file = folder / "stage_1.py"
    text = file.read_text()
    assert "F.gelu" in text
    file.write_text(text.replace("F.gelu", "F.relu"))
    with pytest.raises(SourceError, match=r"stage_1\.py") as caught:
        compiled(sources=folder)
    assert "allow_edited=True" in str(caught.value)

    pipe = compiled(sources=folder, allow_edited=True)
    report = pipe.explain()
    assert "stage_1.py" in report
    assert "differ" in report
    changed = losses(pipe)
    assert changed != losses(compiled())
    assert changed[2] < changed[0]


def test_a_folder_without_a_stage(folder: Path) -> None:
    (folder / "stage_1.py").unlink()
    with pytest.raises(SourceError, match=r"stage_1\.py"):
        compiled(sources=folder)


def test_an_edit_that_is_no_python(folder: Path) -> None:
    file = folder / "stage_0.py"
    file.write_text(file.read_text() + "\ndef broken(:\n")
    with pytest.raises(SourceError, match=r"stage_0\.py"):
        compiled(sources=folder, allow_edited=True)


def test_an_edit_that_cannot_run(folder: Path) -> None:
    file = folder / "stage_1.py"
    file.write_text(file.read_text().replace("F.gelu", "F.gelou"))
    with pytest.raises(pdcompile.PdcompileError, match="gelou"):
        compiled(sources=folder, allow_edited=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("verify", ["auto", "off"])
def test_a_result_too_few(folder: Path, verify: str) -> None:
    """Refused with the names of what the plan has, also where nothing was verified."""
    file = folder / "stage_0.py"
    *head, last = file.read_text().rstrip().rsplit("return (", 1)
    names = last.rstrip("),")
    file.write_text("return (".join([*head, ")\n"]))
    with pytest.raises(SourceError, match="returns 0 results, and the plan has a tuple") as caught:
        losses(compiled(sources=folder, allow_edited=True, verify=verify), steps=1)
    assert caught.value.where == "stage_0.py"
    assert names in str(caught.value.remedy)


def test_what_python_cannot_read_is_named_with_its_line(folder: Path) -> None:
    file = folder / "stage_0.py"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, "def broken(:", ""]))
    with pytest.raises(SourceError, match="SyntaxError: invalid syntax\n") as caught:
        compiled(sources=folder, allow_edited=True)
    assert caught.value.where == f"stage_0.py:{len(lines) + 1}"
