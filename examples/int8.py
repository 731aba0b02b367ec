"""A decoder whose weights are int8: predictions, and LoRA on the frozen weights.

    python examples/int8.py
    torchrun --nproc-per-node=2 examples/int8.py

After LLM.int8() (Dettmers et al., 2022, arXiv 2208.07339): rows of the weights and rows of the
inputs are scaled to 8 bits each (vector-wise), and the few input columns with outliers keep
floats; here they are chosen once, from a sample.  The module is ordinary user code: weights are
int8 buffers, which a plan counts with a byte each.  `schedule="forward"` plans for predictions
alone.  Gradients pass the frozen weights as if these were floats, to the LoRA parameters before
them and no further.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile


class Int8Product(torch.autograd.Function):
    """x @ (weight · scale).T with the rows of x in 8 bits; its gradient is that of floats."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        rows = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
        eight = (x / rows).round().to(torch.int8)
        # Integers of this size are exact in float32, up to 1,040 columns.
        return F.linear(eight.float(), weight.float()) * rows * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return (gradients[0] * scale) @ weight.float(), None, None


class Int8Linear(nn.Module):
    """A linear layer of int8 weights, with float ones for columns in which inputs have outliers."""

    def __init__(self, linear: nn.Linear, sample: Tensor, outliers: int = 4) -> None:
        super().__init__()
        weight = linear.weight.detach()
        columns = sample.flatten(0, -2).abs().amax(0).topk(outliers).indices.sort().values
        rest = weight.index_fill(1, columns, 0.0)
        scale = rest.abs().amax(1).clamp(min=1e-8) / 127
        self.register_buffer("weight", (rest / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("columns", columns)
        self.register_buffer("exact", weight[:, columns].clone())
        self.register_buffer("bias", linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        rest = x.index_fill(-1, self.columns, 0.0)
        product = Int8Product.apply(rest, self.weight, self.scale)
        return product + F.linear(x.index_select(-1, self.columns), self.exact, self.bias)


class LoRA(nn.Module):
    """A frozen layer, and a float product of low rank beside it that is trained."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Block(nn.Module):
    """Attention to what came before, then two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(F.layer_norm(x, x.shape[-1:])).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))


class Decoder(nn.Module):
    """Bytes (b, s) -> logits of the next byte (b, s, 256)."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_int8(model: nn.Module, ids: Tensor) -> nn.Module:
    """The model with int8 in place of the linear layers of its blocks, and nothing to train."""
    inputs: dict[str, Tensor] = {}

    def seen(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[name] = args[0].detach()

    linear = {n: one for n, one in model.blocks.named_modules() if isinstance(one, nn.Linear)}
    hooks = [one.register_forward_pre_hook(partial(seen, n)) for n, one in linear.items()]
    model(ids)
    for hook in hooks:
        hook.remove()
    for name, layer in linear.items():
        model.blocks.set_submodule(name, Int8Linear(layer, inputs[name]))
    return model.requires_grad_(False).eval()


def with_lora(model: nn.Module, first: int = 0) -> nn.Module:
    """The model with LoRA beside the upper layer of each block from `first` on."""
    for block in model.blocks[first:]:
        rows, columns = block.up.weight.shape
        block.up = LoRA(block.up, columns, rows)
    return model.train()


def sample(size: int = 16, length: int = 32) -> Tensor:
    """Windows of the words of a sentence, as bytes."""
    text = torch.tensor(
        list(b"a stage holds its weights once, in a byte each, and passes on. " * 4)
    )
    return text.unfold(0, length, 1)[:size].contiguous()


def built(layers: int = 4) -> tuple[nn.Module, Tensor]:
    """An int8 model and inputs, the same on every rank."""
    torch.manual_seed(0)
    ids = sample()
    return in_int8(Decoder(layers=layers), ids), ids


def build() -> pdcompile.Workload:
    """Makes the workload that `pdcompile plan examples/int8.py:build` takes."""
    model, ids = built()
    return pdcompile.Workload(model, ids, batches=None)


def loss_fn(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main(steps: int = 21) -> None:
    first = os.environ.get("RANK", "0") == "0"
    model, ids = built()
    with torch.no_grad():
        whole = torch.cat([model(part) for part in ids.chunk(4)])
    with pdcompile.compile(
        copy.deepcopy(model), schedule="forward", microbatches=4, outputs="all"
    ) as pipe:
        same = torch.equal(pipe.predict(ids), whole)
        if first:
            print(f"predictions equal to the last bit: {same}")
    with pdcompile.compile(
        with_lora(model), loss_fn=loss_fn, optimizer=partial(torch.optim.AdamW, lr=1e-2),
        microbatches=4,
    ) as pipe:  # fmt: skip
        for step in range(steps):
            loss = pipe.step(ids, target=ids).loss
            if step % 5 == 0 and first:
                print(f"step {step}: loss {float(loss):.3f}")


if __name__ == "__main__":
    main()
