"""What a compilation shows while it runs: bars and lines on stderr, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError
from pdcompile.report import progress


def compiled(**options: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pdcompile.compile(
        model, torch.ones(4, 4), example_target=torch.ones(4, 1), loss_fn=nn.functional.mse_loss,
        optimizer=None, cluster=Cluster.local(2), costs="estimated", **options,
    )  # fmt: skip


def test_a_log_gets_lines_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    compiled()
    assert capsys.readouterr() == ("", "")
    compiled(progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line.split()[:2] for line in err.splitlines()]
    assert ["compiling:", "graph"] in lines
    assert ["compiling:", "verified"] in lines


def test_a_terminal_gets_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes that for a terminal
    monkeypatch.setenv("TERM", "xterm")
    compiled()
    assert "compiling" in capsys.readouterr().err
    compiled(progress=False)
    assert capsys.readouterr().err == ""


def test_a_long_search_is_told_of_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.compiling(lines=True, title="solving") as listener:
        for now in (1.0, 4.0, 5.0, 6.0, 11.0):
            listener.found(f"{now:g} seconds")
    assert capsys.readouterr().err.splitlines() == [
        "solving: searching, 5 seconds",
        "solving: searching, 11 seconds",
    ]


def test_only_known_values() -> None:
    with pytest.raises(ConfigError, match="progress='loud'"):
        compiled(progress="loud")
