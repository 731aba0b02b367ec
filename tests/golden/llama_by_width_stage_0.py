"""LlamaForCausalLM (modeling_llama.py:425), stage 0 of 1.

Holds model, lm_head. Sizes are those of one of 2 parts, which exchange values by the functions
of pdcompile_parts.py.

    in   input_ids  i64[b, 16]      from the call
    out  logits     f32[b, 16, 48]  the model's output
    loss target     i64[b, 16]      from the call

Comments give dtype[shape]: b is the microbatch size. Names are the model's, also in
state_dict(). Written by pdcompile: edit it, and run it by compile(..., sources=folder,
allow_edited=True). `python pipeline.py` runs all stages. Source lines are those of
transformers/activations.py, transformers/models/llama/modeling_llama.py.
"""

import torch
import torch.nn.functional as F
from torch import nn

from pdcompile_parts import spread, total, vocabulary_cross_entropy, vocabulary_embedding


class SiLUActivation(nn.Module):  # activations.py:102: model.layers.0-1.mlp.act_fn
    def forward(self, input):  # f32[b, 16, 80]
        return F.silu(input)  # f32[b, 16, 80]


class LlamaRMSNorm(nn.Module):  # modeling_llama.py:61
    # model.layers.0-1.{input_layernorm, post_attention_layernorm}, model.norm
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, hidden_states):  # f32[b, 16, 64]
        variance = (hidden_states ** 2).mean(-1, keepdim=True)  # f32[b, 16, 1]
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-06)  # f32[b, 16, 64]
        return self.weight * hidden_states  # f32[b, 16, 64]


class LlamaAttention(nn.Module):  # modeling_llama.py:232: model.layers.0-1.self_attn
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 32, bias=False)
        self.k_proj = nn.Linear(64, 16, bias=False)
        self.v_proj = nn.Linear(64, 16, bias=False)
        self.o_proj = nn.Linear(32, 64, bias=False)

    def forward(self, hidden_states, cos, sin):  # f32[b, 16, 64], f32[1, 16, 16], f32[1, 16, 16]
        b = hidden_states.shape[0]
        hidden_states = spread(hidden_states)  # f32[b, 16, 64]
        query_states = self.q_proj(hidden_states).view(b, 16, -1, 16).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(b, 16, -1, 16).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(b, 16, -1, 16).transpose(1, 2)
        cos = cos.unsqueeze(1)  # f32[1, 1, 16, 16]
        sin = sin.unsqueeze(1)  # f32[1, 1, 16, 16]
        mul = query_states * cos  # f32[b, 2, 16, 16]
        x1 = query_states[..., :8]  # f32[b, 2, 16, 8]
        x2 = query_states[..., 8:]  # f32[b, 2, 16, 8]
        q_embed = mul + (torch.cat((-x2, x1), dim=-1) * sin)  # f32[b, 2, 16, 16]
        mul_1 = key_states * cos  # f32[b, 1, 16, 16]
        x1 = key_states[..., :8]  # f32[b, 1, 16, 8]
        x2 = key_states[..., 8:]  # f32[b, 1, 16, 8]
        k_embed = mul_1 + (torch.cat((-x2, x1), dim=-1) * sin)  # f32[b, 1, 16, 16]
        attn_output = F.scaled_dot_product_attention(
            q_embed, k_embed, value_states, scale=0.25, is_causal=True, enable_gqa=True
        )  # f32[b, 2, 16, 16]
        attn_output = attn_output.reshape(b, -1, 16, 16)  # f32[b, 2, 16, 16]
        attn_output = attn_output.transpose(1, 2).contiguous()  # f32[b, 16, 2, 16]
        attn_output = attn_output.reshape(b, 16, -1).contiguous()  # f32[b, 16, 32]
        return total(self.o_proj(attn_output))  # f32[b, 16, 64]


