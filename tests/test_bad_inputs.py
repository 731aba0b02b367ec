"""Inputs that cannot work end in one clear error of ours, and those that only look odd work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.batch.call import example_call
from pdcompile.errors import (
    ConfigError,
    InfeasibleError,
    InputError,
    LaunchError,
    NotPrepared,
    PdcompileError,
    PlanError,
    TraceError,
)
from tests.helpers import models


def compiled(model: nn.Module, **options: Any) -> Any:
    options.setdefault("loss_fn", F.mse_loss)
    options.setdefault("costs", "estimated")
    options.setdefault("microbatches", 2)
    return pdcompile.compile(model, **options)


def xy(size: int = 4, width: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(size, width), torch.randn(size, width)


@pytest.mark.parametrize("model", [None, "gpt", lambda x: x, nn.Linear])
def test_no_model(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"model"):
        compiled(model)


def test_nothing_before_the_first_step() -> None:
    pipe = compiled(models.mlp())
    for ask in (lambda: pipe.plan, pipe.explain, lambda: pipe.dump("x")):
        with pytest.raises(NotPrepared, match="prepare"):
            ask()


def test_more_stages_than_ops() -> None:
    x, y = xy()
    with pytest.raises(InfeasibleError, match="50 stages"):
        compiled(models.mlp(), stages=50).step(x, target=y)


def test_memory_limit_too_small_for_the_largest_layer() -> None:
    x, y = xy()
    with pytest.raises(InfeasibleError) as caught:
        compiled(models.mlp(), stages=2, memory="1 kB").step(x, target=y)
    assert "layers." in str(caught.value)
    assert "remedy" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        ({"stages": 0}, "stages=0 is below 1", "from 1 up"),
        ({"stages": -1}, "stages", "from 1 up"),
        ({"stages": True}, "stages", "from 1 up"),
        ({"stages": 2.0}, "stages=2.0 is not a whole number", "None: one a device"),
        ({"microbatches": 0}, "microbatches=0 is below 1", "'auto'"),
        ({"microbatches": "many"}, "microbatches", "'auto'"),
        ({"microbatches": 2.0}, "microbatches=2.0 is not a whole number", "'auto'"),
        ({"schedule": "1f2b"}, "schedule", "'1f1b'"),
        ({"schedule": "stash", "max_grad_norm": 1.0}, "stash", "2bw"),
        ({"schedule": "stash"}, "microbatches=2 under schedule='stash'", "microbatches=1"),
        ({"schedule": "vsync"}, "microbatches=2 under schedule='vsync'", "microbatches=1"),
        (
            {"schedule": "vsync", "microbatches": 1, "replicas": (1, 2)},
            "replicas=(1, 2) under schedule='vsync'",
            "one replica",
        ),
        ({"max_grad_norm": 0.0}, "max_grad_norm", "1.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm", "1.0"),
        ({"memory": "16 potatoes"}, "potatoes", "GB"),
        ({"memory": -1}, "memory", "GB"),
        ({"memory": 0.5}, "memory", "GB"),
        ({"loss_reduction": "median"}, "loss_reduction", "'mean', 'sum', or a function"),
        ({"loss_reduction": lambda target: 1}, "loss_reduction", "(args, kwargs, target)"),
        ({"costs": "measure"}, "costs='measure'", "'measured', 'estimated'"),
        ({"costs": None}, "costs", "'measured', 'estimated'"),
        ({"verify": "never"}, "verify", "'auto', 'full'"),
        ({"outputs": "some"}, "outputs", "'none'"),
        ({"cluster": 2}, "cluster=2", "stages=2"),
        ({"cluster": "2y4"}, "2y4", "2x4"),
        ({"cluster": "missing.toml"}, "missing.toml", "2x4"),
        ({"stages": 3, "cluster": pdcompile.Cluster.local(2)}, "3 stages", "stages=2"),
        ({"loss_fn": 3}, "loss_fn", "(output, target) -> scalar"),
        ({"loss_fn": nn.MSELoss}, "loss_fn is the class MSELoss", "loss_fn=MSELoss()"),
        ({"loss_fn": lambda out: out.mean()}, "loss_fn takes (out)", "(output, target)"),
        ({"loss_fn": nn.TripletMarginLoss()}, "loss_fn takes (anchor", "(output, target)"),
        ({"optimizer": "adam"}, "optimizer", "partial(torch.optim.AdamW"),
        ({"optimizer": lambda: None}, "optimizer takes ()", "(parameters)"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)], 0.1)}, "of SGD", "torch.optim.SGD, lr=…"),
        ({"batch_dims": "0"}, "batch_dims='0'", "an int, None"),
        ({"recompute": "some"}, "recompute='some'", "'auto'"),
        ({"recompute": 1}, "recompute=1", "(True, False)"),
        ({"recompute": ()}, "recompute=()", "(True, False)"),
        ({"recompute": (True, "no")}, "recompute=(True, 'no')", "(True, False)"),
        ({"recompute": (True,), "stages": 2}, "stages: 2, but recompute=(True,) has 1", "stages=1"),
        ({"seed": "one"}, "seed", "number"),
        ({"seed": -1}, "seed", "0 or more"),
        ({"keep_model": "no"}, "keep_model", "True"),
        ({"allow_edited": True}, "sources", "folder"),
        ({"constraints": None}, "constraints", "Pin, Together"),
        ({"cut_tolerance": -0.1}, "cut_tolerance=-0.1 is below 0", "0 or more"),
        ({"cut_tolerance": "1 %"}, "cut_tolerance='1 %'", "a number"),
        ({"constraints": ("encoder",)}, "encoder", "Pin, Together"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm", "1.0"),
        ({"group": "gloo"}, "group", "new_group"),
        ({"time_limit": -1.0}, "time_limit", "0 or more"),
        ({"autocast": torch.float32}, "autocast", "bfloat16"),
        ({"autocast": "bfloat"}, "autocast", "bfloat16"),
        ({"grad_scaler": object()}, "grad_scaler", "for example torch.amp.GradScaler"),
        ({"max_staleness": 7}, "max_staleness", "'any'"),
        ({"plan": "missing.json"}, "missing.json", "plan.json"),
        ({"plan": 3}, "plan=3", "plan.json"),
        ({"sources": "missing_folder"}, "missing_folder", "dump"),
    ],
)
def test_options_without_a_meaning_are_refused_at_once(
    options: dict[str, Any], message: str, remedy: str
) -> None:
    with pytest.raises(PdcompileError) as caught:
        compiled(models.mlp(), **options)
    assert message in f"{caught.value.message} {caught.value.where}"
    assert remedy in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 5}, "5 microbatches of a minibatch of 4"),
        ({"memory": 0}, "memory"),
        ({"batch_dims": 7}, "7"),
    ],
)
def test_options_without_a_meaning_for_a_minibatch(options: dict[str, Any], message: str) -> None:
    x, y = xy()
    with pytest.raises(PdcompileError) as caught:
        compiled(models.mlp(), **options).step(x, target=y)
    assert message in str(caught.value)
    assert "\n  remedy: " in str(caught.value)


def test_minibatches_that_do_not_fit_the_first() -> None:
    x, y = xy()
    pipe = compiled(models.mlp(), stages=2)
    pipe.step(x, target=y)
    unfit = [
        (torch.randn(4, 15), y),  # other width
        (x.double(), y),  # other dtype
        (x, torch.randn(3, 16)),  # sizes that disagree
        (x[:0], y[:0]),  # nothing
    ]
    for inputs, target in unfit:
        with pytest.raises(InputError):
            pipe.step(inputs, target=target)
    with pytest.raises(PdcompileError, match="target"):
        pipe.step(x)
    with pytest.raises(PdcompileError, match="forward"):
        pipe.step(x, x, x, target=y)
    assert float(pipe.step(x, target=y).loss) > 0  # none of it broke the pipeline


def test_sizes_that_disagree_at_the_first_step() -> None:
    with pytest.raises(InputError, match="target"):
        compiled(models.mlp(), stages=2).step(torch.randn(4, 16), target=torch.randn(3, 16))


def test_microbatches_that_do_not_divide_the_minibatch() -> None:
    torch.manual_seed(0)
    model, twin = models.mlp(), models.mlp()
    twin.load_state_dict(model.state_dict())
    x, y = xy(7)
    pipe = compiled(model, stages=2, microbatches=3, optimizer=None)
    pipe.step(x, target=y)
    F.mse_loss(twin(x), y).backward()
    for (name, ours), theirs in zip(pipe.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


class Sequences(nn.Module):
    """Its loss is a mean over the samples of a list, or of the rows of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, sequences: Any) -> Tensor:
        each = sequences.unbind() if isinstance(sequences, Tensor) else sequences
        return sum(self.layer(one).sum().square() for one in each) / len(each)  # type: ignore[return-value]


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [pdcompile.compile, pdcompile.reference])
def test_several_microbatches_of_what_cannot_be_split(make: Any) -> None:
    options: dict[str, Any] = {"optimizer": None, "costs": "estimated", "stages": 1}
    model, samples = Sequences(), [torch.randn(8, 6) for _ in range(4)]
    want = model(samples)
    for dims, error, message in (
        (0, InputError, "a list of 4 may have one element for each sample"),
        (None, ConfigError, "2 microbatches are asked for"),
        ({"sequences": None}, ConfigError, "2 microbatches are asked for"),
    ):
        pipe = make(model, microbatches=2, batch_dims=dims, **options)
        with pytest.raises(error, match=message):
            pipe.step(samples)
    whole = make(model, microbatches=1, batch_dims=None, **options)
    stacked = make(model, microbatches=2, **options)
    for result in (whole.step(samples), stacked.step(torch.stack(samples))):
        torch.testing.assert_close(result.loss.wait(), want.detach())


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = models.mlp()

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.inner(x * mask) * scale
        return out


