"""A byte-level GPT with tied embedding and head, trained on Python's own standard library.

    pdcompile plan examples/gpt.py:build --cluster 1x2 --memory "32 MB"
    torchrun --nproc-per-node=2 -m pdcompile run examples/gpt.py:build --schedule 2bw

The text is read from the interpreter that runs this file, so there is nothing to download; a byte
is a token.  The embedding is the first parameter that the model uses and the head the last: a
pipeline that only counted layers would untie them.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile import Workload

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention, (b, s, width) -> (b, s, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        heads = [
            part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(b, s, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """Bytes (b, s) -> logits of the next byte (b, s, 256)."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy in nats a byte."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def corpus(limit_bytes: int = 4_000_000) -> Tensor:
    """The source text of the standard library, files by name, as one row of bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def batches(batch_size: int, context: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the corpus and the same windows one byte on; without end."""
    text = corpus()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context - 1, (batch_size,), generator=generator)
        rows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
        yield rows[:, :-1], rows[:, 1:]


def build(
    layers: int = 6, width: int = 128, heads: int = 4, context: int = 128, batch_size: int = 16
) -> Workload:
    torch.manual_seed(0)
    model = GPT(layers, width, heads, context)
    inputs, _ = next(batches(batch_size, context))
    return Workload(model, inputs, loss_fn, lambda: batches(batch_size, context))
