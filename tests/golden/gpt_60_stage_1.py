"""GPT (models.py:73), stage 1 of 2.

Holds a part of blocks.2, blocks.3, ln_f, lm_head.

    in   x, part, part_1  f32[b, 16, 32]    from stage 0
    in   view             f32[b, 16, 4, 8]  from stage 0
    out  logits           f32[b, 16, 64]    the model's output
    loss target           i64[b, 16]        from the call

Comments give dtype[shape]: b is the microbatch size. Names are the model's, also in
state_dict(). Written by pdcompile: edit it, and run it by compile(..., sources=folder,
allow_edited=True). `python pipeline.py` runs all stages. Source lines are those of
tests/helpers/models.py.
"""

import torch.nn.functional as F
from torch import nn


def draw(where, index):
    """Called before every random op: pdcompile seeds the generator here. Alone it does nothing."""


class Block(nn.Module):  # models.py:30: blocks.3
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


class Stage1(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"2": nn.Module(), "3": Block()})
        self.blocks["2"].proj = nn.Linear(32, 32)
        self.blocks["2"].ln_2 = nn.LayerNorm(32)
        self.blocks["2"].up = nn.Linear(32, 128)
        self.blocks["2"].down = nn.Linear(128, 32)
        self.blocks["2"].drop = nn.Dropout(p=0.1)
        self.ln_f = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, x, part, part_1, view):
        b = x.shape[0]
        # blocks.2 (Block, models.py:30, a part of it)
        transpose = view.transpose(1, 2)  # f32[b, 4, 16, 8]
        transpose_1 = part.view(b, 16, 4, 8).transpose(1, 2)  # f32[b, 4, 16, 8]
        transpose_2 = part_1.view(b, 16, 4, 8).transpose(1, 2)  # f32[b, 4, 16, 8]
        draw("blocks.2", 0)
        mixed = F.scaled_dot_product_attention(
            transpose, transpose_1, transpose_2, dropout_p=0.1 if self.training else 0.0,
            is_causal=True,
        )  # f32[b, 4, 16, 8]
        proj = self.blocks["2"].proj(mixed.transpose(1, 2).reshape(b, 16, 32))  # f32[b, 16, 32]
        x = x + self.blocks["2"].drop(proj)  # f32[b, 16, 32]
        gelu = F.gelu(self.blocks["2"].up(self.blocks["2"].ln_2(x)))  # f32[b, 16, 128]
        draw("blocks.2", 1)
        dropout = F.dropout(self.blocks["2"].down(gelu), p=0.1, training=self.training)
        x = x + dropout  # f32[b, 16, 32]

        x = self.blocks["3"](x)  # f32[b, 16, 32]
        logits = self.lm_head(self.ln_f(x))  # f32[b, 16, 64]
        return (logits,)

    def loss(self, logits, target):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())  # f32[]
