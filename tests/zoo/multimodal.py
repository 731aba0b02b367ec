"""Hugging Face models on several kinds of input, and on time series."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.zoo.case import BATCH, Case, Entry, classes, floats, ids
from tests.zoo.hf import entry, set_dropout
from tests.zoo.vision_audio import VIT

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
_CLIP_TEXT = {**_TEXT, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
_CLIP_VISION = {k: v for k, v in VIT.items() if k != "num_labels"}


def paired(step: int) -> dict[str, Any]:
    """Texts with their images; the contrastive loss couples the samples of a batch."""
    tokens = ids(step)
    tokens[:, -1] = 2
    return {"input_ids": tokens, "pixel_values": floats(step, 3, 32, 32), "return_loss": True}


def shown(step: int) -> dict[str, Any]:
    """Text with one image in front: 16 places for its patches."""
    tokens = torch.cat([torch.full((BATCH, 16), 90), ids(step, 12, vocab=90)], dim=1)
    return {"input_ids": tokens, "pixel_values": floats(step, 3, 32, 32), "labels": tokens}


def _llava(name: str, model: str, vision: str, **more: Any) -> Entry:
    def build(dropout: float) -> Case:
        import transformers

        cls = getattr(transformers, model)
        config = cls.config_class(
            vision_config=getattr(transformers, vision)(**_CLIP_VISION),
            text_config=transformers.LlamaConfig(**_TEXT, num_key_value_heads=2, pad_token_id=0),
            image_token_id=90,
            image_token_index=90,
            **more,
        )
        set_dropout(config, dropout)
        return Case(cls(config), shown)

    return Entry(name, "multimodal", build, "transformers")


ENTRIES: tuple[Entry, ...] = (
    entry(
        "clip",
        "CLIPModel",
        {"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION, "projection_dim": 16},
        paired,
        "multimodal",
    ),
    entry(
        "siglip",
        "SiglipModel",
        {"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION},
        paired,
        "multimodal",
    ),
    _llava("llava", "LlavaForConditionalGeneration", "CLIPVisionConfig"),
    entry(
        "vilt",
        "ViltForImagesAndTextClassification",
        {**VIT, "vocab_size": 96, "num_images": 1, "max_position_embeddings": 32},
        lambda step: {
            "input_ids": ids(step),
            "pixel_values": floats(step, 1, 3, 32, 32),
            "labels": classes(step, 5),
        },
        "multimodal",
    ),
    entry(
        "blip",
        "BlipForConditionalGeneration",
        {
            "text_config": {
                **_CLIP_TEXT,
                "encoder_hidden_size": 32,
                "bos_token_id": 0,
                "sep_token_id": 2,
            },
            "vision_config": _CLIP_VISION,
            "projection_dim": 16,
        },
        lambda step: {
            "input_ids": ids(step),
            "pixel_values": floats(step, 3, 32, 32),
            "labels": ids(step),
        },
        "multimodal",
    ),
    entry(
        "git",
        "GitForCausalLM",
        {**_CLIP_TEXT, "vision_config": _CLIP_VISION},
        lambda step: {
            "input_ids": ids(step),
            "pixel_values": floats(step, 3, 32, 32),
            "labels": ids(step),
        },
        "multimodal",
    ),
    entry(
        "visual_bert",
        "VisualBertForPreTraining",
        {**_TEXT, "visual_embedding_dim": 16},
        lambda step: {
            "input_ids": ids(step),
            "attention_mask": torch.ones(BATCH, 12, dtype=torch.long),
            "visual_embeds": floats(step, 5, 16),
            "visual_attention_mask": torch.ones(BATCH, 5),
            "labels": ids(step, 17),
            "sentence_image_labels": classes(step, 2),
        },
        "multimodal",
    ),
    entry(
        "patchtst",
        "PatchTSTForPrediction",
        {
            "num_input_channels": 3,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "ffn_dim": 48,
            "loss": "mse",
        },
        lambda step: {"past_values": floats(step, 16, 3), "future_values": floats(step + 3, 4, 3)},
        "time series",
    ),
    entry(
        "time_series_transformer",
        "TimeSeriesTransformerForPrediction",
        {
            "prediction_length": 4,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "num_time_features": 2,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
        },
        lambda step: {
            "past_values": floats(step, 10),
            "past_time_features": floats(step, 10, 2),
            "past_observed_mask": torch.ones(BATCH, 10),
            "future_values": floats(step + 3, 4),
            "future_time_features": floats(step, 4, 2),
        },
        "time series",
    ),
    entry(
        "decision_transformer",
        "DecisionTransformerModel",
        {
            "state_dim": 6,
            "act_dim": 3,
            "hidden_size": 32,
            "max_ep_len": 32,
            "n_layer": 2,
            "n_head": 4,
        },
        lambda step: {
            "states": floats(step, 5, 6),
            "actions": floats(step, 5, 3),
            "rewards": floats(step, 5, 1),
            "returns_to_go": floats(step, 5, 1),
            "timesteps": torch.arange(5).expand(BATCH, -1).clone(),
            "attention_mask": torch.ones(BATCH, 5, dtype=torch.long),
        },
        "time series",
        loss_fn=lambda output, target: F.mse_loss(output.action_preds, target),
        target=lambda step: floats(step, 5, 3),
    ),
)
