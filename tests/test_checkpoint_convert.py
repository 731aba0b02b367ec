"""`pdcompile checkpoint`: what it shows, and the plain files that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdcompile.checkpoint.conversion import convert
from pdcompile.cli import main
from pdcompile.errors import CheckpointError
from pdcompile.weights.tensor_files import TensorFiles
from tests.helpers.changes import Rich
from tests.helpers.pipelines import states_equal
from tests.helpers.resuming import pipeline, train


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("saved")
    pipe = pipeline("2bw", 2, tied=True)
    train(pipe, 0, 3)
    pipe.save(folder)
    state = pipe.full_state_dict()
    pipe.close()
    return folder, state


def ran(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *map(str, arguments)])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_it_shows_what_there_is(
    saved: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = ran(capsys, "show", saved[0])
    assert code == 0
    assert "3 minibatches" in text
    assert "saved under 2bw with 4 microbatches on 2 ranks, AdamW" in text
    assert "2, 3" in text
    assert "tied: last.weight is first.weight" in text
    code, text = ran(capsys, "show", saved[0], "--verify", "--json")
    found = json.loads(text)
    assert (code, found["status"], found["damaged"]) == (0, "whole", [])
    assert [stage["weights"] for stage in found["stages"]] == [[2, 3], [2, 3]]
    path = next(saved[0].glob("save-*/stage-000-rest.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        code, text = ran(capsys, "show", saved[0], "--verify")
    finally:
        path.write_bytes(data)
    assert code == 2
    assert "damaged: " in text
    assert ran(capsys, "show", tmp_path)[0] == 2


@pytest.mark.parametrize("output", ["model.safetensors", "model"])
def test_plain_files_load_into_the_model(
    output: str, saved: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = ran(capsys, "convert", saved[0], "-o", tmp_path / output, "--json")
    assert (code, json.loads(text)["status"]) == (0, "done")
    files = TensorFiles([tmp_path / output])
    assert "last.weight" not in files.files  # of tied ones there is one
    model = Rich(tied=True, seed=3)
    own = dict(model.state_dict())
    found = {name: files.tensor(name, own[name]) for name in files.files}
    model.load_state_dict(found, strict=False)
    assert not states_equal(dict(model.state_dict()), saved[1])
    left = [one.name for one in tmp_path.rglob("*") if one.name.endswith(".tmp")]
    assert left == []


def test_what_cannot_be_converted(saved: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        convert(tmp_path, tmp_path / "x.safetensors")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(saved[0], tmp_path / "file" / "x.safetensors")
