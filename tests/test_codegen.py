"""Looks of generated stages, and that they hold what the model holds."""

from __future__ import annotations

import ast
import difflib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pdcompile.passes.codegen import generate, stage_classes, write
from tests.helpers import models
from tests.helpers.cuts import cut
from tests.helpers.generated import captured, check, mean_square

GOLDEN = Path(__file__).parent / "golden"


@cache
def captured_gpt(layers=4, dropout=0.1, tied=True):
    model = models.gpt(layers=layers, dropout=dropout, tied=tied)
    inputs, target = models.batch_for(model, 4)
    return model, captured(model, inputs, target, models.token_loss)[2]


def small_gpt(positions, **options):
    model, found = captured_gpt(**options)
    plan = cut(found, positions)
    return model, found, plan, generate(found, plan)


@pytest.mark.parametrize("cut_at", [53, 60], ids=["between_blocks", "through_a_block"])
def test_the_small_gpt_looks_as_it_should(cut_at):
    """Golden files; write them anew with PDCOMPILE_GOLDEN=write and read the difference."""
    *_, sources = small_gpt([cut_at])
    for name, text in sources.files.items():
        if name == "plan.json":
            continue
        golden = GOLDEN / f"gpt_{cut_at}_{name}"
        if os.environ.get("PDCOMPILE_GOLDEN") == "write":
            golden.write_text(text)
        expected = golden.read_text()
        difference = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), str(golden), "generated", lineterm=""
        )
        assert text == expected, "\n".join(difference)


def test_a_stage_of_the_small_gpt_is_short_and_narrow():
    *_, sources = small_gpt([53])
    for name, text in sources.files.items():
        if name.endswith(".py"):
            assert len(text.splitlines()) < 200
            assert max(map(len, text.splitlines())) <= 100
            assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layers", "tied", "positions"),
    [(4, True, [10, 35, 70]), (4, True, [60]), (1, False, [10, 20]), (1, False, [])],
)
def test_the_union_of_state_dicts_is_the_models(layers, tied, positions):
    model, _, _, sources = small_gpt(positions, layers=layers, tied=tied)
    found = {}
    for cls in stage_classes(sources):
        for name, tensor in cls().state_dict().items():
            assert found.setdefault(name, tensor.shape) == tensor.shape
    assert found == {name: tensor.shape for name, tensor in model.state_dict().items()}


def test_equal_blocks_become_one_class():
    *_, sources = small_gpt([])
    tree = ast.parse(sources.files["stage_0.py"])
    assert [n.name for n in tree.body if isinstance(n, ast.ClassDef)] == ["Block", "Stage0"]
    assert "nn.ModuleList(Block() for _ in range(4))" in sources.files["stage_0.py"]
    assert "for block in self.blocks:" in sources.files["stage_0.py"]


def test_layers_of_a_later_stage_keep_their_numbers():
    *_, sources = small_gpt([53])
    (cls,) = stage_classes(sources)[1:]
    assert {name.split(".")[1] for name in cls().state_dict() if name.startswith("blocks")} == {
        "2",
        "3",
    }


def test_tied_weights_on_one_stage_are_one_parameter():
    *_, sources = small_gpt([])
    stage = stage_classes(sources)[0]()
    assert stage.lm_head.weight is stage.wte.weight


class Scaled(nn.Module):
    """Multiplies by a parameter of any name."""

    def __init__(self, name, weight):
        super().__init__()
        self.name = name
        self.register_parameter(name, weight)

    def forward(self, x):
        return x * getattr(self, self.name)


@pytest.mark.parametrize("positions", [[], [2]])
def test_tied_weights_may_have_names_that_are_no_identifiers(tmp_path, positions):
    weights = [nn.Parameter(torch.randn(4)) for _ in range(2)]
    names = ("plain", "1_of_two", "2_of_two")
    shared = (weights[0], weights[1], weights[0])
    model = nn.Sequential(*(Scaled(*one) for one in zip(names, shared, strict=True)))
    _, _, found = captured(model, torch.randn(4, 4), torch.randn(4, 4), nn.functional.mse_loss)
    sources = generate(found, cut(found, positions))
    stages = [cls() for cls in stage_classes(sources)]
    if not positions:
        tensors = dict(stages[0].named_parameters(remove_duplicate=False))
        assert tensors["0.plain"] is tensors["2.2_of_two"]
    write(sources, tmp_path, model=model)  # pipeline.py ties them over stages


@pytest.mark.slow
@pytest.mark.parametrize(
    "positions", [[4], pytest.param([], marks=pytest.mark.slow),
                  pytest.param([4, 6], marks=pytest.mark.slow)]
)  # fmt: skip
def test_pipeline_py_runs_alone(tmp_path, positions):
    model = models.convnet()
    inputs, target = models.batch_for(model, 4)
    _, _, found = captured(model, inputs, target, models.class_loss)
    write(generate(found, cut(found, positions)), tmp_path, model=model)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "pipeline.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path.parent,
        check=False,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "gradients of 8 of 8" in done.stdout


def test_saved_buffers_are_those_of_the_model(tmp_path):
    model = models.convnet()
    inputs, target = models.batch_for(model, 4)
    _, _, found = captured(model, inputs, target, models.class_loss)
    model(inputs)
    write(generate(found, cut(found, [4])), tmp_path, model=model)
    saved = torch.load(tmp_path / "stage_0.pt", weights_only=True)
    assert torch.equal(saved["bn1.running_mean"], model.bn1.running_mean)
    assert model.bn1.running_mean.any()


