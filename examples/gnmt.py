"""LSTMs shaped like Google's translator (GNMT): a deep encoder, a deep decoder, attention between.

    python examples/gnmt.py
    torchrun --nproc-per-node=2 examples/gnmt.py

PipeDream's models of this shape gained most from pipelines: recurrent layers have many weights, for
which replicas exchange gradients, and narrow activations, which stages send.  `build(layers=8,
width=1024)` is GNMT-8; `pdcompile plan examples/gnmt.py:build --cluster 1x4` plans this one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile

WORDS = 16


class GNMT(nn.Module):
    """Source and shifted target words (b, s) -> logits (b, s, words)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.forwards = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.encoder = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(layers - 1)
        )
        self.first = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.ModuleList(
            nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1)
        )
        self.head = nn.Linear(2 * width, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.forwards(self.source(source))[0]
        for lstm in self.encoder:
            memory = memory + lstm(memory)[0]
        x = self.first(self.target(target))[0]
        context = F.scaled_dot_product_attention(x, memory, memory)
        for lstm in self.decoder:
            x = x + lstm(torch.cat([x, context], dim=-1))[0]
        return self.head(torch.cat([x, context], dim=-1))


def loss_fn(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def batches(batch_size: int = 32, length: int = 6) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """A sentence, and the same in a language whose every word is the next one."""
    random = torch.Generator().manual_seed(0)
    while True:
        source = torch.randint(1, WORDS, (batch_size, length), generator=random)
        words = source % (WORDS - 1) + 1
        shifted = F.pad(words[:, :-1], (1, 0))  # the decoder sees what it has said before
        yield {"source": source, "target": shifted}, words


def build(layers: int = 3, width: int = 48) -> pdcompile.Workload:
    torch.manual_seed(0)
    return pdcompile.Workload(GNMT(layers, width), next(batches())[0], loss_fn, batches)


def main(steps: int = 21) -> None:
    workload = build()
    pipe = pdcompile.compile(
        workload.model,
        loss_fn=loss_fn,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        microbatches=4,
    )
    with pipe:
        for step, (inputs, words) in zip(range(steps), workload.stream(), strict=False):
            result = pipe.step_call((), inputs, words)  # `target` is an argument of the model here
            if step % 5 == 0 and os.environ.get("RANK", "0") == "0":
                print(f"step {step}: loss {float(result.loss):.3f}")


if __name__ == "__main__":
    main()
