"""Stages against eager: every model, many cuts, training and evaluation, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache

import pytest
import torch

from pdcompile.batch import BatchLayout, FlatCall, example_call, resolve_batch
from pdcompile.errors import VerifyError
from pdcompile.ir.graph import Capture
from pdcompile.ir.stage_interface import Sources
from pdcompile.passes import codegen
from pdcompile.passes.codegen import generate
from pdcompile.passes.trace import capture
from pdcompile.passes.trace.comparison.step_values import distance
from pdcompile.passes.trace.interceptors.process_state import GENERAL_PATH
from pdcompile.passes.verify import step_runs, verify
from tests.helpers import models
from tests.helpers.cuts import cut

MODELS = {
    "gpt": lambda: models.gpt(dropout=0.1, layers=2),
    "gpt_untied": lambda: models.gpt(tied=False, layers=2),
    "gpt_returns_loss": lambda: models.returns_loss(models.gpt(dropout=0.1, layers=2)),
    "mlp": models.mlp,
    "convnet": models.convnet,
    "unet": models.unet,
}


@cache
def captured(name: str) -> tuple[torch.nn.Module, FlatCall, BatchLayout, Capture]:
    model = MODELS[name]()
    if isinstance(model, models.ReturnsLoss):
        flat = example_call(model, models.batch_for(model, 6))
    else:
        inputs, target = models.batch_for(model, 6)
        flat = example_call(model, inputs, target)
    layout = resolve_batch(flat)
    return model, flat, layout, capture(model, flat, layout, loss_of(model), microbatch_size=3)


def loss_of(model: torch.nn.Module):
    return None if isinstance(model, models.ReturnsLoss) else models.loss_for(model)


def num_ops(found: Capture) -> int:
    return sum(op.region == "forward" for op in found.train.ops)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_equal_eager(name, num_stages):
    model, flat, layout, found = captured(name)
    count = num_ops(found)
    plan = cut(found, [count * k // num_stages for k in range(1, num_stages)])
    report = verify(found, plan, generate(found, plan), model, flat, layout, loss_of(model))
    assert report.differences == ()
    assert report.exact
    assert report.rows[0].gradients == len(list(model.parameters()))


@pytest.mark.sample(2)
@pytest.mark.parametrize("position", range(1, 36, 5))
def test_every_cut_through_a_block_equals_eager(position):
    model, flat, layout, found = captured("gpt")
    plan = cut(found, [position])
    report = verify(found, plan, generate(found, plan), model, flat, layout, models.token_loss)
    assert not report.differences


def test_the_model_is_left_as_it_was():
    model, flat, layout, found = captured("convnet")
    plan = cut(found, [4])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.head.weight.grad = torch.full_like(model.head.weight, 3.0)
    model.eval()
    generator = torch.get_rng_state()
    verify(found, plan, generate(found, plan), model, flat, layout, models.class_loss)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert model.head.weight.grad.eq(3.0).all()
    assert not model.training
    assert torch.equal(torch.get_rng_state(), generator)
    model.zero_grad()
    model.train()


def edited(found: Capture, plan, old: str, new: str, file: str = "stage_1.py") -> Sources:
    sources = generate(found, plan)
    assert old in sources.files[file]
    text = sources.files[file].replace(old, new)
    return dataclasses.replace(sources, files={**sources.files, file: text}, edited=(file,))


def test_an_edit_that_changes_the_result_is_reported_by_name():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(linear)", "torch.relu(linear) * 2")
    report = verify(found, plan, sources, model, flat, layout, models.square_loss)
    kinds = {(one.mode, one.what) for one in report.differences}
    assert {("train", "output"), ("train", "loss"), ("train", "gradient")} <= kinds
    assert "layers.0.weight" in {one.name for one in report.differences}
    assert "edited (stage_1.py)" in str(report)
    assert json.loads(report.to_json())["edited"] == ["stage_1.py"]


def test_an_edit_that_changes_nothing_is_no_difference():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(linear)", "torch.relu(linear) * 1")
    assert not verify(found, plan, sources, model, flat, layout, models.square_loss).differences


@pytest.mark.parametrize("factor", [1.03, 1])
def test_an_edit_is_not_hidden_by_the_rounding_of_the_general_path(factor):
    model, flat, layout, _ = captured("mlp")
    given = {"microbatch_size": 3, "autocast": "cpu:bfloat16"}
    found = capture(model, flat, layout, models.square_loss, **given)
    noted = (dataclasses.replace(one, notes=(GENERAL_PATH,)) for one in (found.train, found.eval))
    train, evaluation = noted
    found = dataclasses.replace(found, train=train, eval=evaluation)
    plan = cut(found, [5])
    plan = dataclasses.replace(
        plan, training=dataclasses.replace(plan.training, autocast="cpu:bfloat16")
    )
    sources = edited(found, plan, "torch.relu(linear)", f"torch.relu(linear) * {factor}")
    report = verify(found, plan, sources, model, flat, layout, models.square_loss)
    assert bool(report.differences) == (factor != 1)


@torch.jit.script
def _gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * torch.tanh(y) + x * 0.3


class _Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.c(_gate(self.a(x), self.b(x)))


def test_what_torchscript_rounds_in_its_own_way_is_no_difference():
    """TorchScript's profiling makes other code of a second step; a wrong stage is found still."""
    torch.manual_seed(0)
    model = _Gated()
    flat = example_call(model, torch.randn(8, 8), torch.randn(8, 8))
    layout = resolve_batch(flat, 0)
    with pytest.warns(UserWarning, match="'_gate' is captured as its source"):
        found = capture(model, flat, layout, models.square_loss, microbatch_size=4)
    plan = cut(found, [3])
    given = model, flat, layout, models.square_loss
    report = verify(found, plan, generate(found, plan), *given)
    assert not report.differences
    assert not report.exact
    sources = edited(found, plan, "torch.tanh(b)", "torch.tanh(b) * 1.001")
    assert verify(found, plan, sources, *given).differences


