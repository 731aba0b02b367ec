"""A small Llama of transformers, with values or on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def llama(*, layers: int = 2, tie: bool = False, use_cache: bool = False) -> Any:
    """The same values at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
        tie_word_embeddings=tie, use_cache=use_cache,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def on_meta(**sizes: Any) -> Any:
    with torch.device("meta"):
        return llama(**sizes)


def batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(48, (4, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}
