"""GPUs that are here: one for each process, plans that need more, and who may name devices."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import ConfigError, LaunchError
from pdcompile.hardware import devices
from pdcompile.plan.host_requirements import lacks_devices
from pdcompile.runtime.device import RankDevice, device_of
from tests.helpers.alike import PLANNED, compiled
from tests.helpers.models import mlp
from tests.helpers.simulated_gpu import SimulatedGpu
from tests.test_house import dotted
from tests.test_imports import modules


def test_a_device_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compiled(mlp, stages=2).prepare().plan
    assert type(device_of(plan, [0, 1], alone=True)) is RankDevice
    gpus = pdcompile.Cluster.local(2, kind="a100-80").to_toml()
    there = _with(plan, cluster=gpus)
    with pytest.raises(LaunchError, match="a100-80, and torch finds no GPU"):
        device_of(there, [0], alone=False)
    with SimulatedGpu(), mock.patch.object(devices, "gpu", lambda n: torch.device("cpu", n)):
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert device_of(there, [0], alone=False).device.index == 3
        assert device_of(there, [0, 1], alone=True).device.index == 0
        with mock.patch.object(devices, "gpus", return_value=2):
            assert device_of(there, [0], alone=False).device.index == 1  # two share one


def _with(plan: pdcompile.Plan, **changes: Any) -> pdcompile.Plan:
    from dataclasses import replace

    return replace(plan, **changes)


def test_gpus_that_are_not_here_are_refused_before_anything_is_captured() -> None:
    looked: list[int] = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            looked.append(1)
            return super().forward(x)

    pipe = pdcompile.compile(
        nn.Sequential(Looking(16, 16), nn.Linear(16, 16)), loss_fn=nn.functional.mse_loss,
        cluster=pdcompile.Cluster.local(2, kind="cuda"), **PLANNED,
    )  # fmt: skip
    with pytest.raises(LaunchError, match="is for cuda devices, 2 of them on this host, and torch"):
        pipe.step(torch.ones(8, 16), target=torch.ones(8, 16))
    assert looked == []


def test_how_many_gpus_are_needed() -> None:
    two = pdcompile.Cluster.local(2, kind="h100").devices
    mixed = (two[0], pdcompile.Device())
    for given, alone, gpus, missing in (
        (two, True, 1, 0), (two, True, 0, 1), (two, False, 1, 1), (two, False, 2, 0),
        (mixed, False, 1, 0), (mixed, True, 1, 1), (two, True, None, 0),
    ):  # fmt: skip
        assert len([*lacks_devices(given, alone=alone, gpus=gpus)]) == missing


def test_another_autocast_region_is_refused() -> None:
    cpus = torch.autocast("cpu", dtype=torch.bfloat16)
    given = {"cluster": pdcompile.Cluster.local(2, kind="a100-80"), "autocast": cpus}
    other = "the autocast region of cpu, and that of a100-80 casts other ops"
    with SimulatedGpu(), pytest.raises(ConfigError, match=other):
        compiled(mlp, **given)
    here = compiled(mlp, stages=2, autocast="bfloat16").prepare()
    assert not any("autocast" in note for note in here.plan.notes)


# -- names of devices ------------------------------------------------------------------------------

#: text of the program that is exported, and names of methods of tensors
OTHER_TEXT = {
    "pdcompile.passes.export.train_parts", "pdcompile.passes.trace.interceptors.loops",
}  # fmt: skip


def names_of_devices(tree: ast.Module) -> Iterator[str]:
    """Texts that are a device's name for torch, and uses of torch.cuda."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"(cpu|cuda)(:.*)?", node.value):
                yield node.value
        elif isinstance(node, ast.Attribute) and dotted(node).startswith("torch.cuda"):
            yield dotted(node)


def test_one_module_of_the_runtime_and_one_of_the_passes_name_devices() -> None:
    texts = {
        module: path.read_text(encoding="utf-8")
        for module, path in modules().items()
        if module.startswith(("pdcompile.runtime.", "pdcompile.passes."))
    }
    found = {
        module
        for module, text in texts.items()
        if ("cpu" in text or "cuda" in text) and any(names_of_devices(ast.parse(text)))
    }
    assert found - OTHER_TEXT == {
        "pdcompile.runtime.device", "pdcompile.passes.costs.machines",
    }  # fmt: skip
    uses = ast.parse('x.to("cuda:1")\ntorch.cuda.Stream()\nf("cpu")\n"to the cpu"')
    assert len({*names_of_devices(uses)}) >= 3


# -- what torch is told ----------------------------------------------------------------------------


class Ones(torch.autograd.Function):
    """Makes a tensor of nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.ones(16)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Counting(nn.Module):
    """Makes as many numbers as are positive: opaque, as their number depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x[x > 0].shape[0]).sum()


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:captured as opaque")
@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda x: torch.relu(x) + x.new_zeros(16), False),
        (lambda x: x + torch.arange(16.0), True),
        (lambda x: x + torch.arange(16.0, device=x.device), False),
        (lambda x: x + torch.full((16,), x.detach().mean()), True),
        (Counting(), True),
        (Ones.apply, True),
    ],
)
def test_torch_is_told_of_the_device_where_tensors_are_made_of_nothing(
    made: Callable[[Tensor], Tensor], told: bool
) -> None:
    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.made = made

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.second(self.made(self.first(x)))
            return found

    found = pdcompile.compile(
        Making(), (torch.ones(8, 16),), example_target=torch.ones(8, 16), stages=2,
        loss_fn=nn.functional.mse_loss, constraints=(pdcompile.CutBefore("second"),), **PLANNED,
    ).prepare()._session.compiled  # fmt: skip
    assert [found.makes_tensors(stage) for stage in range(2)] == [told, False]
