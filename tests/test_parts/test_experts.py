"""Experts that are divided between parts: layouts, products by groups, training on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile.batch import flatten_call, resolve_batch
from pdcompile.errors import ConfigError
from pdcompile.ir.graph import Capture
from pdcompile.parts.conversions import own_grouped_mm
from pdcompile.parts.shard import Split
from pdcompile.parts.turns import in_turns
from pdcompile.passes.parts.layout import SUM
from pdcompile.passes.parts.layouts import Layouts, lay_out
from pdcompile.passes.parts.written import write
from tests.helpers.captures import capture_once
from tests.helpers.divided import batch_of, model_of
from tests.helpers.launch import processes
from tests.test_parts.test_pipelines import COMMON, RANKS, agree, checkpoints_fit


def laid_out(model: nn.Module, split: Split, parts: int = 2, **given: Tensor) -> Layouts:
    return lay_out(capture_of(model, **given).train, split, parts)


def capture_of(model: nn.Module, **given: Tensor) -> Capture:
    flat = flatten_call(model, (), given, None)
    return capture_once(model, flat, resolve_batch(flat), None)


def conversions(layouts: Layouts) -> list[str]:
    graph = write(layouts).graph
    return [op.target.rpartition(".")[2] for op in graph.ops if "_parts." in op.target]


def test_tokens_of_a_switch_are_exchanged_and_its_matrices_divided() -> None:
    model, (inputs, _) = model_of("switch"), batch_of("switch")
    found = laid_out(model, "experts+samples", **inputs)
    assert {str(one) for one in found.shards.values()} == {
        f"layers.{layer}.switch.{name}: dimension 0 = (4 in 2 parts)"
        for layer in (0, 1) for name in ("up", "down")
    }  # fmt: skip
    assert not found.stays
    einsums = {n: axis for n, axis in found.axes.items() if n.startswith("einsum")}
    assert [*einsums.values()] == ["samples", "experts", "experts", "samples"] * 2
    # there and back in each layer, and the means of the loss of the router
    assert conversions(found).count("swap") == 8
    by_width = laid_out(model, "experts", **inputs)
    assert by_width.axes["layers_0_qkv"] == "heads"
    assert by_width.axes["layers_0_switch_shared_0"] == "hidden"
    assert by_width.axes["einsum_1"] == "experts"


@pytest.mark.parametrize("counts", [[3, 0, 5, 4], [0, 0, 0, 12], [12, 0, 0, 0], [0, 7, 5, 0]])
@pytest.mark.parametrize("parts", [2, 4])
def test_products_by_groups_of_own_experts(counts: list[int], parts: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(12, 8, generator=draw), torch.randn(4, 8, 16, generator=draw)
    above = torch.randn(12, 16, generator=draw)
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def run(x: Tensor, w: Tensor, function: Any) -> list[Tensor]:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        made = function(x, w, offs=ends)
        return [made, *torch.autograd.grad(made, (x, w), above)]

    whole = run(x, w, F.grouped_mm)
    each = w.chunk(parts)
    of_parts = in_turns([lambda p=p: run(x, each[p], own_grouped_mm) for p in range(parts)])
    made, of_x, of_w = zip(*of_parts, strict=True)
    torch.testing.assert_close(sum(made), whole[0])
    torch.testing.assert_close(sum(of_x), whole[1])
    torch.testing.assert_close(torch.cat(of_w), whole[2])


@pytest.mark.parametrize("split", [
    "experts", pytest.param("experts+samples", marks=pytest.mark.slow)
])  # fmt: skip
def test_shares_are_summed_once_tokens_are_mixed(split: Split) -> None:
    found = laid_out(model_of("mixtral"), split, **batch_of("mixtral")[0])
    names = [op.name for op in found.graph.ops]
    chain = names[names.index("grouped_mm") : names.index("add_8")]
    shares = [name for name in chain if found.of(name) == SUM]
    assert [name.rstrip("_0123456789") for name in shares] == [
        "grouped_mm", "chunk", "chunk", "chunk", "silu", "mul", "grouped_mm", "mul", "getitem",
        "view", "sum", "reshape",
    ]  # fmt: skip
    made = conversions(found)
    assert made.count("own_grouped_mm") == 4
    assert not found.stays
    assert {f for f in found.shards if "experts" in f} == {
        f"model.layers.{layer}.mlp.experts.{name}_proj"
        for layer in (0, 1) for name in ("gate_up", "down")
    }  # fmt: skip


class Uneven(nn.Module):
    """Two layers of experts, in different numbers."""

    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(count, 8, 8) for count in counts)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.bmm(x.expand(len(weight), -1, -1).relu(), weight).sum(0)
        return x.mean()


def test_what_has_no_experts_to_divide_is_refused() -> None:
    rows = {"x": torch.randn(6, 8)}
    for model, parts, given, message, remedy in (
        (Uneven(6, 6), 4, rows, r"experts \(6\) of .* do not divide by 4", "parts=2 or 3 or 6"),
        (model_of("mlp"), 2, batch_of("mlp")[0], "no product has a matrix", "split='width'"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            laid_out(model, "experts", parts, **given)
        assert remedy in (caught.value.remedy or "")
    (note,) = laid_out(Uneven(6, 4), "experts", 4, **rows).notes
    assert "experts (6)" in note
    assert "split='width'" in note


@pytest.mark.parametrize("how", [
    "eager", pytest.param("batched_mm", marks=pytest.mark.slow)
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:captured as opaque")
def test_experts_one_by_one_are_refused_with_what_to_set(how: str) -> None:
    model: Any = model_of("mixtral")
    model.set_experts_implementation(how)
    del model.model.layers[1:]
    graph = capture_of(model, **batch_of("mixtral")[0]).train
    with pytest.raises(ConfigError, match="one by one, or looks up") as caught:
        lay_out(graph, "experts", 2)
    assert "experts_implementation='grouped_mm'" in (caught.value.remedy or "")
    notes = lay_out(graph, "width", 2).notes
    assert any("experts_implementation" in note for note in notes) == (how == "eager")


def test_one_expert_is_no_axis() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.ones(1, dtype=torch.int32) * len(x)
            return F.grouped_mm(x, self.weight, offs=ends).square().mean()

    found = laid_out(One(), "width", x=torch.randn(6, 8))
    assert found.axes["grouped_mm"] == "hidden"


class Mixed(nn.Module):
    """Products by groups, each followed by something else."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(4, 8, 8)) for _ in range(2))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        ends = torch.histc(ids.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        back = torch.histc(ids.float() // 2, 4, 0, 3).cumsum(0, dtype=torch.int32)
        turned = torch.arange(len(x)).flip(0)

        def own(offs: Tensor = ends) -> Tensor:
            return F.grouped_mm(x, self.one, offs=offs)

        def then(y: Tensor) -> Tensor:
            return F.grouped_mm(y, self.other, offs=ends)

        floored = own().view(2, -1, 8).sum(0).div(0.1, rounding_mode="floor")
        found = [
            own() + 1, own().sigmoid(), own() * own(back), own() * own(), own()[turned].relu(),
            own()[turned] * own()[turned].relu(), floored,
            own().transpose(0, 1).relu().t(), own().view(-1, 1, 8).flatten(0, 1), own().max(0)[0],
            own().flip(0), (own() * x).neg().mean(), own() * own()[:1], own() * (own() * x).sum(0),
            then(own().sigmoid()), then(own(back)), then(own()[turned]), then(own().relu()),
            then(own()[:, :4].repeat(1, 2)), then(own().mul_(2).relu_()) - own() * own(),
        ]  # fmt: skip
        return sum(one.square().mean() for one in found)  # type: ignore[return-value]