def test_inputs_without_a_batch_dimension() -> None:
    x, y = xy()
    pipe = compiled(Masked(), stages=3)
    result = pipe.step(x, torch.ones(1, 16), torch.tensor(2.0), target=y)
    assert result.outputs.shape == (4, 16)
    with pytest.raises(InputError, match="mask"):
        compiled(Masked(), stages=2).step(x, torch.ones(16), torch.tensor(2.0), target=y)
    named = {"mask": None}
    pipe = compiled(Masked(), stages=2, batch_dims=named)
    pipe.step(x, torch.ones(16), torch.tensor(2.0), target=y)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        times = int(x.abs().sum()) % 3
        for _ in range(times):
            x = self.lin(x)
        return self.lin(-x)


def test_data_dependent_control_flow_is_refused_with_its_line() -> None:
    x, y = xy()
    with pytest.raises(TraceError) as caught:
        compiled(Branching()).step(x, target=y)
    assert "test_bad_inputs.py" in str(caught.value)
    assert "remedy" in str(caught.value)


def test_no_loss_anywhere() -> None:
    x, _ = xy()
    with pytest.raises(PdcompileError, match="loss"):
        compiled(models.mlp(), loss_fn=None).step(x)


def test_a_loss_that_is_not_a_scalar() -> None:
    x, y = xy()
    with pytest.raises(PdcompileError, match="scalar"):
        compiled(models.mlp(), loss_fn=lambda out, target: (out - target) ** 2).step(x, target=y)