def test_the_same_change_in_generated_sources_is_an_error():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = dataclasses.replace(
        edited(found, plan, "torch.relu(linear)", "torch.relu(linear) * 2"), edited=()
    )
    with pytest.raises(VerifyError, match="the generated stages differ from the model"):
        verify(found, plan, sources, model, flat, layout, models.square_loss)


def test_other_ops_with_equal_numbers_are_told_and_not_refused():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(linear)", "torch.relu(linear) * 1")
    sources = dataclasses.replace(sources, edited=())
    with pytest.warns(UserWarning, match="all numbers are equal, and yet op 'layers_3' of stage 1"):
        assert not verify(found, plan, sources, model, flat, layout, loss_of(model)).differences


def test_the_first_op_that_differs_is_named_with_both_lines():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(linear)", "torch.tanh(linear)")
    report = verify(found, plan, sources, model, flat, layout, models.square_loss)
    number = line_of(sources, "torch.tanh(linear)")
    assert len(report.places) == 1
    assert re.fullmatch(
        rf"relu_2 \(torch\.relu\) at \S*models\.py:\d+; stage_1\.py:{number} calls torch\.tanh",
        report.places[0],
    )
    assert f"first at {report.places[0]}" in str(report)
    total = sum(row.outputs + row.gradients + row.buffers for row in report.rows)
    share = f"the stages differ from eager in {len(report.differences)} places of {total} compared"
    outputs = sum(row.outputs for row in report.rows if row.step == 0)
    assert total > outputs
    assert f"{share} ({outputs} outputs" in str(report)


def test_a_value_that_is_made_in_another_way_hides_no_difference():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(linear)", "linear.clamp(min=0)")
    given = model, flat, layout, models.square_loss
    assert not verify(found, plan, sources, *given).differences
    text = sources.files["stage_1.py"]
    assert text.count('self.layers["4"](') == 1
    wrong = text.replace('self.layers["4"](', '0.5 * self.layers["4"](')
    sources = dataclasses.replace(sources, files={**sources.files, "stage_1.py": wrong})
    report = verify(found, plan, sources, *given)
    assert report.differences
    (first,) = report.places
    assert f"stage_1.py:{line_of(sources, 'clamp')} calls clamp" in first


