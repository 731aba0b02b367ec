"""Unmodified models of Hugging Face transformers: captured, and cut into stages that equal them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import pdcompile
from pdcompile.batch import flatten_output
from pdcompile.passes.trace.comparison.step_values import same

pytestmark = pytest.mark.usefixtures("captured_anew")

SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "Llama": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
              "intermediate_size": 32},
    "Mixtral": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 4},
    "T5": {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 32, "d_kv": 8,
           "decoder_start_token_id": 0},
}  # fmt: skip


def build(name: str) -> torch.nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=48, **SIZES[name])
    head = "ForConditionalGeneration" if name == "T5" else "LMHeadModel" * (name == "GPT2")
    torch.manual_seed(0)
    found = getattr(transformers, name + (head or "ForCausalLM"))(config)
    assert isinstance(found, torch.nn.Module)
    return found.train()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SIZES))
def test_stages_equal_the_model_and_return_its_cache(name: str) -> None:
    model = build(name)
    options: dict[str, Any] = {"optimizer": None, "microbatches": 2}
    reference = pdcompile.reference(copy.deepcopy(model), **options)
    ids = torch.randint(0, 48, (4, 12), generator=torch.Generator().manual_seed(1))
    cluster = pdcompile.Cluster.local(3)
    with pdcompile.compile(
        model, cluster=cluster, stages=3, costs="estimated", verify="full",
        outputs="everything", **options,
    ) as pipe:  # fmt: skip
        for kind in ("step", "eval_step"):
            ours = getattr(pipe, kind)(input_ids=ids, labels=ids).outputs
            theirs = getattr(reference, kind)(input_ids=ids, labels=ids).outputs
            assert type(ours.past_key_values) is type(theirs.past_key_values)
            mine, structure = flatten_output(ours)
            expected, wanted = flatten_output(theirs)
            assert structure == wanted
            assert all(same(a, b) for a, b in zip(mine, expected, strict=True))
