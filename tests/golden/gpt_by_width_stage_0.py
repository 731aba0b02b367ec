"""GPT (gpt.py:72), stage 0 of 1.

Holds tokens, positions, blocks.0-1, ln, head. Sizes are those of one of 2 parts, which exchange
values by the functions of pdcompile_parts.py.

    in   ids     i64[b, 16]       from the call
    out  head    f32[b, 16, 128]  the model's output
    loss target  i64[b, 16]       from the call

Comments give dtype[shape]: b is the microbatch size. Names are the model's, also in
state_dict(). Written by pdcompile: edit it, and run it by compile(..., sources=folder,
allow_edited=True). `python pipeline.py` runs all stages. Source lines are those of
examples/gpt.py.
"""

import torch
import torch.nn.functional as F
from torch import nn

from pdcompile_parts import spread, total, vocabulary_cross_entropy, vocabulary_embedding


class Attention(nn.Module):  # gpt.py:35: blocks.0-1.attention
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 96)
        self.proj = nn.Module()
        self.proj.weight = nn.Parameter(0.02 * torch.randn(64, 32))
        self.proj.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x):  # f32[b, 16, 64]
        b = x.shape[0]
        part, part_1, part_2 = self.qkv(spread(x)).chunk(3, -1)  # f32[b, 16, 32] each
        transpose = part.view(b, 16, 2, -1).transpose(1, 2)  # f32[b, 2, 16, 16]
        transpose_1 = part_1.view(b, 16, 2, -1).transpose(1, 2)  # f32[b, 2, 16, 16]
        transpose_2 = part_2.view(b, 16, 2, -1).transpose(1, 2)  # f32[b, 2, 16, 16]
        mixed = F.scaled_dot_product_attention(transpose, transpose_1, transpose_2, is_causal=True)
        linear = F.linear(mixed.transpose(1, 2).reshape(b, 16, 32), self.proj.weight)
        return total(linear) + self.proj.bias  # f32[b, 16, 64]


class Block(nn.Module):  # gpt.py:53: blocks.0-1
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(64)
        self.attention = Attention()
        self.ln_2 = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Module()
        self.down.weight = nn.Parameter(0.02 * torch.randn(64, 128))
        self.down.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x):  # f32[b, 16, 64]
        attention = self.attention(self.ln_1(x))  # f32[b, 16, 64]
        x = x + attention  # f32[b, 16, 64]
        linear = F.linear(F.gelu(self.up(spread(self.ln_2(x)))), self.down.weight)  # f32[b, 16, 64]
        return x + (total(linear) + self.down.bias)  # f32[b, 16, 64]


class Stage0(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Module()
        self.tokens.weight = nn.Parameter(0.02 * torch.randn(128, 64))
        self.positions = nn.Embedding(16, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln = nn.LayerNorm(64)
        self.head = nn.Linear(64, 128, bias=False)
        self.tokens.weight = self.head.weight  # tied

    def forward(self, ids):
        tokens = total(vocabulary_embedding(ids, self.tokens.weight))  # f32[b, 16, 64]
        positions = self.positions(torch.arange(16, device=ids.device))  # f32[16, 64]
        x = tokens + positions  # f32[b, 16, 64]
        for block in self.blocks:  # blocks.0-1
            x = block(x)  # f32[b, 16, 64]
        head = self.head(spread(self.ln(x)))  # f32[b, 16, 128]
        return (head,)

    def loss(self, head, target):
        return vocabulary_cross_entropy(head.flatten(0, 1), target.flatten())  # f32[]
