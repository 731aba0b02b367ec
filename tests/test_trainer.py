"""PipelineTrainer trains as transformers.Trainer does, and says what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pdcompile.errors import ConfigError
from tests.helpers.launch import processes, torchrun

# What both kinds of trainer do here, in one process and on two ranks.
TRAIN = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32,
    ))

def samples(count):
    random = torch.Generator().manual_seed(0)
    for i in range(count):
        ids = torch.randint(32, (8,), generator=random)
        labels = ids.clone()
        labels[: i % 5] = -100  # as many labels in no two microbatches
        yield {"input_ids": ids, "labels": labels}

def arguments(folder, save_strategy="no", **more):
    return TrainingArguments(
        folder, per_device_train_batch_size=8, per_device_eval_batch_size=8, num_train_epochs=2,
        learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5, logging_steps=1,
        save_strategy=save_strategy, report_to=[], use_cpu=True, disable_tqdm=True, **more,
    )

def accuracy(found):
    right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"right": float(right.mean())}

NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right")

def trained(cls, folder, resume=None, **more):
    made = cls(
        model(), arguments(folder, eval_strategy="epoch", **more.pop("arguments", {})),
        train_dataset=list(samples(30)), eval_dataset=list(samples(12)), compute_metrics=accuracy,
        **more,
    )
    made.train(resume_from_checkpoint=resume)
    history = [{k: e[k] for k in NUMBERS if k in e} for e in made.state.log_history]
    return made, [each for each in history if each]

PIPELINE = {"microbatches": 4, "costs": "estimated", "verify": "off", "time_limit": 0}
"""


@pytest.fixture
def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(TRAIN, found)
    return found


def test_one_process_trains_as_trainer_does(tmp_path: Path, names: dict[str, Any]) -> None:
    from transformers import LlamaForCausalLM, Trainer

    from pdcompile.integrations.trainer import PipelineTrainer

    plain, expected = names["trained"](Trainer, str(tmp_path / "plain"))
    mine, found = names["trained"](PipelineTrainer, str(tmp_path), pipeline=names["PIPELINE"])
    assert len(found) == 8 + 2
    alike(found, expected)
    mine.save_model(str(tmp_path / "saved"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-3, atol=1e-4)
    mine.pipe.close()


def alike(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    for one, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert float(one[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"bf16": True}, "bf16"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"torch_compile": True}, "torch_compile"),
    ],
)
def test_arguments_that_a_pipeline_cannot_obey_are_refused_by_name(
    tmp_path: Path, names: dict[str, Any], given: dict[str, Any], name: str
) -> None:
    from pdcompile.integrations.trainer import PipelineTrainer

    with pytest.raises(ConfigError, match=f"cannot obey {name}"):
        PipelineTrainer(names["model"](), names["arguments"](str(tmp_path), **given))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_init", lambda: None),
        ("optimizers", (torch.optim.SGD([torch.zeros(1)], lr=0.1), None)),
        ("compute_loss_func", lambda *_: None),
    ],
)
def test_parts_of_the_whole_model_are_refused_by_name(
    tmp_path: Path, names: dict[str, Any], name: str, value: Any
) -> None:
    from pdcompile.integrations.trainer import PipelineTrainer

    with pytest.raises(ConfigError, match=f"cannot obey {name}"):
        PipelineTrainer(names["model"](), names["arguments"](str(tmp_path)), **{name: value})


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("train", "evaluated", "where"), [(25, 12, "train"), (24, 9, "eval")])
def test_a_rest_that_the_model_does_not_take_is_refused_at_the_start(
    tmp_path: Path, names: dict[str, Any], train: int, evaluated: int, where: str
) -> None:
    """Llama is another computation for one sample; the length of the data is known before."""
    from pdcompile.integrations.trainer import PipelineTrainer

    def trainer(**given: Any) -> Any:
        arguments = names["arguments"](str(tmp_path), eval_strategy="epoch", max_steps=4, **given)
        return PipelineTrainer(
            names["model"](), arguments, pipeline=names["PIPELINE"],
            train_dataset=list(names["samples"](train)),
            eval_dataset=list(names["samples"](evaluated)),
        )  # fmt: skip

    made = trainer()
    with pytest.raises(ConfigError, match=r"the last minibatch of .* samples has 1") as caught:
        made.train()
    assert caught.value.where == f"{where}_dataset"
    assert made.state.global_step == 0
    made.pipe.close()
    made = trainer(dataloader_drop_last=True)  # the remedy
    made.train()
    assert made.state.global_step == 4
    made.pipe.close()


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path, names: dict[str, Any]) -> None:
    from pdcompile.integrations.trainer import PipelineTrainer

    (tmp_path / "checkpoint-1").mkdir()
    made = PipelineTrainer(names["model"](), names["arguments"](str(tmp_path)))
    with pytest.raises(ConfigError, match="not of a PipelineTrainer"):
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.slow
def test_two_ranks_train_save_and_resume_as_one_process(tmp_path: Path) -> None:
    script = (
        TRAIN
        + """
import os
from pdcompile.integrations.trainer import PipelineTrainer
folder = sys.argv[1]
saving = {"save_strategy": "epoch"}
made, found = trained(PipelineTrainer, folder, pipeline=PIPELINE, arguments=saving)
whole = made.pipe.full_state_dict()
made.pipe.close()
again, rest = trained(
    PipelineTrainer, folder, f"{folder}/checkpoint-4", pipeline=PIPELINE, arguments=saving
)
resumed = again.pipe.full_state_dict()
if os.environ.get("RANK", "0") == "0":
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    open(f"{folder}/found.json", "w").write(json.dumps([found, rest]))
again.end()
"""
    )
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    done = [
        processes(f"import sys; sys.argv[1:] = [{str(folders[0])!r}]\n" + script, 1, tmp_path),
        torchrun(script, 2, tmp_path, str(folders[1])),
    ]
    assert [each.code for each in done] == [0, 0], "\n".join(map(str, done))
    (one, one_rest), (two, two_rest) = [
        json.loads((folder / "found.json").read_text()) for folder in folders
    ]
    alike(two, one)
    alike(two_rest, one_rest)
    assert one_rest[-5:] == one[-5:]
