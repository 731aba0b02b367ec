"""The cache of measured times: found again, never trusted, never in the way."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pdcompile.batch import example_call, resolve_batch
from pdcompile.files import VARIABLE, cache_folder
from pdcompile.hardware import devices
from pdcompile.ir.graph import Op, OpGraph
from pdcompile.passes import trace
from pdcompile.passes.profile import cache
from pdcompile.passes.profile.entries import Entry
from tests.helpers import models
from tests.helpers.costed import profile

HERE = cache.Environment("2.13", "cpu", "a processor", 1, 4)
ENTRIES = (Entry("one", "torch.relu", 1e-3), Entry("two", "torch.tanh", 2e-3, 1e-3))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@once
def captured() -> tuple[nn.Module, OpGraph]:
    model = models.mlp()
    x, y = models.batch_for(model, 4)
    flat = example_call(model, x, y)
    found = trace.capture(model, flat, resolve_batch(flat), models.loss_for(model))
    return model, found.train


def test_the_second_time_nothing_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph = captured()
    said: list[str] = []
    first = profile(graph, model, microbatch_size=4, say=said.append)
    assert said == []
    assert [path.suffix for path in folder.iterdir()] == [".json"]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("pdcompile.passes.profile.op_bench.measure", refuse)
    again = profile(graph, model, microbatch_size=4, say=said.append)
    assert [op.cost for op in again.ops] == [op.cost for op in first.ops]
    assert "come from the cache, measured 2" in said[0]


def test_what_is_saved_is_found_by_what_it_depends_on(folder: Path) -> None:
    cache.save(HERE, ("one", "two"), ENTRIES)
    found = cache.load(HERE, ("two", "one"))
    assert found is not None
    assert found.entries == ENTRIES
    assert cache.load(HERE, ("one",)) is None
    for name, other in (("torch_version", "2.14"), ("device_kind", "other"), ("num_threads", 2),
                        ("microbatch_size", 8), ("device", "cuda")):  # fmt: skip
        assert cache.load(replace(HERE, **{name: other}), ("one", "two")) is None, name
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # no draft is left


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("0.001", "NaN"),
        lambda text: text.replace("0.001", "-0.001"),
        lambda text: text.replace('"one"', '"two"'),
        lambda text: text.replace('"one"', '"three"'),
        lambda text: text.replace("a processor", "another"),
        lambda text: text.replace(cache.SCHEMA, "pdcompile.cached-profile/0"),
        lambda text: json.dumps(json.loads(text) | {"code": "import os"}),
        lambda text: "[" * 100_000,
        lambda text: "\udcff",
    ],
)
def test_a_spoilt_file_is_ignored_with_a_line_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture, spoil: Any
) -> None:
    cache.save(HERE, ("one", "two"), ENTRIES)
    (path,) = folder.iterdir()
    path.write_text(spoil(path.read_text()), errors="surrogateescape")
    with caplog.at_level(logging.WARNING):
        assert cache.load(HERE, ("one", "two")) is None
    assert "measuring again" in caplog.text
    cache.save(HERE, ("one", "two"), ENTRIES)
    assert cache.load(HERE, ("one", "two")) is not None


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    cache.save(HERE, ("one",), ENTRIES[:1])
    assert cache.load(HERE, ("one",)) is None
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    path = cache._path(HERE, ("one",))
    assert path is not None
    path.mkdir()
    cache.save(HERE, ("one",), ENTRIES[:1])
    assert cache.load(HERE, ("one",)) is None
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for off in ("off", "OFF", "0", ""):
        monkeypatch.setenv(VARIABLE, off)
        assert cache_folder() is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "pdcompile"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "pdcompile"


def test_what_a_user_wrote_is_measured_every_time() -> None:
    lasting = [
        Op("a", "function", "torch.nn.functional.linear"), Op("b", "method", "view"),
        Op("c", "module", "torch.nn.Linear"), Op("d", "function", "operator.add"),
        Op("e", "getattr", "T"), Op("f", "function", "torch.ops.aten.relu.default"),
    ]  # fmt: skip
    own = [
        Op("g", "opaque", "mine.Block"), Op("h", "function", "mine.Function.apply"),
        Op("i", "opaque", "torch.nn.Linear"), Op("j", "function", "torch.ops.mine.relu"),
        Op("k", "function", "torchvision.ops.nms"),
    ]  # fmt: skip
    assert [cache.lasting(op) for op in lasting] == [True] * len(lasting)
    assert [cache.lasting(op) for op in own] == [False] * len(own)


def test_this_machine_has_a_name() -> None:
    here = cache.Environment.here(devices.HOST, 4)
    assert here.device_kind
    assert here.torch_version == torch.__version__
