"""Text encoders."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import BATCH, Entry, ids, padded
from tests.zoo.hf import entry

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
PIPPY = ("pippy",)


def masked(step: int, length: int = 12) -> dict[str, Any]:
    """A batch of masked language modelling: only some positions are predicted."""
    tokens = ids(step, length)
    labels = torch.where(torch.arange(length) % 3 == step % 3, tokens, -100)
    return {"input_ids": tokens, "attention_mask": padded(step, length), "labels": labels}


def with_boxes(step: int) -> dict[str, Any]:
    return {**masked(step), "bbox": torch.arange(48).view(1, 12, 4).expand(BATCH, -1, -1) + step}


def plain(step: int) -> dict[str, Any]:
    batch = masked(step)
    del batch["attention_mask"]
    return batch


def classified(step: int) -> dict[str, Any]:
    return {**masked(step), "labels": ids(step)[:, 0] % 2}


def questions(step: int) -> dict[str, Any]:
    """Questions: where the answer starts and ends."""
    tokens = ids(step)
    return {
        "input_ids": tokens,
        "attention_mask": padded(step),
        "start_positions": tokens[:, 0] % 4,
        "end_positions": tokens[:, 1] % 4 + 4,
    }


def _sized(**more: Any) -> dict[str, Any]:
    return {**SMALL, **more}


FAMILY = "text encoder"
ENTRIES: tuple[Entry, ...] = (
    entry("albert", "AlbertForMaskedLM", _sized(embedding_size=16), masked, FAMILY, lists=PIPPY),
    entry("bert", "BertForMaskedLM", _sized(), masked, FAMILY, lists=PIPPY),
    entry("camembert", "CamembertForMaskedLM", _sized(), masked, FAMILY, lists=PIPPY),
    entry(
        "convbert", "ConvBertForMaskedLM", _sized(embedding_size=16), masked, FAMILY, lists=PIPPY
    ),
    entry(
        "deberta",
        "DebertaForMaskedLM",
        _sized(relative_attention=True, pos_att_type=["c2p", "p2c"]),
        masked,
        FAMILY,
        lists=PIPPY,
    ),
    entry(
        "deberta_v2",
        "DebertaV2ForMaskedLM",
        _sized(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
        masked,
        FAMILY,
        lists=PIPPY,
    ),
    entry(
        "distilbert",
        "DistilBertForMaskedLM",
        {
            "vocab_size": 96,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
        masked,
        FAMILY,
        lists=PIPPY,
    ),
    entry("electra", "ElectraForMaskedLM", _sized(embedding_size=16), masked, FAMILY, lists=PIPPY),
    entry("fnet", "FNetForMaskedLM", _sized(), plain, FAMILY, lists=PIPPY),
    entry("layoutlm", "LayoutLMForMaskedLM", _sized(), with_boxes, FAMILY, lists=PIPPY),
    entry("megatron_bert", "MegatronBertForMaskedLM", _sized(), masked, FAMILY, lists=PIPPY),
    entry(
        "mobilebert",
        "MobileBertForMaskedLM",
        _sized(embedding_size=32, intra_bottleneck_size=16, true_hidden_size=16),
        masked,
        FAMILY,
        lists=PIPPY,
    ),
    entry("roberta", "RobertaForSequenceClassification", _sized(), classified, FAMILY),
    entry("bert_qa", "BertForQuestionAnswering", _sized(), questions, FAMILY),
    entry(
        "funnel",
        "FunnelForMaskedLM",
        {
            "vocab_size": 96,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
        },
        masked,
        FAMILY,
    ),
    entry("longformer", "LongformerForMaskedLM", _sized(attention_window=4), masked, FAMILY),
    entry("modernbert", "ModernBertForMaskedLM", _sized(pad_token_id=0), masked, FAMILY),
    entry("mpnet", "MPNetForMaskedLM", _sized(), masked, FAMILY),
    entry(
        "nystromformer",
        "NystromformerForMaskedLM",
        _sized(num_landmarks=4, segment_means_seq_len=12),
        plain,
        FAMILY,
    ),
    entry("roformer", "RoFormerForMaskedLM", _sized(embedding_size=32), masked, FAMILY),
    entry("squeezebert", "SqueezeBertForMaskedLM", _sized(embedding_size=32), masked, FAMILY),
    entry(
        "xlm",
        "XLMWithLMHeadModel",
        {"vocab_size": 96, "emb_dim": 32, "n_layers": 2, "n_heads": 4},
        masked,
        FAMILY,
    ),
    entry("esm", "EsmForMaskedLM", _sized(mask_token_id=2, pad_token_id=1), masked, FAMILY),
)
