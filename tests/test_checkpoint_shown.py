"""Checkpoints for others: what `pdcompile checkpoint` shows, and the index of plain files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdcompile.cli import main
from pdcompile.errors import ConfigError
from pdcompile.weights.tensor_files import INDEX, TensorFiles
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


def test_others_read_its_weights_as_they_are(saved: tuple[Path, Any]) -> None:
    """Its index is read, as `weights=` and transformers do."""
    (place,) = saved[0].iterdir()
    assert json.loads((place / INDEX).read_text())["metadata"] == {}
    with pytest.raises(ConfigError, match=f"give its files by name: {place.name}/{INDEX}"):
        TensorFiles([saved[0]])
    files = TensorFiles([place])
    assert "last.weight" not in files.files  # of tied ones there is one
    model = Rich(tied=True, seed=3)
    own = dict(model.state_dict())
    found = {name: files.tensor(name, own[name]) for name in files.files}
    model.load_state_dict(found, strict=False)
    assert not states_equal(dict(model.state_dict()), saved[1])
