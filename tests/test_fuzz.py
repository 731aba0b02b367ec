"""Damaged and hostile files of every format: refused with an error of ours, and never executed."""

from __future__ import annotations

import json
import logging
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdcompile.checkpoint.extra_states import generator_states, states_of
from pdcompile.checkpoint.plain_values import Encoder, decode
from pdcompile.cluster import Cluster, Device
from pdcompile.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    PdcompileError,
    PlanError,
    ScheduleError,
)
from pdcompile.files import read_limited
from pdcompile.ir.targets import resolve
from pdcompile.plan import Plan
from pdcompile.plan.seal import seal_of
from pdcompile.schedule import written
from pdcompile.weights.tensor_files import TensorFiles
from tests.helpers.file_formats import MAKERS, Training
from tests.helpers.fuzzing import Format, TooSlow, fuzz
from tests.helpers.graphs import residual
from tests.helpers.planned import planned


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training.make(tmp_path_factory.mktemp("training"))


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """A cached profile that is refused is only logged."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def fuzzed(kind: Format, count: int) -> None:
    found = fuzz(kind, count, seed=1)
    assert [(one.what, one.data[:500]) for one in found.findings] == []
    assert found.files == count
    assert found.refused > 0 or kind.name == "cached profile"  # which is measured again
    assert found.kept > 0 or kind.name == "graph"  # which is sealed by a digest


@pytest.mark.parametrize("name", MAKERS)
def test_some_files_of_every_format(name: str, training: Training, tmp_path: Path) -> None:
    fuzzed(MAKERS[name](tmp_path, training), 8 if name in SLOW else 16)


SLOW = ("plan", "graph", "manifest", "safetensors", "saved-plan")


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_many_files_of_every_format(name: str, training: Training, tmp_path: Path) -> None:
    fuzzed(MAKERS[name](tmp_path, training), 2000)


def _open(data: bytes) -> None:
    Path("/etc/hostname").read_bytes()


def _endless(data: bytes) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda data: exec(data.decode()), "compile"),
        (lambda data: json.loads(data)["a"], "TypeError in outside"),
        (lambda data: os.system("true"), "os.system"),
        (lambda data: Path("written").write_bytes(data), "writes .*written"),
        (_open, "opens /etc/hostname"),
        (_endless, "takes more than"),
    ],
)
def test_what_no_reader_may_do_is_found(
    read: Callable[[bytes], Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.helpers.fuzzing.SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)
    whole = b'{"a": 1}'

    def careless(data: bytes) -> Any:
        return None if data == whole else read(b"1")

    kind = Format("mine", (whole,), lambda data, _: data + b" ", careless, tmp_path / "folder")
    (found,) = fuzz(kind, 3, 0).findings
    assert re.match(what, found.what)


def test_another_value_that_is_read_back_is_found(tmp_path: Path) -> None:
    kind = Format(
        "mine", (b"1",), lambda data, _: b"2", int, tmp_path, lambda found: (found, 1)
    )  # fmt: skip
    assert [one.what for one in fuzz(kind, 3, 0).findings] == ["reads back as another value"]


def test_equal_seeds_read_equal_files(training: Training, tmp_path: Path) -> None:
    kind = MAKERS["cluster"](tmp_path, training)
    one, other = fuzz(kind, 40, 5), fuzz(kind, 40, 5)
    assert (one.read, one.refused, one.kept) == (other.read, other.refused, other.kept)


# -- what was found once -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"speed = {'9' * 5000}", "not TOML"),
        (f"[[devices]]\nspeed = {'9' * 400}", "more than 63 bits"),
        (f"{'a.' * 70_000}a = 1", "a key has more than 64 parts"),
        (f"notes = [{'[' * 100}{']' * 100}]", "deeper than 64"),
        (f"notes = [{'[' * 10_000}{']' * 10_000}]", "deeper than 64"),
    ],
)
def test_toml_beyond_the_limits(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_toml(text)


def test_a_file_without_an_end() -> None:
    with pytest.raises(OSError, match="more than"):
        read_limited("/dev/zero", 1000)
    with pytest.raises(PlanError, match="cannot read the plan: the file has more than"):
        Plan.load("/dev/zero")


@pytest.mark.parametrize("text", ["0F0," + "0" * 200_000, "0F0\x00,0B0", '"0F0\r'])
def test_csv_that_the_library_refuses(text: str) -> None:
    with pytest.raises(ScheduleError):
        written.from_csv(text, "mine.csv", "mine")


def test_names_that_lead_to_no_operator() -> None:
    for target in ("math.pi.x.apply", "torch.onnx", "torch._inductor", "x", "", "torch.ops.a.b"):
        with pytest.raises(PdcompileError, match="no operator"):
            resolve(target)


@pytest.mark.parametrize(
    "data",
    [
        {"set": [[]]}, {"dict": [[{"tuple": [[]]}, 1]]}, {"counter": [[{"dict": []}, 1]]},
        {"int": "9" * 400}, {"int": "9" * 5000}, {"dtype": "_inductor"}, {"dtype": "nn"},
        {"dtype": []}, {"values": ["nn", [1], ""]}, {"complex": [1]},
    ],
)  # fmt: skip
def test_values_that_are_none(data: Any) -> None:
    with pytest.raises(CheckpointError, match="no value of a checkpoint"):
        decode(data, "here")


def test_a_number_that_could_not_be_read_is_not_written() -> None:
    assert decode(Encoder().encode(2**1023, "n"), "here") == 2**1023
    with pytest.raises(CheckpointError, match="more bits than 1024"):
        Encoder().encode(-(2**1024), "n")


def test_an_empty_tensor_comes_back() -> None:
    found = decode(Encoder(inline=True).encode(torch.ones(0, 3), "t"), "here")
    assert found.shape == (0, 3)
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("torch", lambda state: state[:100]),
        ("torch", lambda state: "text"),
        ("python", lambda state: ((3, state[0][1][:-1], None), state[1])),
        ("python", lambda state: ((3, (*state[0][1][:-1], 10**6), None), state[1])),
        ("python", lambda state: (state[0], (state[1][0], 10**6, 0, 0.0))),
        ("python", lambda state: (state[0], (state[1][0], -1, 0, 0.0))),
        ("python", lambda state: (state[0], (state[1][0][:40], 1, 0, 0.0))),
        ("python", lambda state: (state[0], (state[1][0][:41], 1, 0, 0.0))),
        ("python", lambda state: (state[0], ("text", 1, 0, 0.0))),
        ("python", lambda state: None),
    ],
)
def test_states_of_generators_that_are_none(name: str, change: Callable[[Any], Any]) -> None:
    """They are tried out before anything is loaded."""
    states = states_of(generator_states(), "here")
    before = torch.get_rng_state(), random.getstate()
    changed = Encoder(inline=True).encode(states | {name: change(states.get(name))}, "states")
    with pytest.raises(CheckpointError, match="random number generators are malformed"):
        states_of(changed, "here")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


HOSTILE = "[/red]{0.__class__}%s</script><script>alert(1)</script>\x1b]0;x\x07\x1b[2J\x9b2J "


def hostile(data: Any, key: str = "") -> Any:
    """The plan with such text wherever one may stand."""
    if isinstance(data, dict):
        return {name: hostile(part, name) for name, part in data.items()}
    if isinstance(data, list):
        return [hostile(part, key) for part in data]
    free = ("value", "fqn", "parameters", "fingerprint", "prover", "scope", "notes", "name", "text")
    return data + HOSTILE if isinstance(data, str) and key in free else data


@pytest.mark.parametrize("verb", ["explain", "simulate", "diff", "schedule"])
def test_hostile_text_in_a_plan_is_shown_and_does_nothing(
    verb: str, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    plan = planned(residual(3), Cluster.local(3))
    cluster = Cluster.from_toml(plan.cluster)
    levels = tuple(replace(level, name=HOSTILE) for level in cluster.levels)
    data = hostile(json.loads(plan.to_json()))
    data["cluster"] = replace(
        cluster, devices=(Device(HOSTILE),) * 3, levels=levels, notes=(HOSTILE,)
    ).to_toml()
    data["notes"], data["seal"] = [HOSTILE], seal_of(data)
    place, whole = tmp_path / "plan.json", tmp_path / "whole.json"
    place.write_text(json.dumps(data))
    whole.write_text(plan.to_json())
    before = sorted(tmp_path.iterdir())
    more = {"diff": [str(whole)], "simulate": ["--html", str(tmp_path / "page.html")]}.get(verb, [])
    code, out, err = call(verb, str(place), *more)
    assert (code, "Traceback" in err) == (0, False), err
    assert not set("\x1b\x07\x9b") & set(out + err)
    if verb == "explain":
        assert "note: [/red]{0.__class__}%s</script>" in out
    if verb == "simulate":
        page = tmp_path / "page.html"
        assert "<script>alert" not in page.read_text()
        page.unlink()
    assert sorted(tmp_path.iterdir()) == before


def test_an_index_that_names_what_no_file_is_called(tmp_path: Path) -> None:
    index = {"weight_map": {"a": f"{'a' * 5000}.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="which is not there"):
        TensorFiles([tmp_path])


def test_a_time_limit_is_no_exception() -> None:
    assert not issubclass(TooSlow, Exception)
