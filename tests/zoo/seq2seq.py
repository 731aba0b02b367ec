"""Encoder-decoder models on text."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import Entry, floats, ids, padded
from tests.zoo.hf import entry

BART: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def translated(step: int) -> dict[str, Any]:
    """A source with padding, and labels from which the decoder's inputs are shifted."""
    return {"input_ids": ids(step), "attention_mask": padded(step), "labels": ids(step + 7, 10)}


def captions(step: int) -> dict[str, Any]:
    tokens = ids(step, 10)
    return {
        "pixel_values": floats(step, 3, 32, 32),
        "labels": tokens,
    }


def on_encoded(step: int) -> dict[str, Any]:
    """A decoder that attends to given states of an encoder."""
    tokens = ids(step, 10)
    return {
        "input_ids": tokens,
        "encoder_hidden_states": floats(step, 6, 32),
        "encoder_attention_mask": torch.ones(tokens.shape[0], 6, dtype=torch.long),
        "labels": tokens,
    }


FAMILY = "encoder-decoder"
ENTRIES: tuple[Entry, ...] = (
    *(
        entry(name, model, {**BART, **more}, translated, FAMILY, lists=lists)
        for name, model, more, lists in (
            ("bart", "BartForConditionalGeneration", {}, ("pippy",)),
            ("blenderbot", "BlenderbotForConditionalGeneration", {}, ("pippy",)),
            ("m2m100", "M2M100ForConditionalGeneration", {}, ("pippy",)),
            ("mbart", "MBartForConditionalGeneration", {}, ("pippy",)),
            ("pegasus", "PegasusForConditionalGeneration", {}, ("pippy",)),
            ("plbart", "PLBartForConditionalGeneration", {}, ("pippy",)),
            ("blenderbot_small", "BlenderbotSmallForConditionalGeneration", {}, ()),
            ("marian", "MarianMTModel", {}, ()),
            (
                "led",
                "LEDForConditionalGeneration",
                {
                    "attention_window": 4,
                    "max_encoder_position_embeddings": 64,
                    "max_decoder_position_embeddings": 64,
                },
                (),
            ),
        )
    ),
    entry("t5", "T5ForConditionalGeneration", T5, translated, FAMILY, lists=("pippy",)),
    entry("mt5", "MT5ForConditionalGeneration", T5, translated, FAMILY, lists=("pippy",)),
    entry(
        "trocr",
        "TrOCRForCausalLM",
        {
            "vocab_size": 96,
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "cross_attention_hidden_size": 32,
            "max_position_embeddings": 64,
        },
        on_encoded,
        FAMILY,
        lists=("pippy",),
    ),
    entry(
        "longt5",
        "LongT5ForConditionalGeneration",
        {**T5, "local_radius": 3, "global_block_size": 4},
        translated,
        FAMILY,
    ),
    entry("umt5", "UMT5ForConditionalGeneration", T5, translated, FAMILY),
    entry(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        {
            **T5,
            "num_experts": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "expert_capacity": 16,
        },
        translated,
        "mixture of experts",
    ),
    entry(
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
        translated,
        FAMILY,
    ),
)