def test_a_target_without_a_loss_function() -> None:
    x, y = xy()
    with pytest.raises(PdcompileError, match="target"):
        compiled(models.ReturnsLoss(models.mlp()), loss_fn=None).step(x, y, target=y)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        ("", "2", "RANK"),
        ("zero", "2", "RANK is 'zero'"),
        ("2", "2", "RANK is 2, and WORLD_SIZE is 2"),
        ("0", "two", "WORLD_SIZE is 'two'"),
        ("0", "0", "WORLD_SIZE is '0'"),
    ],
)
def test_an_environment_that_torchrun_did_not_make(
    rank: str, size: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    x, y = xy()
    with pytest.raises(LaunchError, match=message):
        compiled(models.mlp()).step(x, target=y)


def test_a_model_without_weights_can_be_planned_but_not_run() -> None:
    x, y = xy()
    with torch.device("meta"):
        model = models.mlp()
    with pytest.raises(ConfigError, match="meta device"):
        compiled(model, stages=2).step(x, target=y)


def test_devices_that_cannot_run_here_can_be_planned_for_only() -> None:
    x, y = xy()
    devices = (pdcompile.Device("cuda"),) * 2
    cluster = dataclasses.replace(pdcompile.Cluster.local(2), devices=devices)
    with pytest.raises(LaunchError, match="cuda"):
        compiled(models.mlp(), cluster=cluster).step(x, target=y)


def test_evaluation_before_there_is_a_target() -> None:
    x, y = xy()
    pipe = compiled(models.mlp(), stages=2)
    with pytest.raises(InputError, match="target"):
        pipe.predict(x)
    pipe.prepare(x, target=y)
    assert pipe.predict(x).shape == (4, 16)


def test_a_plan_of_another_model() -> None:
    x, y = xy()
    pipe = compiled(models.mlp(), stages=2)
    pipe.step(x, target=y)
    again = compiled(models.mlp(), stages=2, plan=pipe.plan)
    assert float(again.step(x, target=y).loss) > 0
    assert again.plan.stages == pipe.plan.stages
    with pytest.raises(PlanError, match="another model"):
        compiled(models.mlp(layers=5), stages=2, plan=pipe.plan).step(x, target=y)
    with pytest.raises(ConfigError, match="stages"):
        compiled(models.mlp(), stages=3, plan=pipe.plan).step(x, target=y)


class Few(nn.Module):
    """Another computation for one sample, and for more than 16."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x).squeeze())
        return y * min(len(x), 16)


def test_minibatches_for_which_the_model_is_another() -> None:
    def data(size: int) -> dict[str, Tensor]:
        return {"x": torch.ones(size, 4), "target": torch.ones(size, 4)}

    pipe = compiled(Few(), loss_fn=nn.functional.mse_loss, microbatches=2)
    pipe.step(**data(6))
    with pytest.raises(InputError, match="makes one of 1, and the captured model is right for 2"):
        pipe.step(**data(1))
    for size in (3, 2):  # in one microbatch
        pipe.step(**data(size))
    with pytest.raises(InputError, match="makes one of 30, and the captured model is right for 2"):
        pipe.step(**data(60))
    pipe.eval_step(**data(60))  # in four of 15
    pipe.step(**data(5 * 2))
    pipe.close()


def test_a_number_where_a_tensor_was() -> None:
    x, y = xy()
    pipe = compiled(models.mlp(), stages=2)
    pipe.prepare(x, target=y)
    with pytest.raises(InputError, match=r"this input is 0.5, captured was a tensor") as caught:
        pipe.step(x, target=0.5)
    assert caught.value.where == "target"
    pipe.step(x, target=y)
    pipe.close()


def test_a_dict_that_forward_takes_whole_goes_into_a_tuple() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Tensor]) -> Any:
            return self.lin(batch["x"])

    batch = {"x": torch.rand(4, 4)}
    with pytest.raises(InputError, match="missing a required argument: 'batch'") as caught:
        example_call(Whole(), batch)
    assert "takes it as its 'batch', give it in a tuple, (batch,)" in str(caught.value.remedy)
    assert example_call(Whole(), (batch,)).leaves


def test_a_scripted_model_is_refused_by_name() -> None:
    pipe = pdcompile.compile(torch.jit.script(nn.Linear(4, 4)), loss_fn=F.mse_loss)
    with pytest.raises(TraceError, match="TorchScript"):
        pipe.prepare(torch.randn(4, 4), target=torch.randn(4, 4))
