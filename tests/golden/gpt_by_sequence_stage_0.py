"""GPT (gpt.py:72), stage 0 of 1.

Holds tokens, positions, blocks.0-1, ln, head. Sizes are those of one of 2 parts, which exchange
values by the functions of pdcompile_parts.py.

    in   ids     i64[b, 16]      from the call
    out  head    f32[b, 8, 256]  the model's output
    loss target  i64[b, 16]      from the call

Comments give dtype[shape]: b is the microbatch size. Names are the model's, also in
state_dict(). Written by pdcompile: edit it, and run it by compile(..., sources=folder,
allow_edited=True). `python pipeline.py` runs all stages. Source lines are those of
examples/gpt.py.
"""

import torch
import torch.nn.functional as F
from torch import nn

from pdcompile_parts import mean_cross_entropy, own, swap


class Attention(nn.Module):  # gpt.py:35: blocks.0-1.attention
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.proj = nn.Linear(64, 64)

    def forward(self, x):  # f32[b, 8, 64]
        b = x.shape[0]
        part, part_1, part_2 = self.qkv(x).chunk(3, -1)  # f32[b, 8, 64] each
        transpose = part.view(b, 8, 4, -1).transpose(1, 2)  # f32[b, 4, 8, 16]
        transpose_1 = part_1.view(b, 8, 4, -1).transpose(1, 2)  # f32[b, 4, 8, 16]
        transpose_2 = part_2.view(b, 8, 4, -1).transpose(1, 2)  # f32[b, 4, 8, 16]
        transpose_3 = swap(transpose, 2, 1)  # f32[b, 2, 16, 16]
        transpose_4 = swap(transpose_1, 2, 1)  # f32[b, 2, 16, 16]
        transpose_5 = swap(transpose_2, 2, 1)  # f32[b, 2, 16, 16]
        mixed = F.scaled_dot_product_attention(
            transpose_3, transpose_4, transpose_5, is_causal=True
        )  # f32[b, 2, 16, 16]
        return self.proj(swap(mixed.transpose(1, 2).reshape(b, 16, 32), 2, 1))  # f32[b, 8, 64]


class Block(nn.Module):  # gpt.py:53: blocks.0-1
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(64)
        self.attention = Attention()
        self.ln_2 = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x):  # f32[b, 8, 64]
        attention = self.attention(self.ln_1(x))  # f32[b, 8, 64]
        x = x + attention  # f32[b, 8, 64]
        return x + self.down(F.gelu(self.up(self.ln_2(x))))  # f32[b, 8, 64]


class Stage0(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, 64)
        self.positions = nn.Embedding(16, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln = nn.LayerNorm(64)
        self.head = nn.Linear(64, 256, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, ids):
        tokens = self.tokens(own(ids, 1))  # f32[b, 8, 64]
        positions = self.positions(own(torch.arange(16, device=ids.device), 0))  # f32[8, 64]
        x = tokens + positions  # f32[b, 8, 64]
        for block in self.blocks:  # blocks.0-1
            x = block(x)  # f32[b, 8, 64]
        head = self.head(self.ln(x))  # f32[b, 8, 256]
        return (head,)

    def loss(self, head, target):
        return mean_cross_entropy(head.flatten(0, 1), own(target, 1).flatten())  # f32[]
