"""Kimi K2's recipe: interleaved stages, Muon on whole matrices, and QK-clip.

    python examples/kimi.py
    torchrun --nproc-per-node=2 examples/kimi.py

One dense layer and four with experts do not divide by four stages, two on each rank.  Attention
notes the largest logit of each head in a buffer; after Muon's update the optimizer shrinks the
queries and keys of heads whose logits were above a limit (QK-clip: arXiv 2507.20534, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile import CutAt

LAYERS = (CutAt("layers.*"),)  # an attention's weights and peaks are then on one stage


class Attention(nn.Module):
    """Causal attention (b, s, width) -> the same shape; `peak` has each head's largest logit."""

    peak: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.heads = heads
        self.register_buffer("peak", torch.zeros(heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        logits = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        logits = logits.masked_fill(later, float("-inf"))
        if self.training:
            self.peak.copy_(torch.maximum(self.peak, logits.detach().amax((0, 2, 3))))
        mixed: Tensor = self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return mixed


class Experts(nn.Module):
    """Tokens through the two experts that each prefers, and the shared one."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(feed_forward(width) for _ in range(count))
        self.shared = feed_forward(width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        least = scores.topk(2, -1).values[..., -1:]
        gates = torch.where(scores >= least, scores, 0.0)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        mixed: Tensor = (made * gates.unsqueeze(-2)).sum(-1) + self.shared(x)
        return mixed


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 2 * width, bias=False), nn.SiLU(), nn.Linear(2 * width, width, bias=False)
    )


class Layer(nn.Module):
    """Attention, then one feed-forward net (`experts` = 0) or several."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, 4)
        self.mlp = Experts(width, experts) if experts else feed_forward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        mixed: Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class Model(nn.Module):
    """Tokens (b, s) -> logits of the next ones (b, s, 16)."""

    def __init__(self, width: int = 32, layers: int = 5, experts: int = 4, most: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, width), nn.Embedding(most, width)
        self.layers = nn.ModuleList(Layer(width, experts if n else 0) for n in range(layers))
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class MuonClip(torch.optim.Muon):
    """Muon, then QK-clip of the queries and keys that have a buffer of peaks.

    A stage steps its own parameters alone: the others have no gradient then.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], buffer: Any, limit: float) -> None:
        super().__init__([one for _, one in named], lr=2e-2, weight_decay=0.0)
        self.limit = limit
        found, ends = dict(named), ("query.weight", "key.weight")
        names = [name.removesuffix(ends[0]) for name in found if name.endswith(ends[0])]
        self.attention = [
            (buffer(f"{n}peak", "max"), [found[n + end] for end in ends]) for n in names
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for peak, matrices in self.attention:
            if matrices[0].grad is None:
                continue
            factor = (self.limit / peak).clamp(max=1.0).sqrt()
            for matrix in matrices:
                rows = matrix.shape[0] // len(peak)
                matrix.mul_(factor.repeat_interleave(rows).unsqueeze(-1))
            peak.zero_()
        return loss


def optimizer(parameters: Any, limit: float = 1.0) -> list[torch.optim.Optimizer]:
    """Muon with QK-clip of the matrices of layers, AdamW of the rest."""
    matrices = [(n, p) for n, p in parameters.named if n.startswith("layers.") and p.ndim == 2]
    chosen = {name for name, _ in matrices}
    rest = [p for name, p in parameters.named if name not in chosen]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(MuonClip(matrices, parameters.buffer, limit))
    if rest:
        found.append(torch.optim.AdamW(rest, lr=1e-2))
    return found


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches(batch_size: int = 32, length: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens, and after each of them the one before it, which only attention knows."""
    random = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(16, (batch_size, length), generator=random)
        yield tokens, F.pad(tokens[:, :-1], (1, 0))


def build() -> pdcompile.Workload:
    torch.manual_seed(0)
    x, y = next(batches())
    return pdcompile.Workload(Model(), x, example_target=y, loss_fn=loss_fn, batches=batches)


def main(steps: int = 21) -> None:
    workload, (x, y) = build(), next(batches())
    pipe = pdcompile.compile(
        workload.model, x, example_target=y, loss_fn=loss_fn, optimizer=optimizer,
        schedule="interleaved+1", stages=4, microbatches=4, cluster="1x2",
        constraints=LAYERS,
    )  # fmt: skip
    with pipe:
        for step, (x, y) in zip(range(steps), workload.stream(), strict=False):
            result = pipe.step(x, target=y)
            if step % 5 == 0:
                print(f"step {step}: loss {float(result.loss):.3f}")


if __name__ == "__main__":
    main()
