"""A Switch transformer whose experts are divided between ranks, each with half of them.

    python examples/switch.py
    torchrun --nproc-per-node=4 examples/switch.py

Stages have two parts each (`split="experts+samples"`), so four ranks are two stages: every part
routes the tokens of its own samples, and has half of the experts of each layer, to which tokens
are sent and from which they come back.  An expert takes no more tokens of a sequence than its
capacity, which evaluation widens; others go through the shared expert alone.  The losses of the
routers, born on both stages, are added to that of the task as in plain PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile


class Switch(nn.Module):
    """Tokens (b, s, width) -> the same shape, and the losses of the router."""

    def __init__(self, width: int, experts: int, capacity: float, evaluated: float) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)
        self.shared = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.factors = capacity, evaluated

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        count = len(self.up)
        with torch.autocast(x.device.type, enabled=False):  # the router in full precision
            logits = self.router(x.float())
            preference = logits.softmax(-1)
            weight, chosen = preference.max(-1)
            taken = F.one_hot(chosen, count)
            place = (taken.cumsum(1) * taken).sum(-1) - 1  # among those of the expert
            factor = self.factors[0] if self.training else self.factors[1]
            capacity = max(1, int(factor * x.shape[1] / count))
            slot = F.one_hot(place.clamp(max=capacity - 1), capacity)
            slot = slot * (place < capacity).unsqueeze(-1)  # the rest is dropped
            sent = (taken.unsqueeze(-1) * slot.unsqueeze(-2)).float()  # (b, s, experts, capacity)
            balance = count * (taken.float().mean((0, 1)) * preference.mean((0, 1))).sum()
            large = logits.logsumexp(-1).square().mean()
        given = torch.einsum("bsec,bsd->ebcd", sent.to(x.dtype), x)
        hidden = F.gelu(torch.einsum("ebcd,edh->ebch", given, self.up))
        made = torch.einsum("ebch,ehd->ebcd", hidden, self.down)
        mixed = torch.einsum("bsec,ebcd->bsd", (sent * weight[..., None, None]).to(x.dtype), made)
        return mixed + self.shared(x), 0.01 * balance + 0.001 * large


class Layer(nn.Module):
    """Causal attention, then a switch."""

    def __init__(self, width: int, experts: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.switch, self.heads = Switch(width, experts, 1.0, 2.0), heads

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, s, width = x.shape
        parts = self.qkv(self.norm(x)).view(b, s, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, s, width))
        switched, losses = self.switch(self.norm_2(x))
        return x + switched, losses


class Model(nn.Module):
    """Digits (b, s) and what to say after each of them (b, s) -> the loss."""

    def __init__(self, layers: int = 2, width: int = 32, experts: int = 4, most: int = 8) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(8, width), nn.Embedding(most, width)
        self.layers = nn.ModuleList(Layer(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, digits: Tensor, answers: Tensor) -> dict[str, Tensor]:
        x = self.digits(digits) + self.places.weight[: digits.shape[1]]
        routers = torch.zeros((), device=x.device)
        for layer in self.layers:
            x, own = layer(x)
            routers = routers + own
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), answers.flatten())
        return {"loss": loss + routers, "logits": logits}


def batches(batch_size: int = 32, length: int = 8) -> Iterator[tuple[dict[str, Tensor], None]]:
    """Digits, and after each of them the one before it, which only attention knows."""
    random = torch.Generator().manual_seed(0)
    while True:
        digits = torch.randint(8, (batch_size, length), generator=random)
        yield {"digits": digits, "answers": F.pad(digits[:, :-1], (1, 0))}, None


def build() -> pdcompile.Workload:
    torch.manual_seed(0)
    return pdcompile.Workload(Model(), next(batches())[0], batches=batches)


def main(steps: int = 21) -> None:
    workload = build()
    pipe = pdcompile.compile(
        workload.model, optimizer=partial(torch.optim.AdamW, lr=1e-2), microbatches=4, parts=2,
        split="experts+samples",
    )  # fmt: skip
    with pipe:
        for step, (batch, _) in zip(range(steps), workload.stream(), strict=False):
            result = pipe.step(**batch)
            if step % 5 == 0 and os.environ.get("RANK", "0") == "0":
                print(f"step {step}: loss {float(result.loss):.3f}")


if __name__ == "__main__":
    main()
