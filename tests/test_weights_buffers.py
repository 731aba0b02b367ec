"""Buffers that no checkpoint has: filled by the model's own methods, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdcompile.errors import ConfigError
from pdcompile.weights.source import materialise, open_source, slots
from tests.helpers.checkpoints import (
    Bare,
    Net,
    Rotary,
    equal,
    normal,
    on_meta,
    saved,
    state_of,
)


def test_a_buffer_without_a_file_is_computed_by_its_module(tmp_path: Path) -> None:
    eager = Net(Rotary(6))
    model = on_meta(lambda: Net(Rotary(6)))
    materialise(model, open_source(saved(tmp_path, state_of(eager))))
    assert equal(model, eager)


class OnlyHalf(Rotary):
    def reset_parameters(self) -> None:
        self.frequencies[:2] = 1.0


class Raises(Rotary):
    def reset_parameters(self) -> None:
        if not self.frequencies.is_meta:
            raise OSError("no table")


class Rewrites(Rotary):
    def reset_parameters(self) -> None:
        if not self.frequencies.is_meta:
            self.frequencies = torch.zeros(1)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Bare, "no method"), (lambda: OnlyHalf(6), "does not fill frequencies"),
     (lambda: Raises(6), "raised OSError: no table"),
     (lambda: Rewrites(6), "frequencies became another tensor")],
)  # fmt: skip
def test_a_buffer_that_cannot_be_computed_is_named_with_the_remedy(
    tmp_path: Path, kind: Any, why: str
) -> None:
    model = on_meta(lambda: Net(kind()))
    source = open_source(saved(tmp_path, state_of(Net())))
    with pytest.raises(ConfigError, match=why) as caught:
        materialise(model, source)
    assert "buffer inner." in caught.value.message
    assert "reset_parameters" in (caught.value.remedy or "")
    model = on_meta(lambda: Net(kind()))
    materialise(model, open_source([saved(tmp_path, state_of(Net())), normal]))
    assert not any(slot.tensor.is_meta for slot in slots(model).values())


def test_a_function_is_not_asked_for_what_the_model_computes() -> None:
    asked = []

    def fill(name: str, tensor: Tensor) -> None:
        asked.append(name)
        tensor.zero_()

    model = on_meta(lambda: Net(Rotary(6)))
    materialise(model, open_source(fill))
    assert "inner.frequencies" not in asked
    assert torch.equal(model.inner.frequencies, Rotary(6).frequencies)


@pytest.mark.slow
def test_the_models_of_transformers_compute_their_own_buffers(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
    )  # fmt: skip
    bert = BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    for number, build in enumerate((lambda: LlamaForCausalLM(llama), lambda: BertModel(bert))):
        eager = build()
        folder = tmp_path / str(number)
        eager.save_pretrained(folder)
        model = on_meta(build)
        computed = [slot.fqn for slot in slots(model).values() if not slot.persistent]
        assert computed
        materialise(model, open_source(folder))
        assert equal(model, eager)
