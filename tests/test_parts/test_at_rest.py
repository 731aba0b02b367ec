"""Weights that are split at rest: gathered before use, and again in backward (FSDP, ZeRO-3)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from examples.gpt import GPT, loss_fn
from pdcompile.batch import flatten_call, resolve_batch
from pdcompile.ir.records import UNSHARD
from pdcompile.parts.conversions import Alone, resharding, unshard, using
from pdcompile.passes.costs.rehearsal.live_storages import LiveStorages
from pdcompile.passes.parts.layouts import lay_out
from pdcompile.passes.parts.written import write
from pdcompile.passes.trace import capture
from pdcompile.plan import Plan
from tests.helpers.launch import processes
from tests.test_parts.test_pipelines import COMMON, RANKS, agree, checkpoints_fit

SPLIT = "weights+samples"


def gpt(**options: Any) -> pdcompile.Pipeline:
    torch.manual_seed(0)
    ids = torch.randint(256, (8, 16))
    return pdcompile.compile(
        GPT(2, 64, 4, 16), ids, example_target=ids, loss_fn=loss_fn, costs="estimated",
        cluster="1x4", microbatches=2, **options,
    )  # fmt: skip


def test_autograd_keeps_no_gathered_weight_and_gradients_are_the_same() -> None:
    found: list[tuple[Tensor, ...]] = []
    for again in (False, True):
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(32, 64)), torch.randn(8, 64, requires_grad=True)
        meter = LiveStorages([weight, x])
        with using(Alone(2)), meter, resharding() if again else torch.enable_grad():
            y = F.linear(F.linear(x, unshard(weight, 0)).exp(), unshard(weight, 0).t())
        kept = 2 * 64 * 64 * 4 * (not again)
        assert meter.now_bytes == kept + 2 * 8 * 64 * 4  # beside the results of exp and of y
        with using(Alone(2)):
            y.sum().backward()
        assert weight.grad is not None
        assert x.grad is not None
        found.append((y.detach(), weight.grad, x.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_autocast_casts_is_gathered_in_its_dtype() -> None:
    """Half the bytes, which autograd does not keep, and the gradients of casts after the gather."""
    found: list[tuple[Tensor, ...]] = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(32, 64)), torch.randn(8, 64, requires_grad=True)
        meter, region = LiveStorages([weight, x]), torch.autocast("cpu", torch.bfloat16)
        with using(Alone(2)), meter, region, resharding():
            y = F.linear(x, unshard(weight, 0, dtype=dtype))
        kept = 2 * 64 * 64 * (dtype is None)  # the copy that autocast made
        assert meter.now_bytes == kept + 2 * 2 * 8 * 64
        with using(Alone(2)):
            y.sum().backward()
        assert weight.grad is not None
        assert x.grad is not None
        assert weight.grad.dtype == torch.float32
        found.append((y.detach(), weight.grad, x.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_memory_that_came_again_is_no_weight() -> None:
    """Weights die one by one, and activations come to lie where they were."""
    weight, x = nn.Parameter(torch.randn(32, 64)), torch.randn(64, 64, requires_grad=True)
    with using(Alone(2)):
        with resharding():
            y = x
            for _ in range(20):
                y = F.linear(y, unshard(weight, 0)).sin()
        y.sum().backward()
        own, weight.grad, x.grad = (x.grad, None, None)
        y = x
        for _ in range(20):
            y = F.linear(y, unshard(weight, 0)).sin()
        y.sum().backward()
    assert own is not None
    assert x.grad is not None
    assert torch.equal(own, x.grad)


def _conjugate(weight: Tensor) -> Tensor:
    return torch.view_as_complex(weight).conj()


@pytest.mark.parametrize("view", [torch.view_as_complex, _conjugate])
def test_a_view_of_another_type_comes_back_as_it_was(view: Callable[[Tensor], Tensor]) -> None:
    found: list[Tensor] = []
    for again in (False, True):
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(4, 6, 2)), torch.randn(8, 1, 1, 1, requires_grad=True)
        with using(Alone(2)), resharding() if again else torch.enable_grad():
            (x * view(unshard(weight, 0))).abs().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("split", ["samples", SPLIT])
def test_a_loss_of_whole_outputs_that_training_does_not_keep(split: str) -> None:
    """The loss wants them gathered; nobody else does."""
    x = torch.randn(8, 8)
    pdcompile.compile(
        nn.Linear(8, 8), x, example_target=x, loss_fn=F.mse_loss, costs="estimated",
        cluster="1x2", microbatches=2, parts=2, stages=1, split=split, outputs="none",
    )  # fmt: skip


def test_children_that_are_named_by_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipe = pdcompile.compile(
        model, torch.randn(8, 8), example_target=torch.ones(8, 8), loss_fn=F.mse_loss,
        costs="estimated", cluster="1x2",
        microbatches=2, parts=2, stages=1, split=SPLIT,
    )  # fmt: skip
    assert Plan.from_json(pipe.plan.to_json()) == pipe.plan


def test_a_part_holds_its_share_of_the_weights_and_one_whole_at_a_time() -> None:
    samples, at_rest = (gpt(parts=2, split=one, replicas=2, stages=1).plan for one in
                        ("samples", SPLIT))  # fmt: skip
    (whole,), (own,) = samples.stages, at_rest.stages
    vectors = sum(one.numel() for one in GPT(2, 64, 4, 16).parameters() if one.dim() == 1) * 4
    assert own.parameter_bytes == (whole.parameter_bytes - vectors) / 2 + vectors
    assert own.saved_bytes == whole.saved_bytes
    largest = 256 * 64 * 4
    assert whole.workspace_bytes <= own.workspace_bytes <= whole.workspace_bytes + largest
    assert own.backward_seconds > whole.backward_seconds


def test_no_gathered_weight_crosses_stages() -> None:
    plan = gpt(parts=2, split=SPLIT, stages=2).plan
    assert not [edge.value for edge in plan.edges if "unshard" in edge.value]
    assert "as 2 parts by weights+samples they were compared" in plan.notes[-1]


def test_under_autocast_weights_are_gathered_in_half_precision() -> None:
    """The factors of products; a table as it is."""
    torch.manual_seed(0)
    ids = torch.randint(256, (8, 16))
    flat = flatten_call(GPT(2, 64, 4, 16), (ids,), {}, ids)
    found = capture(GPT(2, 64, 4, 16), flat, resolve_batch(flat), loss_fn, autocast="bfloat16")
    ops = write(lay_out(found.train, SPLIT, 2)).graph.ops
    gathered = {op.name: dict(op.kwargs) for op in ops if op.target == UNSHARD}
    in_half = {name for name, given in gathered.items() if "dtype" in given}
    assert gathered.keys() - in_half == {"tokens_weight_unshard"}
    assert len(in_half) == 2 * 4 + 1


BESIDE_SAMPLES = """
    states = []
    for split in ("samples", "weights+samples"):
        model, (inputs, target) = model_of("gpt"), batch_of("gpt")
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        with compiled(model, optimizer=optimizer, parts=2, stages=1, split=split,
                      autocast="bfloat16") as pipe:
            pipe.step(**inputs, target=target)
            states.append(pipe.full_state_dict())
    if int(os.environ["RANK"]) == 0:
        worst = max((states[1][k] - v).abs().max().item() for k, v in states[0].items())
        print("AGREE", worst < 1e-7, worst)  # sums of microbatches and parts in another order
