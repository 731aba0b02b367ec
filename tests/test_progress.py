"""Display of a compilation while it runs: bars and lines on stderr, or nothing."""

from __future__ import annotations

import threading
import time
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


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at once, and many more, by a clock that stands: a busy machine takes seconds."""
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)


def spoken(console: Any, until: str) -> str:
    """Text on stderr once it says so."""
    said = ""
    while until not in said:
        time.sleep(0.01)
        said += console.readouterr().err
    return said


def test_long_work_says_the_pass_how_far_it_is_and_what_is_to_come(
    capsys: pytest.CaptureFixture[str], soon: None
) -> None:
    with progress.compiling(lines=False) as listener:
        listener.starts("costs")
        listener.part(3, 80, "torch.nn.functional.linear")
        said = spoken(capsys, "3 of 80 ops")
        listener.starts("plan")
        listener.found("best 3 s, gap 2 %")
        said += spoken(capsys, "best 3 s, gap 2 %")
        listener.starts("verified")
        said += spoken(capsys, "verified, ")
    assert "compiling: costs, 3 of 80 ops, 0 s so far, then problem, plan, refined, proof" in said
    assert "compiling: plan, best 3 s, gap 2 %, 0 s so far, then refined, proof" in said
    assert "verified, 0 s so far\n" in said


def test_a_training_says_how_far_it_is(capsys: pytest.CaptureFixture[str], soon: None) -> None:
    with progress.compiling(lines=False, title="training") as listener:
        listener.steps(0, 10, "")
        assert "training: step 0 of 10, 0 s so far\n" in spoken(
            capsys, "step 0 of 10, 0 s so far\n"
        )
        listener.steps(5, 10, "loss 2.5")
        said = spoken(capsys, "to come")
    assert "training: step 5 of 10, loss 2.5, 0 s so far, about 0 s to come\n" in said


def test_work_that_is_over_says_nothing_more(
    capsys: pytest.CaptureFixture[str], soon: None
) -> None:
    with progress.compiling(lines=False, title="solving") as listener:
        listener.starts("again")
        spoken(capsys, "solving: again")
    capsys.readouterr()
    assert not [one for one in threading.enumerate() if one.name == "pdcompile-progress"]


def test_quick_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.compiling(lines=False) as listener:
        listener.starts("graph")
        listener.told("a plan")
        listener.ended("graph", 0.1)
    assert capsys.readouterr().err == ""


def test_only_rank_0_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    monkeypatch.setenv("RANK", "1")
    with progress.compiling(lines=True) as listener:
        listener.starts("graph")
        listener.ended("graph", 1.0)
    assert capsys.readouterr().err == ""


def test_only_known_values() -> None:
    with pytest.raises(ConfigError, match="progress='loud'"):
        compiled(progress="loud")
