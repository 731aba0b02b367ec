"""Targets: what works, and what each mistake is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from pdcompile import ConfigError, Workload, load_target
from pdcompile.cli.options import Flags

GOOD = """
import torch
from pdcompile import Workload

def build():
    model = torch.nn.Linear(2, 2)
    x = torch.ones(4, 2)
    return Workload(model, x, torch.nn.functional.mse_loss, lambda: iter([(x, x), (2 * x, x)]))

def pair():
    return torch.nn.Linear(2, 2), torch.ones(4, 2)

def needs(argument):
    return None

def fails():
    return {}["width"]

def number():
    return 3

def only_model():
    return torch.nn.Linear(2, 2)

def wrong_loss():
    return torch.nn.Linear(2, 2), torch.ones(4, 2), "mse"

value = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some_target.py"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_target_in_a_file(file: Path) -> None:
    workload = load_target(f"{file}:build")
    assert isinstance(workload, Workload)
    assert isinstance(workload.model, nn.Linear)


def test_target_in_a_module(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert isinstance(load_target("some_target:build"), Workload)


def test_tuple_is_a_workload(file: Path) -> None:
    workload = load_target(f"{file}:pair")
    assert workload.loss_fn is None
    assert workload.example_target() is None


def test_example_target_is_that_of_the_first_batch(file: Path) -> None:
    target = load_target(f"{file}:build").example_target()
    assert torch.equal(target, torch.ones(4, 2))


def test_stream_starts_again(file: Path) -> None:
    inputs = [x for x, _ in itertools.islice(load_target(f"{file}:build").stream(), 5)]
    assert [float(x[0, 0]) for x in inputs] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no function 'missing'"),
        ("value", "no function 'value'"),
        ("needs", "without arguments"),
        ("fails", "raised: KeyError: 'width'"),
        ("number", "returned an int"),
        ("only_model", "without example inputs"),
        ("wrong_loss", "loss_fn is .*, which cannot be called"),
    ],
)
def test_mistakes_in_the_function(file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_target(f"{file}:{name}")
    assert caught.value.remedy
    assert str(file) in str(caught.value.where)


def test_the_users_own_error_has_its_own_line(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_target(f"{file}:fails")
    line = GOOD.splitlines().index('    return {}["width"]') + 1
    assert caught.value.where == f"{file}:{line}"
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_file.py:build", "no file 'no_such_file.py'"),
        ("no_such_module:build", "no module 'no_such_module'"),
        ("build", "has not the form"),
        ("file.py:", "has not the form"),
        (":build", "has not the form"),
        ("file.py:a b", "has not the form"),
        ("", "has not the form"),
    ],
)
def test_mistakes_in_the_text(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_target(target)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_thing", "ModuleNotFoundError"),
        ("def build(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_file_that_cannot_be_imported(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "broken_target.py"
    path.write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_target(f"{path}:build")
    assert str(caught.value.where) == f"{path}:1"


def test_loss_without_batches() -> None:
    workload = Workload(nn.Linear(1, 1), torch.ones(1, 1), nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="no batches"):
        workload.example_target()


def test_batches_that_are_no_pairs() -> None:
    workload = Workload(nn.Linear(1, 1), 0, nn.functional.mse_loss, lambda: [torch.ones(3, 1)])
    with pytest.raises(ConfigError, match="not a pair"):
        workload.example_target()


def test_batches_that_are_empty() -> None:
    workload = Workload(nn.Linear(1, 1), 0, nn.functional.mse_loss, list)
    with pytest.raises(ConfigError, match="yields nothing"):
        next(workload.stream())


def test_an_error_of_batches_has_its_own_line() -> None:
    x = torch.ones(4, 3)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield x, x
        raise OSError("no more files")

    stream = Workload(nn.Linear(3, 3), x, nn.functional.mse_loss, batches).stream()
    next(stream)
    with pytest.raises(ConfigError, match="raised at minibatch 1: OSError: no more") as caught:
        next(stream)
    assert str(caught.value.where).startswith(f"{__file__}:")
    assert isinstance(caught.value.__cause__, OSError)


def test_it_takes_what_a_training_is() -> None:
    """It does as `pdcompile.compile` does; without batches the example is every minibatch."""
    x, y = torch.ones(4, 1), torch.zeros(4, 1)
    workload = Workload(
        nn.Linear(1, 1), x, nn.functional.mse_loss, example_target=y, loss_reduction="sum",
        max_grad_norm=1.0, batch_dims=0, optimizer=torch.optim.SGD,
    )  # fmt: skip
    assert workload.example_target() is y
    assert [one for _, one in itertools.islice(workload.stream(), 2)] == [y, y]
    assert workload.options == {
        "loss_reduction": "sum", "max_grad_norm": 1.0, "batch_dims": 0,
        "optimizer": torch.optim.SGD,
    }  # fmt: skip
    options = Flags({}).to_options(workload)
    assert (options.loss_reduction, options.max_grad_norm) == ("sum", 1.0)
    assert options.optimizer is torch.optim.SGD
    assert {"loss_reduction", "max_grad_norm"} <= options.said
    said = Flags({"loss_reduction": "mean", "optimizer": "none"}).to_options(workload)
    assert (said.loss_reduction, said.max_grad_norm, said.optimizer) == ("mean", 1.0, None)
    with pytest.raises(ConfigError, match="TARGET has an optimizer of its own"):
        Flags({"lr": 0.1}).to_options(workload)
    with pytest.raises(ConfigError, match="no field 'stages'"):
        Workload(nn.Linear(1, 1), x, stages=2)
