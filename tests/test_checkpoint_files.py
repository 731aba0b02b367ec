"""Checkpoints that are damaged, incomplete, mixed or hostile: named, and nothing is loaded."""

from __future__ import annotations

import json
import shutil
import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pdcompile.checkpoint import folder
from pdcompile.checkpoint.manifest import MANIFEST, Holding, HoldingKind
from pdcompile.checkpoint.plain_values import Encoder, decode
from pdcompile.errors import CheckpointError, PdcompileError
from pdcompile.jsonio import dumps
from pdcompile.position import Position
from tests.helpers.crashes import flipped_bits, killed_ranks, killed_saves, killed_trainings
from tests.helpers.pipelines import states_equal
from tests.helpers.resuming import pipeline, same, train


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints, of 2 and 3 minibatches under 2bw."""
    folder = tmp_path_factory.mktemp("saved")
    pipe = pipeline("2bw", 2, tied=True)
    train(pipe, 0, 2)
    pipe.save(folder)
    train(pipe, 2, 3)
    pipe.save(folder)
    pipe.close()
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(scope="module")
def target() -> Any:
    """A pipeline that none of these may change."""
    return pipeline("2bw", 3, tied=True)


def refused(target: Any, folder: Path, message: str, *where: str) -> CheckpointError:
    """Loading raises an error with this message and places, and changes nothing."""
    before = target.full_state_dict(), target.full_optimizer_state_dict()
    with pytest.raises(CheckpointError, match=message) as caught:
        target.load(folder)
    for part in where:
        assert part in str(caught.value)
    assert not states_equal(target.full_state_dict(), before[0])
    assert same(target.full_optimizer_state_dict(), before[1])
    assert target.position == Position(0)
    return caught.value


def rewritten(place: Path, change: Callable[[Any], None], *, honest: bool = True) -> None:
    """Edit a manifest; `honest`: with the checksum that belongs to it."""
    data = json.loads((place / MANIFEST).read_text())
    change(data)
    if honest:
        data["checksum"] = 0
        data["checksum"] = zlib.crc32(dumps(data).encode())
    (place / MANIFEST).write_text(dumps(data))


def last(folder: Path) -> Path:
    return folder / "save-0002-minibatch-3"


@pytest.mark.slow
def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """A flipped bit in any file of a checkpoint is found, and names its tensor."""
    outcome = flipped_bits(tmp_path, 180, seed=0)
    assert outcome.wrong == []
    assert outcome.found == 180


def test_a_damaged_tensor_is_named_and_nothing_is_loaded(copy: Path, target: Any) -> None:
    for name in ("stage-001.safetensors", "stage-000-optimizer.safetensors"):
        path = last(copy) / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    error = refused(target, copy, "is damaged: its checksum does not fit", "stage-001.safetensors")
    assert "another checkpoint" in (error.remedy or "")
    assert target.load(copy / "save-0001-minibatch-2").name == "save-0001-minibatch-2"
    target.load_state_dict(pipeline("2bw", 3, tied=True).full_state_dict(), position=0)
    target.optimizer.state.clear()


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing shard": (lambda p: (p / "stage-001.safetensors").unlink(), "is missing"),
    "a shard of another checkpoint": (
        lambda p: shutil.copy(p.parent / "save-0001-minibatch-2/stage-001.safetensors", p),
        "or of another checkpoint",
    ),
    "a shard that was written anew": (
        lambda p: save_file(load_file(p / "stage-000.safetensors"), p / "stage-000.safetensors"),
        "bytes, .* were written",
    ),
    "a shard that is cut off": (
        lambda p: (p / "stage-000.safetensors").write_bytes(
            (p / "stage-000.safetensors").read_bytes()[:-4]
        ),
        "bytes, .* were written",
    ),
    "a shard that is empty": (
        lambda p: (p / "stage-000.safetensors").write_bytes(b""), "has 0 bytes, .* were written",
    ),
    "a shard that is a link": (
        lambda p: (
            (p / "stage-000.safetensors").rename(p.parent / "elsewhere"),
            (p / "stage-000.safetensors").symlink_to(p.parent / "elsewhere"),
        ),
        "no plain file",
    ),
    "no manifest": (lambda p: (p / MANIFEST).unlink(), "no readable manifest"),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_files_that_are_not_what_was_written(what: str, copy: Path, target: Any) -> None:
    damage, message = FILES[what]
    damage(last(copy))
    refused(target, copy, message, str(copy))


def rename_tensor(data: Any, name: str) -> None:
    data["stages"][0]["files"][0]["tensors"][0]["name"] = name


MANIFESTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another version": (lambda d: d.update(version=1), "version 1, and this pdcompile reads 3"),
    "no version": (lambda d: d.pop("version"), "version None"),
    "a key too many": (lambda d: d.update(code="print()"), "unknown key"),
    "a key too few": (lambda d: d.pop("stages"), "'stages' is missing"),
    "a wrong type": (lambda d: d.update(minibatches="3"), "is not a whole number"),
    "a stage twice": (lambda d: d["stages"].append(d["stages"][0]), "in the place of stage"),
    "a stage without weights": (lambda d: d["stages"][0].update(files=[]), "no file of its w"),
    "a path that leaves the folder": (
        lambda d: d["stages"][0]["files"][0].update(name="../../stage-000.safetensors"),
        "not the name of a safetensors file",
    ),
    "an absolute path": (
        lambda d: d["stages"][0]["files"][0].update(name="/etc/passwd"), "not the name of",
    ),
    "another model's name": (lambda d: rename_tensor(d, "nobody"), "nobody|last.weight is no"),
    "another shape": (
        lambda d: d["stages"][0]["files"][0]["tensors"][0].update(shape=[8]), r"in the model",
    ),
    "another dtype": (
        lambda d: d["stages"][0]["files"][0]["tensors"][0].update(dtype="int32"), "is int32",
    ),
    "extra states that are none": (
        lambda d: d.update(extra_states=[1]), "is not an object",
    ),
    "an extra state that is none": (
        lambda d: d.update(extra_states={"a": {"code": 1}}), "no value of a checkpoint",
    ),
    "an alias of nothing": (lambda d: d.update(aliases=[["a", "b"]]), "no further name of b"),
    "state that is no value": (
        lambda d: d["stages"][0]["state"].update({"first.weight": {"eval": "1"}}), "is no value",
    ),
    "state in no file": (
        lambda d: d["stages"][0]["state"].update(
            {"first.weight": {"dict": [["a", {"tensor": "b"}]]}}
        ),
        "b is in no file",
    ),
    "groups that are none": (
        lambda d: d["stages"][0]["groups"][0].update(values=[1]), "settings are malformed",
    ),
    "generators that are none": (
        lambda d: d.update(random_states=[[0, {"dict": []}]]), "generators are",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MANIFESTS)
def test_manifests_that_lie(what: str, copy: Path, target: Any) -> None:
    """Each has the right checksum: whoever wrote it meant it."""
    change, message = MANIFESTS[what]
    rewritten(last(copy), change)
    refused(target, copy, message, str(last(copy)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("{", "not JSON"),
        ("[" * 100_000, "nested deeper"),
        ('{"version": NaN}', "not a JSON number"),
        ('{"version": 1, "version": 1}', "appears twice"),
        ('{"version": 1e999}', "too large"),
        ("[]", "version None"),
    ],
)
def test_manifests_that_are_none(text: str, message: str, copy: Path, target: Any) -> None:
    (last(copy) / MANIFEST).write_text(text)
    refused(target, copy, message, MANIFEST)


def test_an_edited_manifest_is_refused(copy: Path, target: Any) -> None:
    rewritten(last(copy), lambda d: d.update(minibatches=4), honest=False)
    refused(target, copy, "changed after it was written", MANIFEST)


def test_where_nothing_is(tmp_path: Path, target: Any) -> None:
    refused(target, tmp_path, "no complete checkpoint", str(tmp_path))
    refused(target, tmp_path / "nowhere", "no such folder", "paths are relative to")


def test_a_folder_that_cannot_be_read(tmp_path: Path, target: Any) -> None:
    refused(target, tmp_path / ("x" * 300), "the folder cannot be read: File name too long")


def test_places_of_tensors_are_a_format() -> None:
    """Checkpoints that are on disk have them so."""
    found = {kind.name: Holding(kind, "a.b", 3).place for kind in HoldingKind}
    assert found == {
        "WEIGHT": ("", "a.b"),
        "OLDER": ("-rest", "older/3/a.b"),
        "ACCUMULATED": ("-rest", "gradient/a.b"),
        "BUFFER": ("-rest", "buffer/a.b"),
        "REPLICA": ("-replica-003", "a.b"),
        "OPTIMIZER": ("-optimizer", "a.b"),
    }


def test_a_name_that_cannot_be_brought_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is said to have failed is not there."""
    pipe = pipeline("1f1b")
    place = pipe.save(tmp_path)
    synced = folder.synced

    def full(path: Path) -> None:
        if path == tmp_path:
            raise OSError(28, "No space left on device")
        synced(path)

    monkeypatch.setattr(folder, "synced", full)
    with pytest.raises(CheckpointError, match="No space left"):
        pipe.save(tmp_path)
    assert [*tmp_path.iterdir()] == [place]
    assert pipe.load(tmp_path) == place


