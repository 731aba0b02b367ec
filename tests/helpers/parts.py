"""An MLP and attention, written for two parts by hand, and what plain PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from pdcompile.parts.conversions import gather, own, scatter, spread, swap, total
from pdcompile.parts.shard import Shard

PARTS, HEADS, EACH, WIDTH, ROWS = 2, 4, 3, 12, 6
Weights = Mapping[str, Tensor]


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "up": (4 * WIDTH, WIDTH), "up_bias": (4 * WIDTH,), "down": (WIDTH, 4 * WIDTH),
        "bias": (WIDTH,), "qkv": (3 * WIDTH, WIDTH), "proj": (WIDTH, WIDTH), "x": (2, ROWS, WIDTH),
    }  # fmt: skip
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for name, shape in shapes.items()
    }


def plain(w: Weights) -> Tensor:
    x = w["x"]
    b, rows, width = x.shape
    q, k, v = (part.view(b, rows, HEADS, EACH).transpose(1, 2) for part in
               F.linear(x, w["qkv"]).chunk(3, -1))  # fmt: skip
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(mixed.transpose(1, 2).reshape(b, rows, width), w["proj"])
    return x + F.linear(F.gelu(F.linear(x, w["up"], w["up_bias"])), w["down"], w["bias"])


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, EACH).transpose(1, 2)


def by_width(w: Weights) -> Tensor:
    """Megatron's layers: heads and hidden units are split."""
    x = w["x"]
    part, part_1, part_2 = F.linear(spread(x), w["qkv"]).chunk(3, -1)
    q, k, v = (_heads(one, HEADS // PARTS) for one in (part, part_1, part_2))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + total(F.linear(mixed.transpose(1, 2).flatten(2), w["proj"]))
    hidden = F.gelu(F.linear(spread(x), w["up"], w["up_bias"]))
    return x + (total(F.linear(hidden, w["down"])) + w["bias"])


def by_width_and_sequence(w: Weights) -> Tensor:
    """Megatron's sequence parallelism: rows are split where width is not."""
    x = own(w["x"], 1)
    part, part_1, part_2 = F.linear(gather(x, 1, spread=True), w["qkv"]).chunk(3, -1)
    q, k, v = (_heads(one, HEADS // PARTS) for one in (part, part_1, part_2))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + scatter(F.linear(mixed.transpose(1, 2).flatten(2), w["proj"]), 1)
    hidden = F.gelu(F.linear(gather(x, 1, spread=True), w["up"], w["up_bias"]))
    x = x + (scatter(F.linear(hidden, w["down"]), 1) + w["bias"])
    return gather(x, 1)


def by_sequence(w: Weights) -> Tensor:
    """DeepSpeed-Ulysses: rows are split, and heads in attention."""
    x = own(w["x"], 1)
    q, k, v = (swap(_heads(one, HEADS), 2, 1) for one in F.linear(x, w["qkv"]).chunk(3, -1))
    mixed = swap(F.scaled_dot_product_attention(q, k, v, is_causal=True), 1, 2)
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), w["proj"])
    x = x + F.linear(F.gelu(F.linear(x, w["up"], w["up_bias"])), w["down"], w["bias"])
    return gather(x, 1)


_WIDTH = {
    "qkv": Shard("qkv", 0, (3, HEADS, EACH), 1, PARTS),
    "proj": Shard("proj", 1, (HEADS, EACH), 0, PARTS),
    "up": Shard("up", 0, (4 * WIDTH,), 0, PARTS),
    "up_bias": Shard("up_bias", 0, (4 * WIDTH,), 0, PARTS),
    "down": Shard("down", 1, (4 * WIDTH,), 0, PARTS),
}
#: function of one part, its shards, weights whose gradients have to be summed
FORMS: dict[str, tuple[Callable[[Weights], Tensor], dict[str, Shard], set[str]]] = {
    "width": (by_width, _WIDTH, set()),
    "width+sequence": (by_width_and_sequence, _WIDTH, {"bias"}),
    "sequence": (by_sequence, {}, {"qkv", "proj", "up", "up_bias", "down", "bias"}),
}


def train(form: str, part: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The result of one part, and gradients of what it holds."""
    function, shards, _ = FORMS[form]
    held = {
        name: shards[name].own(whole.detach(), part) if name in shards else whole.detach().clone()
        for name, whole in weights().items()
    }
    held = {name: one.requires_grad_() for name, one in held.items()}
    result = function(held)
    _loss(result).backward()
    return result.detach(), {name: one.grad for name, one in held.items() if one.grad is not None}


def _loss(result: Tensor) -> Tensor:
    return (result * torch.linspace(0, 1, result.numel(), dtype=result.dtype).view_as(result)).sum()


def check(form: str, found: list[tuple[Tensor, dict[str, Tensor]]]) -> None:
    """Holds results and gradients of all parts to the plain ones."""
    _, shards, summed = FORMS[form]
    whole = weights()
    result = plain(whole)
    _loss(result).backward()
    for one, gradients in found:
        torch.testing.assert_close(one, result, rtol=0, atol=1e-10)
        assert torch.equal(one, found[0][0])
        assert gradients.keys() == whole.keys()
    for name, tensor in whole.items():
        given = [gradients[name] for _, gradients in found]
        if name in summed:
            given = [torch.stack(given).sum(0)]
        gradient = shards[name].joined(given) if name in shards else given[0]
        torch.testing.assert_close(gradient, tensor.grad, rtol=0, atol=1e-10)
        if name not in shards and name not in summed:
            assert all(torch.equal(one, given[0]) for one in given), name
