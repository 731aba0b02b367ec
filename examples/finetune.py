"""Fine-tuning of Hugging Face decoders, unmodified: GPT-2 and Llama on the text of this Python.

    python examples/finetune.py                                   # one process
    torchrun --nproc-per-node=2 examples/finetune.py llama        # two stages on this machine

The models are tiny and random, and a byte is a token, so that nothing is downloaded.  For real ones
put `AutoModelForCausalLM.from_pretrained(name)` and its tokenizer in their place; one that does
not fit into a process is built on the meta device, and each process reads its own stage
(`weights=`).  More ranks, and hosts, are a matter of torchrun's arguments alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import pdcompile


def gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(batch_size: int = 8, length: int = 32) -> Iterator[dict[str, Tensor]]:
    """Random windows of a source file; the model shifts the labels by one itself."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8)
    random = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - length, (batch_size,), generator=random).tolist()
        ids = torch.stack([text[start : start + length] for start in starts]).long()
        yield {"input_ids": ids, "labels": ids}


def labels(args: tuple[object, ...], kwargs: dict[str, Tensor], target: object) -> int:
    """The tokens that a microbatch's mean loss is a mean of: its weight in the minibatch."""
    return int((kwargs["labels"][:, 1:] != -100).sum())


def main(name: str = "gpt2", steps: int = 21) -> None:
    torch.manual_seed(0)  # every rank makes the same model
    pipe = pdcompile.compile(
        {"gpt2": gpt2, "llama": llama}[name](),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss_reduction=labels,
        max_grad_norm=1.0,
        microbatches=4,
    )
    with pipe:
        for step, batch in zip(range(steps), batches(), strict=False):
            result = pipe.step(**batch)
            if step % 5 == 0 and os.environ.get("RANK", "0") == "0":
                print(f"step {step}: loss {float(result.loss):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
