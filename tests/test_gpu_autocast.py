"""Models on the CPU in the autocast region of GPUs: captured, planned and compared without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.batch import flatten_call
from pdcompile.compiled import Compiled
from pdcompile.driver import build
from pdcompile.eager.autocast import NO_CASTS
from pdcompile.errors import ConfigError, TraceError, VerifyError
from pdcompile.options import Options
from pdcompile.passes.trace import subject
from pdcompile.passes.trace.comparison.steps import ModelFails
from pdcompile.passes.verify.comparison import Comparison
from pdcompile.plan import Plan
from pdcompile.releases.torch_internals import has_kernel
from tests.helpers import models
from tests.helpers.alike import WORKLOAD, Call
from tests.helpers.cases import case
from tests.test_codegen_wild import run_pipeline_file

GPUS = pdcompile.Cluster.local(2, kind="a100-80")
CPUS = pdcompile.Cluster.local(2)


def planned(model: nn.Module, cluster: pdcompile.Cluster = GPUS, **options: Any) -> Compiled:
    """Compiled for machines that are not here."""
    known = type(model).__name__.lower() in ("gpt", "mlp", "convnet", "unet")
    like: Any = model if known else "mlp"
    x, y = models.batch_for(like, 8)
    given = {
        "loss_fn": models.loss_for(like), "stages": 2, "microbatches": 4, "costs": "estimated",
        "optimizer": partial(torch.optim.AdamW, lr=1e-3), "progress": False,
        "autocast": "bfloat16", "cluster": cluster, "time_limit": 0,
        "verify": "auto" if cluster is GPUS else "off",
    }  # fmt: skip
    return build(model, flatten_call(model, (x,), {}, y), Options.given(given | options))


class Casting(nn.Module):
    """(b, 16) -> (b, 16), by `function` between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.norm(self.function(self.first(x))))
        return found


def dtypes(found: Compiled) -> dict[str, str]:
    return {name: value.dtype for name, value in found.capture.train.values.items()}


def _many(x: Tensor) -> Tensor:
    """Calls of which each has the dtype of its op by the region's lists, of x in bfloat16."""
    wide = F.softmax(x, dim=-1) + torch.exp(x) + F.layer_norm(x, (16,)) + x.sum(-1, keepdim=True)
    return wide + x.float() @ x.t().float() @ x + F.gelu(x)


small_gpt = partial(models.gpt, layers=1)


def test_ops_have_the_dtypes_of_the_devices_that_the_plan_is_for() -> None:
    """The lists of ops are those in torch's documentation of autocast."""
    model = Casting(_many)
    there, here = planned(model), planned(model, CPUS, verify="auto")
    assert (there.plan.training.autocast, here.plan.training.autocast) == (
        "cuda:bfloat16", "cpu:bfloat16",
    )  # fmt: skip
    for name in ("softmax", "exp", "layer_norm", "sum_1"):
        assert (dtypes(there)[name], dtypes(here)[name]) == ("float32", "bfloat16"), name
    for name in ("matmul", "matmul_1", "gelu"):
        assert dtypes(there)[name] == dtypes(here)[name] == "bfloat16", name
    assert dtypes(there)["norm"] == "float32" == dtypes(there)[there.capture.train.loss or ""]
    assert list(dtypes(there)) == list(dtypes(here))
    assert not any("region" in note for note in there.plan.notes)
    said = "bit for bit on the CPU, with the casts of cuda:bfloat16 ("
    assert said in str(there.verification)
    assert "with the casts of" not in str(here.verification)


@pytest.mark.parametrize(
    ("build", "meta"),
    [
        case((build, meta) in ((small_gpt, False), (models.mlp, True)), build, meta)
        for meta in (False, True)
        for build in (small_gpt, models.unet, models.convnet, models.mlp)
    ],
)
@pytest.mark.usefixtures("captured_anew")
def test_all_models_are_captured_in_the_region_of_gpus(
    build: Callable[[], nn.Module], meta: bool, fast: bool
) -> None:
    model = build()
    verify = "auto" if meta or fast else "full"
    there = planned(model.to("meta") if meta else model, verify=verify)
    here = planned(build(), CPUS)
    assert list(dtypes(there)) == list(dtypes(here))
    assert Plan.from_json(there.plan.to_json()) == there.plan
    if meta:
        assert there.verification is not None
        assert there.verification.unverified


