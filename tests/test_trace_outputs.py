"""Outputs of models: containers and objects of any class, in training and in evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.batch import flatten_output
from pdcompile.ir.graph import Ref, leaves, walk
from pdcompile.passes.trace.comparison.step_values import same
from tests.helpers.captures import faithful, make, rows


class Layer:
    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.length = 0

    def update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=1)
        self.length = self.keys.shape[1]
        return self.keys


class Cache:
    """Keys of earlier tokens, as decoders keep them; unknown to pytrees."""

    def __init__(self, count: int) -> None:
        self.layers = [Layer() for _ in range(count)]


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    cache: Cache | None = None


class Decoder(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(count)])
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        cache = Cache(len(self.blocks))
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            keys = layer.update(block(x))
            x = self.drop(x + keys.softmax(-1))
        return Output((x - labels).square().mean(), x, cache)


def batch(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 5, 8, generator=made) for name in ("x", "labels")}


def test_an_output_that_holds_a_cache() -> None:
    found = faithful(Decoder(), *batch(0).values())
    assert found.train.loss is not None
    names = [leaf for leaf in leaves(found.train.output) if isinstance(leaf, Ref)]
    assert len(names) == 5
    assert len(walk(found.train.output, Ref)) == 5
    assert [leaf for leaf in leaves(found.train.output) if isinstance(leaf, int)] == [5, 5, 5]


def test_the_graph_module_returns_the_models_own_classes() -> None:
    model = Decoder().eval()
    found = faithful(model, *batch(0).values()).eval.to_module(model)(**batch(0))
    expected = model(**batch(0))
    assert type(found) is Output
    assert type(found.cache) is Cache
    assert found.cache.layers[2].length == 5
    assert torch.equal(found.cache.layers[2].keys, expected.cache.layers[2].keys)


def test_stages_return_what_the_reference_returns() -> None:
    torch.manual_seed(3)
    model = Decoder()
    options: dict[str, Any] = {"optimizer": None, "microbatches": 3}
    with pdcompile.compile(
        model, cluster=pdcompile.Cluster.local(3), stages=3, costs="estimated",
        outputs="everything", **options,
    ) as pipe:  # fmt: skip
        torch.manual_seed(3)
        reference = pdcompile.reference(Decoder(), **options)
        for kind in ("step", "eval_step"):
            ours = getattr(pipe, kind)(**batch(1)).outputs
            theirs = getattr(reference, kind)(**batch(1)).outputs
            mine, structure = flatten_output(ours)
            expected, wanted = flatten_output(theirs)
            assert structure == wanted
            assert all(same(a, b) for a, b in zip(mine, expected, strict=True))
            assert ours.cache.layers[0].keys.shape == (6, 5, 8)


def test_a_distribution_is_an_output() -> None:
    def forward(self: nn.Module, x: Tensor) -> Any:
        return torch.distributions.Normal(self.lin(x), 1.0, validate_args=False)

    model = make(forward)
    found = faithful(model).train.to_module(model)(rows())
    assert type(found) is torch.distributions.Normal
    assert found.batch_shape == torch.Size([4, 8])