def test_a_checkpoint_of_another_model_is_refused(saved: Path) -> None:
    other = pipeline("2bw", 2, tied=False)
    other.load(saved)  # tied weights are loaded into a model that has two of them
    state = other.full_state_dict()
    assert torch.equal(state["first.weight"], state["last.weight"])
    other.close()


def test_tied_weights_have_to_be_one(tmp_path: Path, target: Any) -> None:
    pipe = pipeline("2bw", 2, tied=False)
    pipe.save(tmp_path)
    pipe.close()
    refused(target, tmp_path, "are one tensor in the model, and there are 2 in the checkpoint")


class Kinds(nn.Module):
    """Tensors of many kinds, most of them small or odd."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8).to(torch.float64)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(3, dtype=torch.int16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("short", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x.double()).float() * self.turned.sum() + self.short.sum()
        return out + self.scalar + self.flags.sum() + self.empty.sum()


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    import torch.nn.functional as F

    from tests.helpers.changes import batch
    from tests.helpers.pipelines import by_hand
    from tests.helpers.resuming import ADAMW

    def make() -> Any:
        torch.manual_seed(len(list(tmp_path.iterdir())))
        given = {"loss_fn": F.mse_loss, "optimizer": ADAMW, "microbatches": 2}
        return by_hand(Kinds(), 2, *batch(0), schedule="1f1b", **given).prepare()

    pipe = make()
    train(pipe, 0, 2)
    pipe.save(tmp_path)
    other = make()
    assert states_equal(other.full_state_dict(), pipe.full_state_dict())
    other.load(tmp_path)
    assert not states_equal(other.full_state_dict(), pipe.full_state_dict())
    assert train(pipe, 2, 4) == train(other, 2, 4)


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, [2.5, None], {3: "x"})}, float("inf"), 2**70, -(2**64), 1 + 2j, torch.float16,
        {"t": torch.ones(2, 2), "of": [torch.tensor(3)]}, True, {(1, 2): {4}},
        deque([1, 2], maxlen=2), deque([1]), defaultdict(int, a=1), defaultdict(None, a=1), b"\xff",
    ],
)  # fmt: skip
def test_values_come_back_as_they_were(value: Any) -> None:
    for inline in (False, True):
        encoder = Encoder(inline=inline)
        text = dumps(encoder.encode(value, "value"))
        found = decode(json.loads(text), "value", encoder.tensors.__getitem__)
        assert same(found, value)
        assert type(found) is type(value)
        for name in ("maxlen", "default_factory"):
            assert getattr(found, name, None) == getattr(value, name, None)


@pytest.mark.parametrize("value", [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True)])
def test_numbers_of_numpy_become_pythons(value: Any) -> None:
    found = decode(json.loads(dumps(Encoder().encode(value, "value"))), "value")
    assert found == value
    assert type(found) in (float, int, bool)


class Marked(torch.Tensor):
    """A tensor that is more than its values."""


@pytest.mark.parametrize(
    "value",
    [object(), print, bytearray(b"x"), torch.eye(2).to_sparse(), defaultdict(lambda: 1),
     torch.ones(2).as_subclass(Marked)],
)  # fmt: skip
def test_values_that_no_file_without_code_holds(value: Any) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint holds tensors"):
        Encoder().encode({"deep": [value]}, "state")
    nested: Any = 1
    for _ in range(100):
        nested = [nested]
    with pytest.raises(CheckpointError, match="nested deeper"):
        Encoder().encode(nested, "state")


@pytest.mark.parametrize(
    "data",
    [{}, {"tuple": 3}, {"dict": [[1]]}, {"dict": [[[1], 2]]}, {"float": "1"}, {"int": [1]},
     {"bounded": [2]}, {"bounded": [True, []]}, {"bounded": [-1, []]}, {"bounded": [2, 3]},
     {"dtype": "nn"}, {"values": ["float32", [3], "AAAA"]}, {"complex": [1]}, {"a": 1, "b": 2}],
)  # fmt: skip
def test_what_is_no_value_is_refused(data: Any) -> None:
    with pytest.raises(PdcompileError, match="no value of a checkpoint"):
        decode(data, "state", torch.ones)


@pytest.mark.slow
def test_kills_at_random_moments_of_a_save(tmp_path: Path) -> None:
    """One whole checkpoint is found afterwards, of the minibatch that it says."""
    outcome = killed_saves(tmp_path, kills=12, seed=0)
    assert outcome.wrong == []
    assert outcome.found > 0


@pytest.mark.slow
def test_killed_trainings_end_as_one_that_never_stopped(tmp_path: Path) -> None:
    outcome = killed_trainings(tmp_path, [("2bw", (1, 3)), ("stash", (3,))], trials=2, seed=0)
    assert outcome.wrong == []
    assert outcome.found == 2


@pytest.mark.slow
def test_killed_ranks_end_as_ones_that_never_stopped(tmp_path: Path) -> None:
    outcome = killed_ranks(tmp_path, trials=2, seed=0)
    assert outcome.wrong == []
    assert outcome.found == 2