def test_what_is_not_zero_for_zero_or_mixes_rows_is_computed_of_totals() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(12, 8), "ids": torch.arange(12) % 4}
    pipe = pdcompile.compile(
        Mixed(), parts=2, split="experts", stages=1, microbatches=2, costs="estimated",
        optimizer=None,
    )  # fmt: skip
    pipe.prepare(**inputs)  # verifies loss and gradients of two parts


@pytest.mark.parametrize(
    ("split", "clip"),
    [pytest.param("experts", None, marks=pytest.mark.slow), ("experts+samples", 0.5)],
)
def test_a_switch_on_four_ranks_trains_as_plain_pytorch(
    split: Split, clip: float | None, tmp_path: Path
) -> None:
    setting = {"model": "switch", "parts": 2, "stages": 2, "split": split, "max_grad_norm": clip}
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps([setting])), 1)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["experts", "experts+samples"])
@pytest.mark.parametrize("model", ["mixtral", "qwen2moe", "deepseek"])
def test_models_of_hugging_face(model: str, split: str, tmp_path: Path) -> None:
    settings = [{"model": model, "parts": 2, "stages": 2, "split": split}]
    settings += [{"model": model, "parts": 4, "split": "experts"}] * (split == "experts")
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "2bw", "interleaved"])
def test_a_switch_under_every_schedule(schedule: str, tmp_path: Path) -> None:
    stages = 4 if schedule == "interleaved" else 2
    settings = [{"model": "switch", "parts": 2, "stages": stages, "schedule": schedule,
                 "split": split} for split in ("experts", "experts+samples")]  # fmt: skip
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
def test_a_switch_with_replicas_recomputation_and_whole_stages(tmp_path: Path) -> None:
    settings = [
        {"model": "switch", "parts": 2, "replicas": 2, "stages": 1, "split": "experts+samples",
         "recompute": True},
        {"model": "switch", "parts": 4, "split": "experts"},
    ]  # fmt: skip
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(settings)), len(settings))
    settings = [{"model": "switch", "parts": [2, 1], "split": "experts", "cluster": "1x3"}]
    agree(processes(COMMON + RANKS, 3, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
def test_shares_of_a_sum_cross_from_stage_to_stage(tmp_path: Path) -> None:
    first = "for kwargs in json.loads(sys.argv[1]):"
    cut = "kwargs['constraints'] = [CutBefore('model.layers.1.mlp.experts.act_fn')]"
    script = RANKS.replace(
        f"    {first}",
        f"    from pdcompile.problem.constraints import CutBefore\n    {first}\n        {cut}",
    )
    settings = [{"model": "mixtral", "parts": 2, "stages": 2, "split": split}
                for split in ("experts", "experts+samples")]  # fmt: skip
    agree(processes(COMMON + script, 4, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
def test_the_planner_weighs_splits_by_experts(tmp_path: Path) -> None:
    settings = [{"model": "switch", "parts": "any", "stages": 2}]
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(settings)), len(settings))


EVALUATED = """
    for split, autocast, most in json.loads(sys.argv[1]):
        options = {"microbatches": 4, "autocast": autocast, "outputs": "everything",
                   "optimizer": partial(torch.optim.SGD, lr=0.1)}
        (given, _), model = batch_of("switch"), model_of("switch")
        reference = pdcompile.reference(copy.deepcopy(model), **options)
        options |= {"stages": 2, "parts": 2, "split": split, "costs": "estimated"}
        with pdcompile.compile(model, **options) as pipe:
            for _ in range(2):
                found, expected = pipe.step(**given), reference.step(**given)
            apart = abs(float(found.loss) - float(expected.loss))
            found, expected = pipe.eval_step(**given), reference.eval_step(**given)
            if pipe.ranks == (2,):
                worst = (found.outputs["logits"] - expected.outputs["logits"]).abs().max().item()
                apart = max(apart, abs(found.loss - expected.loss))
                print(f"AGREE {apart < most and worst < most} {apart:.1e} {worst:.1e} {split}")
"""


@pytest.mark.slow
def test_evaluation_with_another_capacity_and_routers_in_full_precision(tmp_path: Path) -> None:
    settings = [(split, None, 2e-5) for split in ("experts", "experts+samples")]
    settings += [("experts+samples", "bfloat16", 2e-2)]
    agree(processes(COMMON + EVALUATED, 4, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
def test_checkpoints_of_experts_fit_any_other_plan(tmp_path: Path) -> None:
    settings = [{"parts": 2, "stages": 2, "split": "experts"}, {"stages": 4},
                {"parts": 4, "split": "experts"}, {"parts": 2, "stages": 2, "split": "samples"},
                {"parts": 2, "stages": 2, "split": "experts+samples"}]  # fmt: skip
    checkpoints_fit("adamw", settings, tmp_path, model="switch")
