"""Writing a folder, editing it, and loading it again."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import traceback
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from pdcompile.errors import SourceError
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes.codegen import generate, module_of, read, set_draw, stage_classes, write
from tests.helpers import models
from tests.helpers.cuts import cut
from tests.helpers.generated import captured, mean_square


@cache
def sources() -> Sources:
    model = models.gpt(dropout=0.1, layers=1)
    inputs, target = models.batch_for(model, 4)
    _, _, found = captured(model, inputs, target, models.token_loss)
    return generate(found, cut(found, [8]))


def test_what_was_written_is_read_as_unedited(tmp_path):
    write(sources(), tmp_path / "stages")
    found = read(tmp_path / "stages", sources())
    assert found.edited == ()
    assert found.files == sources().files
    assert found.interfaces == sources().interfaces
    assert sorted(os.listdir(tmp_path / "stages")) == sorted([*sources().files, "digests.json"])


def test_one_changed_byte_counts_as_edited(tmp_path):
    write(sources(), tmp_path)
    file = tmp_path / "stage_1.py"
    file.write_text(file.read_text().replace("F.gelu(", "F.silu("))
    found = read(tmp_path, sources())
    assert found.edited == ("stage_1.py",)
    assert "F.silu(" in found.files["stage_1.py"]
    assert [cls.__name__ for cls in stage_classes(found)] == ["Stage0", "Stage1"]


def test_writing_again_replaces_what_was_written_and_leaves_other_files_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    files = sources().files
    other = replace(
        sources(), files={**files, "stage_0.py": files["stage_0.py"] + "# of another\n"}
    )
    for found in (other, sources(), sources()):
        write(found, tmp_path)
        assert read(tmp_path, found).edited == ()
    (tmp_path / "stage_0.py").unlink()
    write(sources(), tmp_path)
    assert read(tmp_path, sources()).edited == ()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("file", ["stage_0.py", "pipeline.py"])
def test_edited_and_foreign_source_is_never_written_over(tmp_path, file):
    folder = tmp_path / "of another"
    folder.mkdir()
    (folder / file).write_text("mine")
    with pytest.raises(SourceError, match=f"{file} is there already") as caught:
        write(sources(), folder)
    assert os.listdir(folder) == [file]
    assert "another folder" in str(caught.value.remedy)
    write(sources(), tmp_path / "edited")
    (tmp_path / "edited" / file).write_text("edited")
    for _ in range(2):
        with pytest.raises(SourceError, match="was edited since"):
            write(sources(), tmp_path / "edited")
    assert (tmp_path / "edited" / file).read_text() == "edited"


@pytest.mark.parametrize("missing", ["stage_0.py", "stage_1.py"])
def test_a_missing_file_is_named(tmp_path, missing):
    write(sources(), tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(SourceError, match=f"{missing} is missing"):
        read(tmp_path, sources())


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        read(tmp_path / "nowhere", sources())


def test_a_file_that_is_no_text_is_refused(tmp_path):
    write(sources(), tmp_path)
    (tmp_path / "stage_0.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SourceError, match="cannot be read"):
        read(tmp_path, sources())


def test_a_file_is_no_target(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="cannot be written: File exists"):
        write(sources(), tmp_path / "file")


def test_a_linked_file_in_the_folder_is_not_written_through(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("keep me")
    folder = tmp_path / "stages"
    folder.mkdir()
    (folder / "stage_0.py").symlink_to(secret)
    with pytest.raises(SourceError, match="is there already"):
        write(sources(), folder)
    assert secret.read_text() == "keep me"


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    write(sources(), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SourceError, match="No space left on device"):
        write(sources(), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_read_only_place_is_named(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(SourceError, match="Permission denied"):
        write(sources(), tmp_path)


def test_every_load_has_a_namespace_of_its_own():
    first, second = stage_classes(sources()), stage_classes(sources())
    calls = []
    set_draw(first[1], lambda where, index: calls.append((where, index)))
    for cls in (first[1], second[1]):
        stage = cls()
        stage(
            *(torch.randn(2, *map(int, p.shape[1:])) for p in sources().interfaces[1].train.inputs)
        )
    assert [index for _, index in calls] == [0, 1]
    assert module_of(first[1]) is not module_of(second[1])


def test_tracebacks_show_the_source():
    cls = stage_classes(sources())[0]
    with pytest.raises(AttributeError) as caught:
        cls()(3)
    text = "".join(traceback.format_exception(caught.value))
    assert "positions = torch.arange(16, device=ids.device)" in text


def test_a_file_that_does_not_run_is_named():
    files = {**sources().files, "stage_1.py": "import nothing_like_this\n"}
    with pytest.raises(SourceError, match=r"stage_1\.py cannot be loaded: ModuleNotFoundError"):
        stage_classes(Sources(files, sources().interfaces))


def test_a_file_without_its_class_is_named():
    files = {**sources().files, "stage_1.py": "class Stage1: pass\n"}
    with pytest.raises(SourceError, match=r"does not define class Stage1"):
        stage_classes(Sources(files, sources().interfaces))


class Moody(nn.Module):
    """Decides by a value, so that it is opaque."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * (1.0 if float(x.sum()) > 0 else 2.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_pipeline_py_says_what_it_cannot_run_without(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Moody(), nn.Linear(4, 4))
    _, _, found = captured(model, torch.randn(4, 4), torch.randn(4, 4), mean_square)
    write(generate(found, cut(found, [1])), tmp_path, model=model)
    program = tmp_path / "pipeline.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, env=environment
    )
    assert alone.returncode == 1
    (line,) = alone.stderr.splitlines()
    assert line.startswith("1 (")
    assert "Moody) is the model's own" in line
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setitem(sys.modules, "stage_0", None)  # restored, whatever the program imports
        patch.setitem(sys.modules, "stage_1", None)
        del sys.modules["stage_0"], sys.modules["stage_1"]
        runpy.run_path(str(program))["main"](model)