def test_weights_that_share_memory_still_do() -> None:
    class Shared(Casting):
        def __init__(self) -> None:
            super().__init__(lambda x: x + self.low.sum() + self.high.sum())
            self.register_buffer("whole", torch.ones(8))
            self.low, self.high = self.whole[:4], self.whole[2:]

        low: Tensor
        high: Tensor
        whole: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.whole.add_(1)
            return super().forward(x)

    there, here = planned(Shared()).capture.train, planned(Shared(), CPUS).capture.train
    assert [op.buffers_written for op in there.ops] == [op.buffers_written for op in here.ops]
    assert there.tensors == here.tensors


class Regions(Casting):
    """Opens regions of its own, for the device of its input."""

    def __init__(self) -> None:
        super().__init__(self.inside)

    def inside(self, x: Tensor) -> Tensor:
        kind = x.device.type
        with torch.autocast(kind, enabled=False):
            plain = x @ x.t()
        with torch.autocast(kind, dtype=torch.float16):
            half = plain @ x
        return half + torch.arange(16, device=x.device)


def test_regions_in_the_model_are_captured(recwarn: pytest.WarningsRecorder) -> None:
    found = planned(Regions())
    ops = {op.name: op.autocast for op in found.capture.train.ops}
    assert (ops["matmul"], ops["matmul_1"]) == ("cuda:off", "cuda:float16")
    assert dtypes(found)["matmul"] == "bfloat16"
    assert dtypes(found)["matmul_1"] == "float16"
    assert not [one for one in recwarn if "CUDA" in str(one.message)]


class ByHand(nn.Module):
    """Results of a GPU's region on `Casting` by softmax, said by casts."""

    def __init__(self, like: Casting) -> None:
        super().__init__()
        self.first, self.norm, self.second = like.first, like.norm, like.second

    def forward(self, x: Tensor) -> Tensor:
        x = F.softmax(_low(self.first, x).float(), dim=-1)
        return _low(self.second, self.norm(x))


def _low(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())


def test_memory_has_the_casts_of_the_region() -> None:
    model = Casting(partial(F.softmax, dim=-1))
    given = {"stages": 1, "cluster": pdcompile.Cluster.local(1, kind="a100-80")}
    ledgers = []
    for one, autocast in ((model, "bfloat16"), (ByHand(model), None)):
        forecast = planned(one, **given, autocast=autocast, loss_fn=_loss).plan.forecast
        assert forecast is not None
        ledgers.append(replace(forecast.ledgers[0], workspace_bytes=0))
    assert ledgers[0] == ledgers[1]


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out.float(), target)


def test_opaque_modules_have_the_dtypes_of_gpus() -> None:
    class Opaque(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.detach().abs().max() > 0)

    model = Casting(lambda x: x)
    model.norm = nn.Sequential(model.norm, Opaque())  # type: ignore[assignment]
    found = planned(model)
    (name,) = (op.name for op in found.capture.train.ops if op.opaque)
    assert dtypes(found)[name] == "float32"  # as the norm before it gives on a GPU


