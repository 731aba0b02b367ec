"""Text decoders: language models, mixtures of experts and state-space models among them."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Entry, ids, padded
from tests.zoo.hf import entry

LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT: dict[str, Any] = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def causal(step: int) -> dict[str, Any]:
    tokens = ids(step)
    return {"input_ids": tokens, "attention_mask": padded(step), "labels": tokens}


def unpadded(step: int) -> dict[str, Any]:
    tokens = ids(step)
    return {"input_ids": tokens, "labels": tokens}


def _llama(**more: Any) -> dict[str, Any]:
    return {**LLAMA, **more}


def _without(sizes: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {**{k: v for k, v in sizes.items() if k not in names}, **more}


FAMILY = "text decoder"
_DENSE: tuple[Entry, ...] = (
    entry("gpt2", "GPT2LMHeadModel", GPT, causal, FAMILY, lists=("pippy",)),
    entry(
        "gpt_neo",
        "GPTNeoForCausalLM",
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 6,
            "max_position_embeddings": 64,
        },
        causal,
        FAMILY,
        lists=("pippy",),
    ),
    entry(
        "opt",
        "OPTForCausalLM",
        _without(
            LLAMA, "intermediate_size", "num_key_value_heads", ffn_dim=48, word_embed_proj_dim=32
        ),
        causal,
        FAMILY,
        lists=("pippy",),
    ),
    entry(
        "xlnet",
        "XLNetLMHeadModel",
        {"vocab_size": 96, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        causal,
        FAMILY,
        lists=("pippy",),
    ),
    entry(
        "bloom",
        "BloomForCausalLM",
        {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        causal,
        FAMILY,
    ),
    entry("codegen", "CodeGenForCausalLM", {**GPT, "rotary_dim": 4}, causal, FAMILY),
    entry("gptj", "GPTJForCausalLM", {**GPT, "rotary_dim": 4}, causal, FAMILY),
    entry("gpt_neox", "GPTNeoXForCausalLM", _without(LLAMA, "num_key_value_heads"), causal, FAMILY),
    entry("gpt_bigcode", "GPTBigCodeForCausalLM", GPT, causal, FAMILY),
    entry("openai_gpt", "OpenAIGPTLMHeadModel", GPT, unpadded, FAMILY),
    entry("ctrl", "CTRLLMHeadModel", {**GPT, "dff": 48}, unpadded, FAMILY),
    entry(
        "mpt",
        "MptForCausalLM",
        {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        causal,
        FAMILY,
    ),
    entry(
        "xglm",
        "XGLMForCausalLM",
        {"vocab_size": 96, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
        causal,
        FAMILY,
    ),
    entry(
        "falcon",
        "FalconForCausalLM",
        _without(LLAMA, "num_key_value_heads", "intermediate_size"),
        causal,
        FAMILY,
    ),
    entry("llama", "LlamaForCausalLM", LLAMA, causal, FAMILY),
    entry("mistral", "MistralForCausalLM", _llama(sliding_window=6), causal, FAMILY),
    entry("gemma2", "Gemma2ForCausalLM", _llama(head_dim=8, sliding_window=6), causal, FAMILY),
    entry("gemma3", "Gemma3ForCausalLM", _llama(head_dim=8, sliding_window=6), causal, FAMILY),
    entry("phi", "PhiForCausalLM", LLAMA, causal, FAMILY),
    entry("phi3", "Phi3ForCausalLM", LLAMA, causal, FAMILY),
    entry("qwen2", "Qwen2ForCausalLM", LLAMA, causal, FAMILY),
    entry("qwen3", "Qwen3ForCausalLM", _llama(head_dim=8), causal, FAMILY),
    entry("olmo2", "Olmo2ForCausalLM", LLAMA, causal, FAMILY),
    entry("stablelm", "StableLmForCausalLM", LLAMA, causal, FAMILY),
    entry("starcoder2", "Starcoder2ForCausalLM", LLAMA, causal, FAMILY),
    entry("cohere", "CohereForCausalLM", LLAMA, causal, FAMILY),
    entry("granite", "GraniteForCausalLM", LLAMA, causal, FAMILY),
)

_EXPERTS: tuple[Entry, ...] = tuple(
    entry(name, model, sizes, causal, "mixture of experts")
    for name, model, sizes in (
        (
            "mixtral",
            "MixtralForCausalLM",
            _llama(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
        ),
        (
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            _llama(
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                shared_expert_intermediate_size=24,
                output_router_logits=True,
            ),
        ),
        (
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _llama(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8),
        ),
        ("olmoe", "OlmoeForCausalLM", _llama(num_experts=4, num_experts_per_tok=2)),
        (
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            _llama(
                num_key_value_heads=4,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=2,
                topk_group=1,
                first_k_dense_replace=1,
                moe_intermediate_size=24,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=8,
            ),
        ),
        (
            "gpt_oss",
            "GptOssForCausalLM",
            _llama(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=6),
        ),
        ("granitemoe", "GraniteMoeForCausalLM", _llama(num_local_experts=4, num_experts_per_tok=2)),
    )
)

_STATES: tuple[Entry, ...] = tuple(
    entry(name, model, sizes, unpadded, "state space")
    for name, model, sizes in (
        (
            "mamba",
            "MambaForCausalLM",
            {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        ),
        (
            "mamba2",
            "Mamba2ForCausalLM",
            {
                "vocab_size": 96,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "state_size": 8,
                "num_heads": 8,
                "head_dim": 8,
                "n_groups": 2,
                "chunk_size": 8,
            },
        ),
        (
            "rwkv",
            "RwkvForCausalLM",
            {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
        ),
        (
            "recurrent_gemma",
            "RecurrentGemmaForCausalLM",
            _without(
                LLAMA,
                "max_position_embeddings",
                num_hidden_layers=3,
                attention_window_size=6,
                lru_width=32,
            ),
        ),
    )
)

ENTRIES = (*_DENSE, *_EXPERTS, *_STATES)
