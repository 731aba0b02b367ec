"""Runs the 2 stages of GPT in this process, forward and backward.

    python pipeline.py

One microbatch of made-up inputs: right shapes and dtypes, integers in the range that the
model accepts.  Weights are fresh.  It needs torch and the files beside it.
"""

from pathlib import Path

import torch
from stage_0 import Stage0
from stage_1 import Stage1

B = 2  # microbatch size


def make_inputs():
    """Leaves of the call and of the target, by path."""
    return {
        "ids": torch.randint(64, (B, 16)),  # i64[b, 16]
        "target": torch.randint(2, (B, 16)),  # i64[b, 16]
    }


def load(stage, path):
    """Fill buffers and constants from the file that was written with the source, if there."""
    if not path.exists():
        return
    saved = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, buffer in stage.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])


def show(k, results):
    print(f"stage {k}:", *(f"{r.dtype}{tuple(r.shape)}".removeprefix("torch.") for r in results))


def main():
    torch.manual_seed(0)
    stages = [Stage0(), Stage1()]
    for k, stage in enumerate(stages):
        load(stage, Path(__file__).with_name(f"stage_{k}.pt"))
    stages[1].get_submodule("lm_head").weight = stages[0].get_submodule("wte").weight  # tied

    inputs = make_inputs()
    results = stages[0](inputs["ids"])
    show(0, results)
    (x,) = results
    results = stages[1](x)
    show(1, results)
    (logits,) = results

    loss = stages[1].loss(logits, inputs["target"])
    loss.backward()
    parameters = [p for stage in stages for p in stage.parameters()]
    filled = sum(p.grad is not None for p in parameters)
    print(f"loss {loss.item():.4f}, gradients of {filled} of {len(parameters)} tensors")


if __name__ == "__main__":
    main()