"""


def test_under_autocast_they_train_as_whole_ones_do(tmp_path: Path) -> None:
    agree(processes(COMMON + BESIDE_SAMPLES, 2, tmp_path), 1)


FAST = [
    {"parts": 4, "stages": 1, "split": SPLIT, "microbatches": 2},
    {"parts": 2, "stages": 2, "split": SPLIT, "schedule": "2bw", "max_grad_norm": 0.5},
    {"parts": 2, "replicas": 2, "stages": 1, "split": SPLIT, "updates": "home"},
]


def test_gpt_trains_as_plain_pytorch(tmp_path: Path) -> None:
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(FAST)), len(FAST))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama", "t5", "bert", "vit", "mlp"])
def test_models_train_as_plain_pytorch(model: str, tmp_path: Path) -> None:
    common = {"model": model, "parts": 2, "stages": 2, "split": SPLIT}
    settings = [common, {**common, "recompute": True}]
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
def test_whole_stages_beside_divided_ones(tmp_path: Path) -> None:
    settings = [{"parts": one, "split": SPLIT} for one in ([2, 1], [1, 2])]
    agree(processes(COMMON + RANKS, 3, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
def test_under_every_schedule(tmp_path: Path) -> None:
    settings = [{"parts": 2, "split": SPLIT, "schedule": name, "stages": 2}
                for name in ("gpipe", "1f1b", "zb-h1")]  # fmt: skip
    settings += [{"parts": 2, "split": SPLIT, "schedule": name, "stages": 4}
                 for name in ("interleaved", "zb-v")]  # fmt: skip
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoints_fit_any_other_plan(optimizer: str, tmp_path: Path) -> None:
    settings = [{"parts": 2, "stages": 2, "split": SPLIT}, {"stages": 4},
                {"parts": 4, "split": SPLIT, "microbatches": 2},
                {"parts": 2, "stages": 2}]  # fmt: skip
    checkpoints_fit(optimizer, settings, tmp_path)