FULL = {"verify": "full"}  # two steps, whatever the model


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (
            torch.zeros_like(x.float()).index_add(0, torch.arange(len(x)), F.softmax(x, -1).float())
            if x.device.type == "cpu"
            else torch.zeros_like(x.float()).index_add(
                0, torch.arange(len(x), device=x.device), F.softmax(x, -1).float()
            )
        ),
        lambda x: F.softmax(x, -1).to(torch.float32) * 2.7,  # a cast of nothing on a GPU
        lambda x: x.exp() * (2 if x.exp().dtype == torch.float32 else 3),
        lambda x: x * (2 if x.dtype == torch.bfloat16 else 3),
        torch.autocast("cuda", enabled=False)(lambda x: x.float() @ x.float().t() @ x.float()),
        lambda x: x @ x.t() @ x if torch.is_autocast_enabled() else x,
        lambda x: x.float() + x.float().to(torch.get_autocast_dtype("cuda")),
    ],
)
def test_models_that_know_the_region_of_gpus_are_compared(
    function: Callable[[Tensor], Tensor],
) -> None:
    assert planned(Casting(function), **FULL).verification is not None


class Routed(nn.Module):
    """(b, 16) -> (b, 16), each sample by the layer that fits it best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(16, 4), nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        found = torch.zeros_like(x)
        for k, layer in enumerate(self.layers):
            rows = torch.where(weights.argmax(-1) == k)[0]
            part = layer(x[rows]) * weights[rows, k][:, None]
            found.index_add_(0, rows, part.to(found.dtype))
        y: Tensor = self.out(found)
        return y


@pytest.mark.slow
@pytest.mark.parametrize("model", [Casting(lambda x: x * x[x > 0].sum()), Routed()])
def test_sizes_by_values_are_captured_without_a_gpu(model: nn.Module) -> None:
    there, here = planned(model, **FULL), planned(model, CPUS)
    assert [op.target for op in there.capture.train.ops if "to" not in op.target] == [
        op.target for op in here.capture.train.ops if "to" not in op.target
    ]


def test_tensors_made_of_nothing_are_on_the_device_as_in_a_stage() -> None:
    found = planned(Casting(lambda x: x + torch.ones(16).cumsum(0)))
    assert found.makes_tensors(0) or found.makes_tensors(1)
    assert "bit for bit" in str(found.verification)


def test_what_fails_on_a_gpu_fails_as_there() -> None:
    with pytest.raises(TraceError, match="computes with a tensor of the CPU") as caught:
        planned(Casting(lambda x: x + torch.ones(16, 16, device="cpu")[x.argmax(-1)]))
    assert "cuda:0" in caught.value.message
    assert "device=x.device" in str(caught.value.remedy)
    with pytest.raises(TraceError, match="unsafe to autocast"):
        planned(Casting(lambda x: x + F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x))))


class Recurrent(nn.Module):
    """(b, 16) -> (b, 16), by a recurrent layer or cell between two layers."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(16, 16), between, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        found = self.between(self.first(x))
        while isinstance(found, tuple):
            found = found[0]
        out: Tensor = self.second(found)
        return out


@pytest.mark.slow
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        *((one, "bfloat16") for one in (nn.GRUCell, nn.LSTMCell, nn.RNNCell)),
        *((one, "float16") for one in (nn.GRU, nn.LSTM, nn.RNN)),  # cuDNN's, in every region
    ],
)
def test_recurrent_layers_are_those_of_cudnn(
    build: Callable[[int, int], nn.Module], dtype: str, meta: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model, before = Recurrent(build(16, 16)), torch.backends.cudnn.enabled
    there = planned(model.to("meta") if meta else model)
    # The rules of these layers are there while a model is captured, and at no other time.
    assert torch.backends.cudnn.enabled is before
    assert not has_kernel("gru.input", "AutocastCUDA")
    found = set(dtypes(there).values()) - {"container"}
    assert found == {"float32", "bfloat16", dtype}
    assert not any(op.opaque for op in there.capture.train.ops)
    assert not [one for one in recwarn if "opaque" in str(one.message)]
    assert list(dtypes(there)) == list(dtypes(planned(Recurrent(build(16, 16)), CPUS)))
    assert meta or "with the casts of cuda:bfloat16 (" in str(there.verification)


def test_a_forward_that_differentiates_is_refused_in_words() -> None:
    def force(x: Tensor) -> Tensor:
        return x + torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]

    with pytest.raises(TraceError, match="differentiates, on fake tensors of a GPU"):
        planned(Casting(force))


