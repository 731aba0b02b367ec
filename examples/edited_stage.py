"""A stage edited by hand: another activation in the middle of a model, without the model's source.

    python examples/edited_stage.py
    torchrun --nproc-per-node=2 examples/edited_stage.py

`pipe.dump(folder)` writes each stage as a file that a person reads and changes, and
`compile(..., sources=folder, allow_edited=True)` runs it.  `pdcompile verify FILE:build --sources
folder --allow-edited` names the first operator that differs from the model, with its line.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile

FIRST = os.environ.get("RANK", "0") == "0"


class Net(nn.Module):
    """Points (b, 8) -> (b, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def trained(steps: int = 21, **options: Any) -> pdcompile.Pipeline:
    torch.manual_seed(0)  # every rank makes the same model and the same data
    model, points = Net(), torch.randn(32, 8)
    pipe = pdcompile.compile(
        model,
        loss_fn=F.mse_loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-2),
        microbatches=4,
        **options,
    )
    for step in range(steps):
        result = pipe.step(points, target=points.sum(1, keepdim=True))
        if step % 5 == 0 and FIRST:
            print(f"step {step}: loss {float(result.loss):.3f}")
    return pipe


def edit(file: Path) -> None:
    """The first activation of a stage's file becomes a SiLU."""
    before, _, after = file.read_text(encoding="utf-8").partition("torch.relu(")
    file.write_text(f"{before}torch.nn.functional.silu({after}", encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:  # all ranks take the sources from rank 0
        with trained() as pipe:
            if FIRST:
                pipe.dump(folder)
                edit(Path(folder) / "stage_0.py")
                print("edited: stage_0.py")
        trained(sources=folder, allow_edited=True).close()


if __name__ == "__main__":
    main()