def test_a_wrong_gradient_is_named_where_the_source_departs_from_the_model():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(linear)", "torch.relu(linear).detach()")
    report = verify(found, plan, sources, model, flat, layout, models.square_loss)
    assert {one.what for one in report.differences} == {"gradient"}
    assert len(report.places) == 1
    assert f"stage_1.py:{line_of(sources, '.detach()')} calls detach" in report.places[0]


def test_generated_stages_that_are_wrong_name_the_op_in_the_error(monkeypatch):
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    plain = codegen.generate

    def broken(capture, plan):
        sources = plain(capture, plan)
        text = sources.files["stage_1.py"].replace("torch.relu(linear)", "torch.sigmoid(linear)")
        return dataclasses.replace(sources, files={**sources.files, "stage_1.py": text})

    monkeypatch.setattr(codegen, "generate", broken)
    sources = codegen.generate(found, plan)
    with pytest.raises(VerifyError, match=r"first at relu_2 \(torch.relu\) at \S*models.py:\d+"):
        verify(found, plan, sources, model, flat, layout, models.square_loss)


def line_of(sources: Sources, text: str, file: str = "stage_1.py") -> int:
    lines = sources.files[file].splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


KEPT_INPUT = "self.layers['4'](x if self.training else self.__dict__.setdefault('kept', x))"
KEPT_WEIGHT = (
    "nn.functional.linear(x, self.layers['4'].weight if self.training else self.__dict__"
    ".setdefault('kept', self.layers['4'].weight.detach().clone()), self.layers['4'].bias)"
)


@pytest.mark.parametrize("new", [KEPT_INPUT, KEPT_WEIGHT], ids=["input", "weight"])
def test_what_a_stage_keeps_from_its_first_step_is_noticed_in_the_second(new):
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, 'self.layers["4"](x)', new)
    report = verify(found, plan, sources, model, flat, layout, models.square_loss)
    assert {(one.mode, one.step) for one in report.differences} == {("eval", 1)}
    assert "in step 2 only" in str(report)


def test_a_large_model_is_compared_in_one_step_unless_all_is_asked_for(monkeypatch):
    monkeypatch.setattr(step_runs, "LARGE_FLOPS", 0.0)
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    given = (found, plan, generate(found, plan), model, flat, layout, models.square_loss)
    quick, full = verify(*given), verify(*given, mode="full")
    assert (quick.steps, full.steps) == (1, 2)
    assert "2 steps on 2 inputs" in str(full)


def test_inputs_that_the_model_does_not_take_end_the_comparison_after_one_step(monkeypatch):
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    given = (found, plan, generate(found, plan), model, flat, layout, models.square_loss)
    plain = model.forward
    calls = []

    def picky(x):
        calls.append(x)
        if not torch.equal(x, calls[0]):
            raise ValueError("rows have to be sorted")
        return plain(x)

    monkeypatch.setattr(model, "forward", picky)
    assert verify(*given).steps == 1
    calls[:] = [torch.zeros(1)]
    with pytest.raises(VerifyError, match=r"itself fails .* rows have to be sorted") as refused:
        verify(*given)
    assert "a microbatch of them" in str(refused.value.remedy)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7])
def test_the_second_input_is_another_one(rows):
    model = models.mlp()
    inputs, target = models.batch_for(model, rows)
    flat = example_call(model, inputs, target)
    layout = resolve_batch(flat)
    graph = capture(model, flat, layout, models.square_loss, microbatch_size=min(rows, 3)).train
    first, second = step_runs.step_inputs(flat, layout, graph, 2)
    path = next(iter(first.leaves))
    one, other = first.leaves[path], second.leaves[path]
    assert one.shape[1:] == other.shape[1:]
    assert not torch.equal(one, other)
    if rows > 3:  # the last microbatch, whole
        assert torch.equal(other, flat.leaves[path][-len(other) :])
    assert torch.equal(other.flatten().sort()[0], one.flatten().sort()[0]) == (rows <= 3)