def _on_gpu(x: Tensor) -> Tensor:
    return x.sin() if x.is_cuda else x


def _region_of_host(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x.float() @ x.t().float() @ x.float()


def _region_of_device(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x.float() @ x.t().float() @ x.float() + x.new_ones(16, device=x.device)


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", [_on_gpu, _region_of_host])
def test_a_forward_that_asks_for_the_device_differs_in_words(
    function: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(VerifyError, match="on the CPU, with the casts of cuda:bfloat16") as caught:
        planned(Casting(function))
    assert "differs by up to" in caught.value.message
    assert "where forward asks for the device of a tensor" in str(caught.value.remedy)
    planned(Casting(function), verify="off")


def test_the_device_is_asked_without_harm() -> None:
    found = planned(Casting(_region_of_device))
    assert "with the casts of cuda:bfloat16 (" in str(found.verification)


def test_another_region_is_planned_for_with_a_note() -> None:
    plan = planned(models.mlp(), autocast=torch.autocast("cpu", dtype=torch.bfloat16)).plan
    assert plan.training.autocast == "cpu:bfloat16"
    (note,) = (note for note in plan.notes if "region" in note)
    assert note.startswith("the model was captured in the autocast region of cpu, and that of a100")


def test_a_region_that_torch_switched_off_is_not_none() -> None:
    with pytest.warns(UserWarning, match="Disabling autocast"):
        region = torch.autocast("cuda", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="finds no GPU here and switches"):
        planned(models.mlp(), autocast=region)


@pytest.mark.slow
def test_measured_costs_open_the_region_quietly(
    recwarn: pytest.WarningsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCOMPILE_CACHE", str(tmp_path))
    planned(Casting(partial(F.softmax, dim=-1)), costs="measured", refine=True)
    assert not [one for one in recwarn if "CUDA is not available" in str(one.message)]


def test_ops_that_the_cpu_casts_otherwise_are_compared() -> None:
    model = Casting(lambda x: F.softmax(x, dim=-1).view(torch.float32))  # half as wide of bfloat16
    with pytest.raises(TraceError):
        planned(model, CPUS)
    assert "with the casts of cuda:bfloat16" in str(planned(model).verification)


def test_what_fails_on_the_cpu_is_planned_and_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers fail there that have no kernel for the CPU in float16."""

    def fails(*_: Any, **__: Any) -> int:
        raise ModelFails("the model itself fails on these inputs")

    monkeypatch.setattr(Comparison, "run", fails)
    with pytest.raises(ModelFails):
        planned(models.mlp(), CPUS, verify="auto")
    said = "evaluation: on the CPU, with the casts of cuda:bfloat16, the model itself fails on"
    assert said in str(planned(models.mlp()).verification)


@pytest.mark.usefixtures("captured_anew")
def test_a_torch_without_fake_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "fake_gpus_have_gradients", lambda: False)
    with pytest.raises(TraceError, match="does not record fake tensors of a GPU here"):
        planned(models.mlp())
    assert planned(models.mlp(), CPUS).plan.training.autocast == "cpu:bfloat16"


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_files_for_gpus_say_that_they_cast_nothing_on_the_cpu() -> None:
    there, here = planned(models.mlp()).sources, planned(models.mlp(), CPUS).sources
    assert NO_CASTS in run_pipeline_file(there)
    assert "casts nothing" not in run_pipeline_file(here)
    on_a_gpu = 'if torch.cuda.is_available():\n        torch.set_default_device("cuda")'
    assert on_a_gpu in there.files["pipeline.py"]


def test_the_command_plans_for_gpus_in_their_region(call: Call) -> None:
    code, out, _ = call("plan", WORKLOAD, "--cluster", "1x2:a100", "--autocast", "bfloat16")
    said = " ".join(out.split())
    assert code == 0
    assert "with the casts of cuda:bfloat16" in said
    assert "captured in the autocast region" not in said
