"""T5 of transformers, an encoder and a decoder, learns to read backwards.

    python examples/t5.py
    torchrun --nproc-per-node=2 examples/t5.py

Every layer of the decoder reads what the encoder made: a value that several later stages need is
sent to each of them once, and their gradients come back the same way.  `pdcompile plan
examples/t5.py:build --cluster 1x4` shows where four devices would be cut; a larger model changes
only `build`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

import pdcompile


def batches(batch_size: int = 16, length: int = 6) -> Iterator[tuple[dict[str, Tensor], None]]:
    """Letters, and the same letters from the last to the first."""
    random = torch.Generator().manual_seed(0)
    while True:
        letters = torch.randint(2, 12, (batch_size, length), generator=random)
        yield {"input_ids": letters, "labels": letters.flip(1)}, None


def build() -> pdcompile.Workload:
    torch.manual_seed(0)
    config = T5Config(
        num_layers=2, d_model=48, d_kv=12, d_ff=96, num_heads=4, vocab_size=12, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    inputs, _ = next(batches())
    return pdcompile.Workload(T5ForConditionalGeneration(config), inputs, batches=batches)


def main(steps: int = 21) -> None:
    workload = build()
    pipe = pdcompile.compile(
        workload.model, optimizer=partial(torch.optim.AdamW, lr=5e-3), microbatches=4
    )
    with pipe:
        for step, (batch, _) in zip(range(steps), workload.stream(), strict=False):
            result = pipe.step(**batch)
            if step % 5 == 0 and os.environ.get("RANK", "0") == "0":
                print(f"step {step}: loss {float(result.loss):.3f}")


if __name__ == "__main__":
    main()