class LlamaMLP(nn.Module):  # modeling_llama.py:163: model.layers.0-1.mlp
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(64, 80, bias=False)
        self.up_proj = nn.Linear(64, 80, bias=False)
        self.down_proj = nn.Linear(80, 64, bias=False)
        self.act_fn = SiLUActivation()

    def forward(self, x):  # f32[b, 16, 64]
        hidden_states = spread(x)  # f32[b, 16, 64]
        act_fn = self.act_fn(self.gate_proj(hidden_states))  # f32[b, 16, 80]
        return total(self.down_proj(act_fn * self.up_proj(hidden_states)))  # f32[b, 16, 64]


class LlamaDecoderLayer(nn.Module):  # modeling_llama.py:284: model.layers.0-1
    def __init__(self):
        super().__init__()
        self.self_attn = LlamaAttention()
        self.mlp = LlamaMLP()
        self.input_layernorm = LlamaRMSNorm()
        self.post_attention_layernorm = LlamaRMSNorm()

    def forward(self, hidden_states, cos, sin):  # f32[b, 16, 64], f32[1, 16, 16], f32[1, 16, 16]
        hidden_states_1 = self.input_layernorm(hidden_states)  # f32[b, 16, 64]
        attn_output = self.self_attn(hidden_states_1, cos, sin)  # f32[b, 16, 64]
        hidden_states = hidden_states + attn_output  # f32[b, 16, 64]
        hidden_states_1 = self.post_attention_layernorm(hidden_states)  # f32[b, 16, 64]
        down_proj = self.mlp(hidden_states_1)  # f32[b, 16, 64]
        return hidden_states + down_proj  # f32[b, 16, 64]


class LlamaRotaryEmbedding(nn.Module):  # modeling_llama.py:108: model.rotary_emb
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.zeros(8), persistent=False)
        self.register_buffer("original_inv_freq", torch.zeros(8), persistent=False)

    def forward(self, position_ids):  # i64[1, 16]
        freqs = position_ids[..., None].float() * self.inv_freq  # f32[1, 16, 8]
        emb = torch.cat((freqs, freqs), dim=-1)  # f32[1, 16, 16]
        cos = emb.cos() * 1.0  # f32[1, 16, 16]
        return cos, emb.sin() * 1.0  # 2 x f32[1, 16, 16]


class LlamaModel(nn.Module):  # modeling_llama.py:353: model
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = nn.Parameter(0.02 * torch.randn(48, 64))
        self.layers = nn.ModuleList(LlamaDecoderLayer() for _ in range(2))
        self.norm = LlamaRMSNorm()
        self.rotary_emb = LlamaRotaryEmbedding()

    def forward(self, input_ids):  # i64[b, 16]
        vocabulary_embedding_ = vocabulary_embedding(input_ids, self.embed_tokens.weight)
        inputs_embeds = total(vocabulary_embedding_)  # f32[b, 16, 64]
        position_ids = torch.arange(16, device=input_ids.device) + 0  # i64[16]
        position_ids = position_ids.unsqueeze(0)  # i64[1, 16]
        with torch.no_grad():
            cos, sin = self.rotary_emb(position_ids)  # 2 x f32[1, 16, 16]
        hidden_states = inputs_embeds
        for llamadecoderlayer in self.layers:  # model.layers.0-1
            hidden_states = llamadecoderlayer(hidden_states, cos, sin)  # f32[b, 16, 64]
        return self.norm(hidden_states)  # f32[b, 16, 64]


class Stage0(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = LlamaModel()
        self.lm_head = nn.Linear(64, 48, bias=False)

    def forward(self, input_ids):
        hidden_states = self.model(input_ids)  # f32[b, 16, 64]
        logits = self.lm_head(spread(hidden_states[:, 0:, :]))  # f32[b, 16, 48]
        return (logits,)

    def loss(self, logits, target):
        return vocabulary_cross_entropy(logits.flatten(0, 1), target.flatten())  # f32[]
