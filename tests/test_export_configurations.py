"""The lines of torchtitan, Megatron, Accelerate, read by their own rules (configurations.py)."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from pdcompile import ConfigError, Pin, Together
from pdcompile.passes.export.configurations import _with_tensors
from pdcompile.passes.export.model_parts import whole_parts
from tests.helpers import exported
from tests.helpers.exported import made


@pytest.mark.parametrize("name", ["gpt", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_megatron_reads_the_layout(name: str, tmp_path: Path) -> None:
    made(name, 2, "megatron", tmp_path)
    text = (tmp_path / "arguments.txt").read_text(encoding="utf-8")
    # As the note says, and as a shell gives it to a program.
    given = subprocess.run(
        ["sh", "-c", "printf '%s\\n' $(cat arguments.txt)"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = given.stdout.splitlines()
    stages = read_layout(words[words.index("--pipeline-model-parallel-layout") + 1])
    assert stages[0][0] == "E"
    assert stages[-1][-1] == "L"
    graph = exported.graph_with_loss(getattr(exported, name)())
    placed = whole_parts(graph, exported.planned_for(name, 2))
    blocks = [stage for path, stage in placed.items() if path.rpartition(".")[2].isdecimal()]
    assert [row.count("t") for row in stages] == [blocks.count(0), blocks.count(1)]
    assert f"--num-layers {len(blocks)}\n" in text
    assert "untie" not in text


def read_layout(layout: str) -> list[str]:
    """As Megatron-LM reads one (megatron/core/transformer/pipeline_parallel_layer_layout.py):
    commas mean nothing; ``(…)*n`` and then ``x*n`` repeat; ``|`` is between stages."""
    text = layout.replace(",", "")
    while (end := text.find(")*")) >= 0:
        begin, digits = text.rindex("(", 0, end), end + 2
        while digits < len(text) and text[digits].isdecimal():
            digits += 1
        text = text[:begin] + text[begin + 1 : end] * int(text[end + 2 : digits]) + text[digits:]
    while (star := text.find("*")) >= 0:
        digits = star + 1
        while digits < len(text) and text[digits].isdecimal():
            digits += 1
        text = text[: star - 1] + text[star - 1] * int(text[star + 1 : digits]) + text[digits:]
    assert set(text) <= set("EtmL|"), text
    return text.split("|")


def test_long_rows_of_layers_are_written_short(tmp_path: Path) -> None:
    assert read_layout("Et*3|(tt|)*2,t*12L") == ["Ettt", "tt", "tt", "t" * 12 + "L"]
    made("mlp", 1, "megatron", tmp_path)
    text = (tmp_path / "arguments.txt").read_text(encoding="utf-8")
    assert "layout Et*6L\n" in text
    assert "--untie-embeddings-and-output-weights" in text


def test_torchtitan_splits_the_model(tmp_path: Path) -> None:
    """What `pipeline_module_split` keeps for each stage, one after the other, is the model."""
    made("mlp", 3, "torchtitan", tmp_path)
    document = tomllib.loads((tmp_path / "parallelism.toml").read_text(encoding="utf-8"))
    names = document["parallelism"]["module_fqns_per_model_part"]
    assert document["parallelism"]["pipeline_parallel_degree"] == len(names) == 3
    workload = exported.mlp()
    value = workload.example_inputs
    expected = workload.model(value)
    for stage in names:
        model = exported.mlp().model
        for name, child in list(model.named_children()):
            if isinstance(child, nn.ModuleList):
                kept = [layer for i, layer in enumerate(child) if f"{name}.{i}" in stage]
                setattr(model, name, nn.ModuleList(kept))
            elif name not in stage:
                setattr(model, name, None)
        value = model(value)
    assert value.equal(expected)
    everything = [name for stage in names for name in stage]
    assert len(everything) == len(set(everything)) == 8


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("gpt", ("wte", "lm_head")),
        pytest.param("gpt2", ("transformer.wte", "lm_head"), marks=pytest.mark.slow),
    ],
)
def test_a_device_map_covers_every_tensor_and_keeps_tied_ones_together(
    name: str, tied: tuple[str, str], tmp_path: Path
) -> None:
    """The rules of accelerate/utils/modeling.py: `check_device_map` and
    `check_tied_parameters_on_same_device`."""
    done = made(name, 2, "accelerate", tmp_path)
    devices = json.loads((tmp_path / "device_map.json").read_text(encoding="utf-8"))
    model = getattr(exported, name)().model
    modules = dict(model.named_modules())
    assert set(devices) <= set(modules)
    for tensor in model.state_dict():
        assert any(tensor.startswith(f"{module}.") for module in devices), tensor
    assert set(devices.values()) == {0, 1}
    assert devices[tied[0]] == devices[tied[1]] == 0
    assert any("lm_head is on device 0" in note for note in done.notes)


def test_a_module_may_have_the_name_of_the_loss(tmp_path: Path) -> None:
    made("stack", 2, "torchtitan", tmp_path)
    document = tomllib.loads((tmp_path / "parallelism.toml").read_text(encoding="utf-8"))
    names = document["parallelism"]["module_fqns_per_model_part"]
    assert [name for stage in names for name in stage][-1] == "loss_fn"


def test_a_parameter_beside_the_modules_is_where_it_is_read(tmp_path: Path) -> None:
    made("positions", 2, "accelerate", tmp_path, constraints=(Pin("layers.3", 0),))
    devices = json.loads((tmp_path / "device_map.json").read_text(encoding="utf-8"))
    assert (devices["positions"], devices["loss_fn"]) == (0, 1)


@pytest.mark.parametrize("to", ["torchtitan", "megatron"])
def test_what_of_the_plan_is_not_in_the_file_is_said(to: str, tmp_path: Path) -> None:
    options = {"recompute": (True, False), "max_grad_norm": 0.5, "autocast": "bfloat16"}
    notes = made("stack", 2, to, tmp_path, **options).notes
    (note,) = [note for note in notes if "yourself" in note]
    assert "recomputation of stage 0, clipping at 0.5, autocast cpu:bfloat16;" in note
    assert not any("yourself" in note for note in made("stack", 2, to, tmp_path).notes)


@pytest.mark.slow
def test_accelerate_dispatches_it(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    made("gpt2", 2, "accelerate", tmp_path)
    devices = json.loads((tmp_path / "device_map.json").read_text(encoding="utf-8"))
    workload = exported.gpt2()
    with torch.no_grad():
        expected = workload.model.eval()(**workload.example_inputs).logits
        # On a machine without accelerators all devices are the CPU; hooks are set as elsewhere.
        model = accelerate.dispatch_model(
            exported.gpt2().model.eval(), dict.fromkeys(devices, "cpu"), force_hooks=True
        )
        found = model(**workload.example_inputs).logits
    assert found.equal(expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "to", "said"),
    [
        ("gpt", "torchtitan", "weight 'wte.weight' is tied over stages 0, 1"),
        ("vgg", "torchtitan", "stage 0 raised TypeError: 'NoneType' object is not callable"),
        ("vgg", "megatron", "blocks in 2 containers"),
        ("crossing", "torchtitan", "is tied over stages 0, 1, and torchtitan copies"),
        ("crossing", "megatron", "is the weight of 'blocks.5' and 'MEAN_SCALE'"),
        ("mlp", "accelerate", "reads 'add_3' of device 0 and 'tanh_4' of device 1"),
        ("positions", "torchtitan", "do not compute what the model does"),
        ("chain", "torchtitan", "stage 0 raised"),
        ("between", "megatron", "'between' runs between the layers"),
        ("tied_heads", "megatron", "is the weight of 'loss_fn' and 'head'"),
    ],
)
def test_models_that_a_target_gets_wrong_are_refused(
    name: str, to: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        made(name, 3 if name == "crossing" else 2, to, tmp_path)


def test_layers_that_run_twice_are_not_megatrons(tmp_path: Path) -> None:
    whole = tuple(Together(f"layers.{i}") for i in range(4))
    with pytest.raises(ConfigError, match="'layers\\.0' runs 2 times in a forward"):
        made("twice", 2, "megatron", tmp_path, constraints=whole)


def test_schedules_and_replicas_of_other_runtimes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="megatron has no schedule 'gpipe'"):
        made("mlp", 2, "megatron", tmp_path, schedule="gpipe")
    with pytest.raises(ConfigError, match="have \\[1, 2\\] replicas"):
        made("mlp", 3, "accelerate", tmp_path, replicas=(2, 1))


def test_what_does_not_run_is_where_its_weight_is() -> None:
    """Embeddings that two parts of a model share, of which only those are called."""
    devices = {"encoder.tokens": 0, "blocks.0": 1, "decoder.tokens": 1, "head": 1}
    shared = ["shared.weight", "encoder.tokens.weight", "decoder.tokens.weight"]
    tensors = {names[0]: names for names in (shared, ["blocks.0.weight"], ["unused.bias"])}
    notes = list(_with_tensors(devices, tensors, {"shared.weight": 0, "blocks.0.weight": 1}))
    assert devices["shared"] == devices["decoder.tokens"] == devices["encoder.tokens"] == 0
    assert devices["unused"] == 1
    assert notes == [
        "shared does not run in training: device 0",
        "decoder.tokens is on device 0 with encoder.tokens, and not on 1: they share shared.weight",
    ]
