"""Warnings name a line of the user's, and come once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.cli import main
from pdcompile.cluster import Cluster
from pdcompile.warn import each_once, warn

pytestmark = pytest.mark.usefixtures("captured_anew")


class Looping(nn.Module):
    """Loops by the values of its inputs, and warns in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("an old way to call me", FutureWarning, stacklevel=1)
        h = self.first(x)
        for _ in range(int(x.sum()) % 3):
            h = h.relu()
        return self.second(h).square().mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(4, 4), Looping()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))


def line_of(warning: warnings.WarningMessage) -> str:
    return Path(warning.filename).read_text().splitlines()[warning.lineno - 1].strip()


def test_a_compilation_warns_once_at_the_line_of_the_user() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdcompile.compile(
            Model(), torch.ones(4, 4), cluster=Cluster.local(2), optimizer=None, costs="estimated"
        )  # the line of a call of several lines is its first
    own = [one for one in caught if one.category is FutureWarning]
    assert [line_of(one) for one in own] == [
        'warnings.warn("an old way to call me", FutureWarning, stacklevel=1)'
    ]
    (kept,) = [one for one in caught if "opaque" in str(one.message)]
    assert kept.filename == __file__
    assert line_of(kept) == "pdcompile.compile("


def test_other_warnings_are_all_shown() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with each_once():
            for text in ("a", "b", "a"):
                warn(text)
        warn("a")
    assert [str(one.message) for one in caught] == ["a", "b", "a"]
    assert {one.filename for one in caught} == {__file__}


def test_what_torch_warns_of_is_told_once_at_the_line_of_the_loss() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdcompile.compile(
            model, torch.ones(8, 4), example_target=torch.ones(8, 1), loss_fn=loss_fn,
            cluster=Cluster.local(2), optimizer=None, costs="estimated", microbatches=2,
        )  # fmt: skip
    (said,) = [one for one in caught if "broadcasting" in str(one.message)]
    assert line_of(said) == "return F.mse_loss(output, target)"
    assert "[4, 1]" in str(said.message)


def test_warnings_may_be_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with each_once(), pytest.raises(UserWarning, match="a"):
            warn("a")


WORKLOAD = """
import torch
import pdcompile

class Model(torch.nn.Sequential):
    def forward(self, x):
        import warnings
        warnings.warn("an old way")
        return super().forward(x).mean()

def build():
    model = Model(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return pdcompile.Workload(model, (torch.ones(4, 4),))
"""


def test_the_command_prints_warnings_as_its_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "workload.py"
    target.write_text(WORKLOAD)
    with pytest.raises(SystemExit):
        main(["plan", f"{target}:build", "--cluster", "local:2", "--costs", "estimated"])
    assert capsys.readouterr().err.count(f"warning: an old way\n  where: {target}:8\n") == 1
