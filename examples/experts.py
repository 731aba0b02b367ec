"""A mixture of experts: each token goes to the one of four that its router prefers.

    python examples/experts.py
    torchrun --nproc-per-node=2 examples/experts.py

How many tokens an expert gets depends on the values, so the router and its experts stay on one
stage, and cuts lie between layers.  The router's own loss (experts should be used alike) is added
to the one of the task as in plain PyTorch: the model returns its loss.  Mixtral, Qwen-MoE and
others of transformers need no more (benchmarks/results/coverage.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile


class Experts(nn.Module):
    """Tokens (n, width) -> the same shape, and how unequally the experts were used."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        preference = self.router(tokens).softmax(-1)
        weight, chosen = preference.max(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            mixed = mixed.index_add(0, mine, expert(tokens[mine]) * weight[mine, None])
        share = F.one_hot(chosen, len(self.experts)).float().mean(0)
        return mixed, len(self.experts) * (share * preference.mean(0)).sum()


class Model(nn.Module):
    """Digits (b, s) and what to say after each of them (b, s) -> the loss."""

    def __init__(self, layers: int = 2, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.digits = nn.Embedding(8, width)
        self.mixers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(layers))
        self.layers = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, digits: Tensor, answers: Tensor) -> Tensor:
        x = self.digits(digits)
        balance = torch.zeros(())
        for mixer, experts in zip(self.mixers, self.layers, strict=True):
            x = x + mixer(x)[0]
            mixed, unequal = experts(x.flatten(0, 1))
            x, balance = x + mixed.view_as(x), balance + unequal
        return F.cross_entropy(self.head(x).flatten(0, 1), answers.flatten()) + 0.01 * balance


def batches(batch_size: int = 32, length: int = 4) -> Iterator[tuple[dict[str, Tensor], None]]:
    """Digits, and after each of them the one before it, which only the mixers know."""
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
        workload.model, optimizer=partial(torch.optim.AdamW, lr=1e-2), microbatches=4
    )
    with pipe:
        for step, (batch, _) in zip(range(steps), workload.stream(), strict=False):
            result = pipe.step(**batch)
            if step % 5 == 0 and os.environ.get("RANK", "0") == "0":
                print(f"step {step}: loss {float(result.loss):.3f}")


if __name__ == "__main__":
    main()