def test_a_stage_that_raises_is_named():
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    sources = edited(found, plan, "torch.relu(linear)", "torch.relu(y)")
    with pytest.raises(VerifyError, match=r"stage 1 raises in training.*NameError") as caught:
        verify(found, plan, sources, model, flat, layout, models.square_loss)
    assert caught.value.where == f"stage_1.py:{line_of(sources, 'torch.relu(y)')}"


def test_a_wrong_edge_is_noticed():
    """An edge without its gradient would leave the first stage untrained, silently."""
    model, flat, layout, found = captured("mlp")
    values = {
        name: dataclasses.replace(value, needs_gradient=False)
        for name, value in found.train.values.items()
    }
    broken = dataclasses.replace(found, train=dataclasses.replace(found.train, values=values))
    plan = cut(broken, [5])
    with pytest.raises(VerifyError, match=r"gradient 'layers\.0\.weight' of stage 0"):
        verify(broken, plan, generate(broken, plan), model, flat, layout, models.square_loss)


def test_which_comparison_is_made(monkeypatch):
    model, flat, layout, found = captured("mlp")
    plan = cut(found, [5])
    given = (flat, layout, models.square_loss)
    sources = generate(found, plan)
    real = verify(found, plan, sources, model, *given)
    assert (real.unverified, real.ops) == ("", 24)
    assert "(4 outputs and losses, " in str(real)
    meta = verify(found, plan, sources, models.mlp().to("meta"), *given)
    assert str(meta).startswith(
        "the stages have the ops of the model, no numbers were compared (24 ops, training and "
        "evaluation: all 12 parameters and buffers (layers.0.weight, …) are on the meta device"
    )
    monkeypatch.setattr(step_runs, "SHARE", 1e-9)
    large = verify(found, plan, sources, model, *given)
    assert "over half of what is free" in large.unverified
    assert (large.rows, large.ops, large.differences) == ((), 24, ())


@pytest.mark.parametrize("without", ["values", "memory"])
def test_a_wrong_op_is_found_where_no_numbers_can_be_compared(without, monkeypatch):
    model, flat, layout, found = captured("mlp")
    if without == "values":
        model = models.mlp().to("meta")
    else:
        monkeypatch.setattr(step_runs, "SHARE", 1e-9)
    plan = cut(found, [5])
    wrong = edited(found, plan, "torch.relu(linear)", "torch.tanh(linear)")
    given = (model, flat, layout, models.square_loss)
    report = verify(found, plan, wrong, *given)
    place = r"relu_2 \(torch\.relu\) at \S*models\.py:\d+; stage_1\.py:\d+ calls torch\.tanh"
    assert [one.mode for one in report.differences] == ["train", "eval"]
    assert re.fullmatch(place, report.places[0])
    assert "edited (stage_1.py): the stages differ from eager in 2 places of 24 ops" in str(report)
    with pytest.raises(VerifyError, match=f"op 'relu_2' of stage 1 in train mode .*{place}"):
        verify(found, plan, dataclasses.replace(wrong, edited=()), *given)


def test_sums_without_a_fixed_order_are_equal_up_to_the_rounding_of_what_they_sum() -> None:
    one = torch.tensor([1000.0, 1e-4, float("nan"), float("inf")])
    near, far = one.clone(), one.clone()
    near[1] += 5e-3  # small beside the numbers whose sum it is
    far[1] += 5e-2
    for other in (near, far):
        other[0] += 1e-4
    assert distance(one, near) is not None
    assert distance(one, near, exact=False) is None
    assert distance(one, far, exact=False) is not None
    assert distance(one, far, exact=False, cast_to=torch.float16) is None
    far[0] += 10.0
    assert distance(one, far, exact=False, cast_to=torch.float16) is not None
    assert distance(one, far, exact=False, cast_to=torch.bfloat16) is None
    assert distance(one, far, cast_to=torch.bfloat16) is not None
    assert distance(one[2:], one[2:], exact=False) is None
    masked = torch.tensor([-1e9, 1.0])  # what is equal is no measure for the rest
    assert distance(masked, masked + torch.tensor([0.0, 1.0]), exact=False) is not None
    assert distance(one, one.nan_to_num(), exact=False) is not None
