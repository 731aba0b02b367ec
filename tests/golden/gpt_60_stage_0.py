"""GPT (models.py:73), stage 0 of 2.

Holds wte, wpe, drop, blocks.0-1, a part of blocks.2.

    in   ids              i64[b, 16]        from the call
    out  x, part, part_1  f32[b, 16, 32]    to stage 1
    out  view             f32[b, 16, 4, 8]  to stage 1

Comments give dtype[shape]: b is the microbatch size. Names are the model's, also in
state_dict(). Written by pdcompile: edit it, and run it by compile(..., sources=folder,
allow_edited=True). `python pipeline.py` runs all stages. Source lines are those of
tests/helpers/models.py.
"""

import torch
import torch.nn.functional as F
from torch import nn


def draw(where, index):
    """Called before every random op: pdcompile seeds the generator here. Alone it does nothing."""


class Block(nn.Module):  # models.py:30: blocks.0-1
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.proj = nn.Linear(32, 32)
        self.ln_2 = nn.LayerNorm(32)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)
        self.drop = nn.Dropout(p=0.1)

    def forward(self, x):  # f32[b, 16, 32]
        b = x.shape[0]
        part, part_1, part_2 = self.qkv(self.ln_1(x)).split(32, dim=2)  # f32[b, 16, 32] each
        transpose = part.view(b, 16, 4, 8).transpose(1, 2)  # f32[b, 4, 16, 8]
        transpose_1 = part_1.view(b, 16, 4, 8).transpose(1, 2)  # f32[b, 4, 16, 8]
        transpose_2 = part_2.view(b, 16, 4, 8).transpose(1, 2)  # f32[b, 4, 16, 8]
        draw(self, 0)
        mixed = F.scaled_dot_product_attention(
            transpose, transpose_1, transpose_2, dropout_p=0.1 if self.training else 0.0,
            is_causal=True,
        )  # f32[b, 4, 16, 8]
        drop = self.drop(self.proj(mixed.transpose(1, 2).reshape(b, 16, 32)))  # f32[b, 16, 32]
        x = x + drop  # f32[b, 16, 32]
        draw(self, 1)
        dropout = F.dropout(self.down(F.gelu(self.up(self.ln_2(x)))), p=0.1, training=self.training)
        return x + dropout  # f32[b, 16, 32]


class Stage0(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(64, 32)
        self.wpe = nn.Embedding(16, 32)
        self.drop = nn.Dropout(p=0.1)
        self.blocks = nn.ModuleList([Block(), Block(), nn.Module()])
        self.blocks[2].ln_1 = nn.LayerNorm(32)
        self.blocks[2].qkv = nn.Linear(32, 96)

    def forward(self, ids):
        b = ids.shape[0]
        positions = torch.arange(16, device=ids.device)  # i64[16]
        x = self.drop(self.wte(ids) + self.wpe(positions))  # f32[b, 16, 32]
        x = self.blocks[0](x)  # f32[b, 16, 32]
        x = self.blocks[1](x)  # f32[b, 16, 32]
        # blocks.2 (Block, models.py:30, a part of it)
        part_2, part, part_1 = self.blocks[2].qkv(self.blocks[2].ln_1(x)).split(32, dim=2)
        view = part_2.view(b, 16, 4, 8)  # f32[b, 16, 4, 8]
        return (x, part, part_1, view)
