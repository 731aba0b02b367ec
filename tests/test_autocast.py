"""The option autocast=: capture, stages and reference run in the region, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.eager.autocast import autocast_text
from pdcompile.errors import ConfigError, PdcompileError
from pdcompile.passes.trace import trace
from pdcompile.problem.constraints import CutBefore
from tests.helpers.captures import captured, rows

pytestmark = pytest.mark.usefixtures("captured_anew")


class Shared(nn.Module):
    """One linear layer twice, next to each other, and regions that the model opens itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.first(x).relu())
        with torch.autocast("cpu", enabled=False):
            weight = self.gate(x.float()).softmax(-1)  # a router in full precision
        x = self.twice(self.norm(x * weight.to(x.dtype)))
        return self.head(x)


def seeded(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind()


def square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def trajectory(pipe: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for step in range(2):
        result = pipe.forward_backward(rows(8, seed=step), target=rows(8, seed=9 + step))
        found += [torch.as_tensor(float(result.loss)), result.outputs]
        state = dict(pipe.named_parameters())
        found += [state[name].grad.clone() for name in sorted(state)]
        pipe.zero_grad()
    found.append(pipe.eval_step(rows(8, seed=5), target=rows(8, seed=6)).outputs)
    return found


def reference_of(autocast: Any) -> list[Tensor]:
    model = seeded(Shared)
    pipe = pdcompile.reference(
        model, loss_fn=square, optimizer=None, microbatches=2, autocast=autocast
    )
    found: list[Tensor] = []
    for step in range(2):
        result = pipe.step(rows(8, seed=step), target=rows(8, seed=9 + step))
        found += [torch.as_tensor(float(result.loss)), result.outputs]
        named = dict(model.named_parameters())
        found += [named[name].grad.clone() for name in sorted(named)]
        model.zero_grad()
    found.append(pipe.eval_step(rows(8, seed=5), target=rows(8, seed=6)).outputs)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "autocast", ["bfloat16", torch.bfloat16, torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["name", "dtype", "object"],
)  # fmt: skip
def test_stages_equal_the_reference(autocast: Any, tmp_path: Path) -> None:
    expected = reference_of(autocast)
    assert expected[1].dtype is torch.bfloat16
    pipe = pdcompile.compile(
        seeded(Shared), rows(8), example_target=rows(8), loss_fn=square, optimizer=None,
        stages=3, microbatches=2, costs="estimated", autocast=autocast,
    )  # fmt: skip
    found = trajectory(pipe)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert pipe.plan.training.autocast == "cpu:bfloat16"
    owners = {i for i, stage in enumerate(pipe.plan.stages) if "twice.weight" in stage.parameters}
    assert len(owners) == 1  # its gradients are summed before they are cast back
    pipe.dump(tmp_path)
    text = "\n".join(path.read_text() for path in sorted(tmp_path.glob("stage_*.py")))
    assert 'with torch.autocast("cpu", dtype=torch.bfloat16):' in text
    assert 'with torch.autocast("cpu", enabled=False):' in text


def test_every_op_carries_its_region() -> None:
    flat = captured(seeded(Shared), rows(), loss_fn=square, target=rows(), autocast="cpu:bfloat16")
    regions = {op.module_path: op.autocast for op in flat.train.ops}
    assert regions["first"] == regions["twice"] == "cpu:bfloat16"
    assert regions["gate"] == "cpu:off"
    value = next(op.name for op in flat.train.ops if op.module_path == "gate")
    assert flat.train.values[value].dtype == "float32"
    assert all(op.autocast == "cpu:bfloat16" for op in flat.train.ops if op.region == "loss")
    plain = trace(seeded(Shared), rows())
    assert {op.autocast for op in plain.ops} == {None}


def test_a_cut_between_two_uses_is_refused() -> None:
    with pytest.raises(PdcompileError, match="have to share a stage"):
        pdcompile.compile(
            seeded(Shared), rows(8), example_target=rows(8), loss_fn=square, optimizer=None,
            stages=2, costs="estimated", autocast="bfloat16", constraints=(CutBefore("norm"),),
        )  # fmt: skip


def test_a_plan_says_which_region_it_is_for() -> None:
    def make(**options: Any) -> Any:
        return pdcompile.compile(
            seeded(Shared), rows(8), example_target=rows(8), loss_fn=square, optimizer=None,
            stages=2, costs="estimated", **options,
        )  # fmt: skip

    plan = make(autocast="bfloat16").plan
    assert plan.fingerprint != make().plan.fingerprint
    assert make(plan=plan).plan.training.autocast == "cpu:bfloat16"
    for other in ("float16", torch.autocast("cpu", torch.bfloat16, enabled=False)):
        with pytest.raises(ConfigError, match="the plan has autocast='cpu:bfloat16', but"):
            make(plan=plan, autocast=other)


def test_a_region_names_its_own_device() -> None:
    assert autocast_text("cuda:bfloat16") == "cuda:bfloat16"
    assert autocast_text("bfloat16", "cuda") == "cuda:bfloat16"
    assert autocast_text(autocast_text(torch.float16, "cuda")) == "cuda:float16"


@pytest.mark.parametrize(
    "given",
    [
        "float32",
        "tpu:bfloat16",
        "cuda:int8",
        torch.int8,
        3,
        torch.autocast("cpu", cache_enabled=False),
    ],
)
def test_what_is_no_region(given: Any) -> None:
    for make in (pdcompile.compile, pdcompile.reference):
        with pytest.raises(PdcompileError, match="autocast"):
            make(seeded(Shared), loss_fn=square, microbatches=2, autocast=given)
