"""Hugging Face models on images and sound."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tests.zoo.case import Case, Entry, classes, floats, ids
from tests.zoo.hf import entry, set_dropout

VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
SPEECH: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": [16, 16, 16],
    "conv_kernel": [8, 4, 4],
    "conv_stride": [4, 4, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}
STAGES: dict[str, Any] = {"num_labels": 5, "depths": [1, 1, 1, 1]}


def images(step: int) -> dict[str, Any]:
    return {"pixel_values": floats(step, 3, 32, 32), "labels": classes(step, 5)}


def pictures(step: int) -> dict[str, Any]:
    return {"pixel_values": floats(step, 3, 32, 32)}


def masks(step: int) -> dict[str, Any]:
    return {"pixel_values": floats(step, 3, 64, 64), "labels": classes(step, 5, 64, 64)}


def sounds(step: int) -> dict[str, Any]:
    return {"input_values": floats(step, 1200), "labels": ids(step, 4, vocab=20, low=1)}


def labelled_sounds(step: int) -> dict[str, Any]:
    return {"input_values": floats(step, 1200), "labels": classes(step, 5)}


def spectra(step: int) -> dict[str, Any]:
    return {"input_features": floats(step, 8, 40), "labels": ids(step, 10)}


def detected(output: Any, target: tuple[Tensor, Tensor]) -> Tensor:
    """Loss after matching, as a set loss is: classes and boxes, query by query."""
    labels, boxes = target
    classed = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    return classed + 5 * F.l1_loss(output.pred_boxes, boxes)


def boxes(step: int) -> tuple[Tensor, Tensor]:
    return classes(step, 5, 5), floats(step, 5, 4).sigmoid()


def upright(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output.last_hidden_state.mean(-1).flatten(1).mean(1), target)


def _small_resnet() -> Any:
    import transformers

    return transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[16, 24],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )


def _detr(name: str, model: str, **more: Any) -> Entry:
    def build(dropout: float) -> Case:
        import transformers

        cls = getattr(transformers, model)
        config = cls.config_class(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=_small_resnet(),
            d_model=32,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_queries=5,
            num_labels=5,
            **more,
        )
        set_dropout(config, dropout)
        return Case(cls(config), pictures, detected, boxes)

    return Entry(name, "vision", build, "transformers")


_VISION: tuple[Entry, ...] = (
    _detr("detr", "DetrForObjectDetection"),
    _detr("conditional_detr", "ConditionalDetrForObjectDetection"),
    *(
        entry(name, model, sizes, inputs, "vision")
        for name, model, sizes, inputs in (
            ("vit", "ViTForImageClassification", VIT, images),
            ("deit", "DeiTForImageClassification", VIT, images),
            (
                "beit",
                "BeitForImageClassification",
                {**VIT, "use_relative_position_bias": True},
                images,
            ),
            ("dinov2", "Dinov2ForImageClassification", {**VIT, "mlp_ratio": 2}, images),
            (
                "vit_mae",
                "ViTMAEForPreTraining",
                {
                    **VIT,
                    "decoder_hidden_size": 16,
                    "decoder_num_hidden_layers": 1,
                    "decoder_num_attention_heads": 2,
                    "decoder_intermediate_size": 32,
                },
                pictures,
            ),
            (
                "swin",
                "SwinForImageClassification",
                {
                    "image_size": 32,
                    "patch_size": 2,
                    "embed_dim": 16,
                    "depths": [2, 2],
                    "num_heads": [2, 4],
                    "window_size": 4,
                    "num_labels": 5,
                },
                images,
            ),
            (
                "swinv2",
                "Swinv2ForImageClassification",
                {
                    "image_size": 32,
                    "patch_size": 2,
                    "embed_dim": 16,
                    "depths": [2, 2],
                    "num_heads": [2, 4],
                    "window_size": 4,
                    "num_labels": 5,
                },
                images,
            ),
            (
                "convnext",
                "ConvNextForImageClassification",
                {**STAGES, "hidden_sizes": [8, 16, 24, 32]},
                images,
            ),
            (
                "convnextv2",
                "ConvNextV2ForImageClassification",
                {**STAGES, "hidden_sizes": [8, 16, 24, 32]},
                images,
            ),
            (
                "resnet",
                "ResNetForImageClassification",
                {
                    **STAGES,
                    "embedding_size": 8,
                    "hidden_sizes": [8, 16, 24, 32],
                    "layer_type": "bottleneck",
                },
                images,
            ),
            (
                "regnet",
                "RegNetForImageClassification",
                {**STAGES, "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "groups_width": 8},
                images,
            ),
            (
                "segformer",
                "SegformerForSemanticSegmentation",
                {
                    "num_labels": 5,
                    "depths": [1, 1, 1, 1],
                    "hidden_sizes": [8, 16, 24, 32],
                    "num_attention_heads": [1, 2, 2, 4],
                    "decoder_hidden_size": 32,
                },
                masks,
            ),
            (
                "poolformer",
                "PoolFormerForImageClassification",
                {**STAGES, "hidden_sizes": [8, 16, 24, 32]},
                images,
            ),
            (
                "mobilevit",
                "MobileViTForImageClassification",
                {
                    "image_size": 64,
                    "hidden_sizes": [24, 32, 48],
                    "neck_hidden_sizes": [8, 8, 16, 24, 32, 48, 64],
                    "num_labels": 5,
                },
                lambda step: {"pixel_values": floats(step, 3, 64, 64), "labels": classes(step, 5)},
            ),
        )
    ),
)

_AUDIO: tuple[Entry, ...] = tuple(
    entry(name, model, sizes, inputs, "audio")
    for name, model, sizes, inputs in (
        (
            "whisper",
            "WhisperForConditionalGeneration",
            {
                "vocab_size": 96,
                "d_model": 32,
                "num_mel_bins": 8,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48,
                "max_source_positions": 20,
                "max_target_positions": 32,
                "pad_token_id": 1,
                "bos_token_id": 0,
                "eos_token_id": 2,
                "decoder_start_token_id": 2,
                "mask_time_prob": 0.0,
            },
            spectra,
        ),
        ("wav2vec2", "Wav2Vec2ForCTC", SPEECH, sounds),
        ("hubert", "HubertForCTC", SPEECH, sounds),
        ("wavlm", "WavLMForSequenceClassification", {**SPEECH, "num_labels": 5}, labelled_sounds),
        ("sew", "SEWForCTC", SPEECH, sounds),
        (
            "speech_to_text",
            "Speech2TextForConditionalGeneration",
            {
                "vocab_size": 96,
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48,
                "input_feat_per_channel": 8,
                "conv_channels": 16,
                "decoder_start_token_id": 2,
                "max_source_positions": 64,
                "max_target_positions": 64,
            },
            lambda step: {"input_features": floats(step, 40, 8), "labels": ids(step, 10)},
        ),
        (
            "ast",
            "ASTForAudioClassification",
            {
                **{k: v for k, v in VIT.items() if k != "image_size"},
                "max_length": 32,
                "num_mel_bins": 16,
                "frequency_stride": 8,
                "time_stride": 8,
            },
            lambda step: {"input_values": floats(step, 32, 16), "labels": classes(step, 5)},
        ),
    )
)

ENTRIES = (*_VISION, *_AUDIO)
