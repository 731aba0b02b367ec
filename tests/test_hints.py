"""Suggestions of messages: the nearest name, another call, and what was done instead."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.cluster import Cluster
from pdcompile.errors import ConfigError, InputError, PdcompileError, TraceError
from pdcompile.options.texts import optimizer_of
from pdcompile.schedule import registry
from tests.helpers.alike import Call


def compiled(model: nn.Module, **options: Any) -> Any:
    return pdcompile.compile(
        model, loss_fn=nn.functional.mse_loss, cluster=Cluster.local(2), costs="estimated",
        **options,
    )  # fmt: skip


def test_an_option_that_there_is_not_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="compile has no option 'microbatch'") as caught:
        pdcompile.compile(nn.Linear(1, 1), microbatch=2)  # type: ignore[arg-type]
    assert "did you mean 'microbatches'?" in str(caught.value.remedy)
    with pytest.raises(ConfigError) as other:
        pdcompile.compile(nn.Linear(1, 1), qqq=2)  # type: ignore[arg-type]
    assert str(other.value.remedy).startswith("there are example_inputs, ")
    with pytest.raises(ConfigError) as elsewhere:
        pdcompile.compile(nn.Linear(1, 1), lr=2)  # type: ignore[arg-type]
    assert "optimizer=partial(" in str(elsewhere.value.remedy)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("batch", "did you mean 'batches'? there are model, "),
        ("schedule", "it is an option: schedule=… of pdcompile.compile"),
        ("target", "the example's target is example_target"),
        ("data", "batches is a function that returns a fresh iterable "),
        ("dataset", "batches is a function that returns a fresh iterable "),
        ("scheduler", "it steps in a loop of your own: "),
        ("qqq", "there are model, "),
    ],
)
def test_a_field_that_a_workload_has_not_names_what_is_meant(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"Workload has no field '{name}'") as caught:
        pdcompile.Workload(nn.Linear(1, 1), torch.ones(1, 1), **{name: None})
    assert str(caught.value.remedy).startswith(remedy)
    assert len(inspect.signature(pdcompile.Workload).parameters) == 7  # all are shown, or listed


def test_all_wrong_fields_of_a_workload_are_named_before_those_that_are_missing() -> None:
    wrong: dict[str, Any] = {"target": None, "batchs": None, "qqq": None}
    with pytest.raises(ConfigError) as caught:
        pdcompile.Workload(nn.Linear(1, 1), **wrong)
    assert caught.value.message == "Workload has no field 'target' or 'batchs' or 'qqq'"
    assert str(caught.value.remedy).startswith("target: the example's target is ")
    assert "; batchs: did you mean 'batches'? there are model, " in str(caught.value.remedy)


def test_what_a_workload_needs_is_named() -> None:
    with pytest.raises(ConfigError, match="Workload has no example_inputs") as caught:
        pdcompile.Workload(nn.Linear(1, 1), loss_fn=nn.functional.mse_loss)
    assert "example_inputs is a whole minibatch" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="Workload has no model and no example_inputs"):
        pdcompile.Workload()


@pytest.mark.parametrize("given", ["1f1bb", "1F1B"])
def test_a_schedule_that_there_is_not_names_the_nearest(given: str, call: Call) -> None:
    model, loss_fn = nn.Linear(1, 1), nn.functional.mse_loss
    calls: list[Callable[[], Any]] = [
        lambda: compiled(model, schedule=given),
        lambda: pdcompile.reference(model, loss_fn=loss_fn, schedule=given, microbatches=1),
        lambda: registry.kind_of(given),
    ]
    for attempt in calls:
        with pytest.raises(PdcompileError) as caught:
            attempt()
        assert str(caught.value.remedy).startswith("did you mean '1f1b'? ")
    assert "remedy: did you mean '1f1b'? one of gpipe, 1f1b" in call("schedule", given)[2]


def test_a_value_that_there_is_not_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'full'\? one of 'auto', 'full'"):
        compiled(nn.Linear(1, 1), verify="ful")
    with pytest.raises(ConfigError, match=r"remedy: one of .*\"auto\" compares the ops of a model"):
        compiled(nn.Linear(1, 1), verify="blocks")
    with pytest.raises(ConfigError, match=r"did you mean 'adagrad'\? one of "):
        optimizer_of("AdaGrat", 0.1)
    with pytest.raises(ConfigError, match="remedy: one of 'auto', 'full'"):
        compiled(nn.Linear(1, 1), verify=3)  # none of them is like it


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 1)

    def forward(self, inputs: dict[str, Tensor], bias: Tensor | None = None) -> Tensor:
        found: Tensor = self.lin(inputs["values"]) * inputs["scale"]
        return found if bias is None else found + bias


def test_a_wrong_key_names_the_surplus_key_and_the_nearest_name() -> None:
    x, y = torch.ones(4, 4), torch.ones(4, 1)
    pipe = compiled(OfDict(), microbatches=2)
    with pytest.raises(InputError, match="unexpected keyword argument 'input'") as caught:
        pipe.step({"values": x, "scale": y}, input=y, target=y)
    with pytest.raises(InputError) as misspelt:
        pipe.step(inptus={"values": x, "scale": y}, target=y)
    assert "did you mean 'inputs'?" in str(misspelt.value.remedy)
    assert "did you mean" not in str(caught.value.remedy)  # nothing like it is open
    pipe.step({"values": x, "scale": y}, target=y)
    with pytest.raises(InputError, match=r"an input is missing, and inputs\['scales'\]") as other:
        pipe.step({"values": x, "scales": y}, target=y)
    assert (other.value.where, other.value.remedy) == (
        "inputs['scale']", "write inputs['scale'] in place of inputs['scales']",
    )  # fmt: skip
    with pytest.raises(InputError, match=r"did not have: inputs\['mask'\]"):
        pipe.step({"values": x, "scale": y, "mask": y}, target=y)


def test_a_pipeline_is_neither_pickled_nor_copied() -> None:
    pipe = compiled(OfDict(), microbatches=2)
    for attempt in (lambda: torch.save(pipe, io.BytesIO()), lambda: copy.deepcopy(pipe)):
        with pytest.raises(ConfigError, match="not pickled or copied") as caught:
            attempt()
        assert "pipe.save(folder)" in str(caught.value.remedy)


class OfEight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lin(x.view(8, 4))
        return found


def test_a_model_of_one_batch_size_runs_whole_minibatches() -> None:
    model = OfEight()
    pipe = compiled(model)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    expected = nn.functional.mse_loss(model(x), y).item()
    with pytest.warns(UserWarning, match="microbatches=1, so that ranks take turns"):
        assert pipe.step(x, target=y).loss.item() == expected
    assert pipe.plan.training.num_microbatches == 1
    with pytest.raises(TraceError, match="with the 4 samples of a microbatch"):
        compiled(OfEight(), microbatches=2).step(x, target=y)


def test_batch_norm_keeps_microbatches_of_two_samples() -> None:
    pipe = compiled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    with pytest.warns(UserWarning, match=r"microbatches=2: with the one sample of a microbatch"):
        pipe.prepare(torch.randn(4, 4), target=torch.randn(4, 4))
    assert pipe.plan.training.num_microbatches == 2
