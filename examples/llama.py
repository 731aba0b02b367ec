"""Llama-shaped decoders of 8, 70 and 405 billion parameters, on the meta device.

    pdcompile plan examples/llama.py:build_405b --cluster 8x8 --costs estimated --json

The models have no memory: a tensor on the meta device is a shape and a type.  A model that fits
nowhere is captured, costed and planned from these alone, on a laptop.  To run, every process gives
values to its own stage only, from safetensors files or from the function `fill`:

    torchrun --nproc-per-node=2 -m pdcompile run examples/llama.py:build_tiny
    torchrun --nproc-per-node=2 -m pdcompile run examples/llama.py:build_tiny --weights FOLDER

The names are this file's own: for another model's checkpoint, build that model on the meta device
(`with torch.device("meta"): LlamaForCausalLM(config)`), or read it in a function like `fill`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdcompile import Workload

ROTARY_BASE = 500_000.0


class RMSNorm(nn.Module):
    """x / rms(x) over the last dim, in float32, times a weight."""

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale).type_as(x) * self.weight


def rotations(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of every position and pair of channels, (length, width)."""
    exponents = torch.arange(0, width, 2, device=device).float() / width
    angles = torch.outer(torch.arange(length, device=device).float(), ROTARY_BASE**-exponents)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + half) of (b, heads, s, width) by its position's angle."""
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return (x * cosine + turned * sine).type_as(x)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one head of keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.q = nn.Linear(width, heads * self.head_width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.o = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, self.head_width).transpose(1, 2)
        k = self.k(x).view(b, s, self.kv_heads, self.head_width).transpose(1, 2)
        v = self.v(x).view(b, s, self.kv_heads, self.head_width).transpose(1, 2)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward_norm = RMSNorm(width)
        self.feed_forward = FeedForward(width, hidden)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Tokens (b, s) -> logits of the next token; with targets (b, s), their mean loss in nats."""

    def __init__(
        self, *, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head_width = width // heads

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        cosine, sine = rotations(tokens.shape[1], self.head_width, tokens.device)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        logits = self.head(self.norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fill(name: str, tensor: Tensor) -> None:
    """Initialise one tensor: ones for the norms, else normal, narrower where a branch ends."""
    if name.endswith("norm.weight"):
        tensor.fill_(1.0)
    else:
        tensor.normal_(std=0.006 if name.endswith(("o.weight", "down.weight")) else 0.02)


def workload(batch_size: int, context: int, **sizes: int) -> Workload:
    """A bfloat16 decoder of these sizes without memory, and minibatches of one random text."""
    with torch.device("meta"):
        model = Llama(**sizes).to(torch.bfloat16)
    random = torch.Generator().manual_seed(0)
    text = torch.randint(sizes["vocabulary"], (batch_size, context + 1), generator=random)
    inputs = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    return Workload(model, inputs, weights=fill)


def build_8b(batch_size: int = 64, context: int = 4096) -> Workload:
    return workload(
        batch_size, context,
        layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocabulary=128256,
    )  # fmt: skip


def build_70b(batch_size: int = 128, context: int = 4096) -> Workload:
    return workload(
        batch_size, context,
        layers=80, width=8192, heads=64, kv_heads=8, hidden=28672, vocabulary=128256,
    )  # fmt: skip


def build_405b(batch_size: int = 256, context: int = 4096) -> Workload:
    return workload(
        batch_size, context,
        layers=126, width=16384, heads=128, kv_heads=8, hidden=53248, vocabulary=128256,
    )  # fmt: skip


def build_tiny(batch_size: int = 8, context: int = 32, layers: int = 4) -> Workload:
    """The same model small enough for a test."""
    return workload(
        batch_size, context,
        layers=layers, width=64, heads=8, kv_heads=2, hidden=160, vocabulary=256,
    )  # fmt: skip