class Rotary(nn.Module):
    """A frozen parameter, buffers of both kinds, a constant, an integer edge, no_grad."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.linear = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("table", torch.randn(6, 4))
        self.register_buffer("mask", torch.rand(4) < 0.5, persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.constant = torch.arange(4.0)

    def forward(self, x, index):
        with torch.no_grad():
            rows = self.table[index] * 2
        self.seen += 1
        y = torch.where(self.mask, x * self.scale, x @ self.frozen) + self.constant
        y = self.linear(y) + rows
        large = y.abs() > 0.5
        return {"y": y.masked_fill(large, 0.0), "parts": (y.sum(-1), [index])}


@pytest.mark.sample(1)
@pytest.mark.parametrize("position", range(1, 12, 2))
def test_parameters_buffers_constants_and_regions(position):
    model = Rotary()
    inputs = (torch.randn(4, 4), torch.tensor([0, 3, 5, 5]))
    sources, _ = check(
        model, inputs, [position], torch.randn(4, 4), lambda out, y: mean_square(out["y"], y)
    )
    assert any("with torch.no_grad():" in text for text in sources.files.values())
    keys = {key for cls in stage_classes(sources) for key in cls().state_dict()}
    assert keys == set(model.state_dict())


class Modal(nn.Module):
    """Training and evaluation run different ops."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Noisy() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        for layer in self.inner:
            x = layer(x)
        return self.head(x) if self.training else self.head(x).relu() + 1


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            y = y + 0.1 * torch.randn_like(y)
        return F.gelu(y)


@pytest.mark.sample(2)
@pytest.mark.parametrize("positions", [[], [1], [5], [6], [4, 9]])
def test_two_bodies_where_training_and_evaluation_differ(positions):
    torch.manual_seed(0)
    sources, _ = check(Modal(), torch.randn(4, 4), positions, torch.randn(4, 4), mean_square)
    assert any("if self.training:" in text for text in sources.files.values())


class Shared(nn.Module):
    """One block called three times, with a draw each time, and a shared leaf."""

    def __init__(self):
        super().__init__()
        self.block = Dropping()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        for _ in range(3):
            x = self.norm(self.block(x))
        return x


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return F.dropout(self.drop(self.linear(x)), 0.3, self.training) + x


@pytest.mark.sample(1)
@pytest.mark.parametrize("positions", [[], [3], [6], [4, 9]])
def test_a_module_called_several_times(positions):
    torch.manual_seed(0)
    check(Shared(), torch.randn(4, 4), positions, torch.randn(4, 4), mean_square)


class Sized(nn.Module):
    """Sizes that depend on the batch in several ways, and the batch size without any tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        b = x.shape[0]
        rows = self.linear(x).reshape(b * 5, 3)
        pairs = rows.view(b, 5, 3).expand(b, 5, 3)
        positions = torch.arange(5, device=x.device).expand(b, 5)
        return pairs + torch.zeros(b, 1, 3, device=x.device) + positions.unsqueeze(-1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("position", [1, 2, 3, 4, 5, 6, 7])
def test_sizes_are_expressions_of_the_microbatch(position):
    model = Sized()
    _, _, found = captured(model, torch.randn(6, 5, 3), torch.randn(6, 5, 3), mean_square)
    plan = cut(found, [position])
    stages = [cls() for cls in stage_classes(generate(found, plan))]
    for stage in stages:
        own = {n: p for n, p in model.state_dict().items() if n in stage.state_dict()}
        stage.load_state_dict(own)
    x = torch.randn(7, 5, 3)  # no size that was captured
    values = {}
    for stage, interface in zip(stages, generate(found, plan).interfaces, strict=True):
        ports = interface.train.inputs
        given = [x if port.path == "x" else values[port.value] for port in ports]
        values |= zip([p.value for p in interface.train.outputs], stage(*given), strict=True)
    assert torch.equal(values[found.train.output.name], model(x))


class Written(nn.Module):
    """Model in which what `h` held is read under another name after `h`, which is returned, is
    another tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x).clone()
        h += 1.0
        kept = h
        h = torch.full_like(x, 2.0)
        y = kept.sin()
        return y, h


@pytest.mark.parametrize("positions", [[], [2], [4]])
def test_what_is_written_in_place_keeps_its_name_as_long_as_its_result(positions):
    check(
        Written(),
        torch.randn(4, 4),
        positions,
        torch.randn(4, 4),
        lambda out, y: F.mse_loss(out[0] * out[1], y),
    )


def test_arguments_that_are_the_default_are_left_out():
    *_, sources = small_gpt([53])
    text = sources.files["stage_0.py"]
    assert "F.scaled_dot_product_attention(" in text
    assert "attn_mask" not in text


def test_attention_without_dropout_says_nothing_of_draws():
    for layers, dropout in ((1, 0.0), (4, 0.1)):
        *_, sources = small_gpt([53] if layers > 1 else [], layers=layers, dropout=dropout)
        text = sources.files["stage_0.py"]
        assert "scaled_dot_product_attention" in text
        assert ("draw(self, 0)" in text) == (dropout > 0)
