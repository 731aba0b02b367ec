"""FlexAttention: captured where torch computes it on CPUs, refused by name where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
)

import pdcompile
from pdcompile.errors import TraceError

S = 16


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Attention(nn.Module):
    """Attention within the documents of a batch, with a bias by distance."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]))
        self.mask = create_block_mask(causal, None, None, S, S, device="cpu", BLOCK_SIZE=8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, doc: Tensor) -> Tensor:
        def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + self.slopes[h] * (k - q)

        if self.kind == "forward":
            both = and_masks(causal, within(doc))
            mask = create_block_mask(both, len(q), None, S, S, device="cpu", BLOCK_SIZE=8)
            return flex_attention(q, k, v, score_mod=bias, block_mask=mask)
        if self.kind == "attribute":
            return flex_attention(q, k, v, block_mask=self.mask)
        o, sums = flex_attention(q, k, v, return_lse=True)
        return o + sums[..., None]


def within(doc: Tensor) -> Any:
    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return doc[b, q] == doc[b, k]

    return same


class Mask(nn.Module):
    """Mask of documents as a tensor: the remedy."""

    def forward(self, doc: Tensor) -> Tensor:
        both = and_masks(causal, within(doc))
        return create_mask(both, len(doc), 1, S, S, device="cpu")


class Net(nn.Module):
    """One layer of attention."""

    def __init__(self, kind: str, *, frozen: bool = True) -> None:
        super().__init__()
        self.kind = kind
        self.emb, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.lin = nn.Linear(16, 48)
        self.attention, self.mask = Attention(kind), Mask()
        for part in (self.emb, self.lin):
            part.requires_grad_(not frozen)

    def forward(self, ids: Tensor, given: Any = None) -> Tensor:
        h, b = self.emb(ids), len(ids)
        q, k, v = (t.view(b, S, 2, 8).transpose(1, 2) for t in self.lin(h).chunk(3, -1))
        doc = (ids == 0).cumsum(1)
        if self.kind == "input":
            o = flex_attention(q, k, v, block_mask=given)
        elif self.kind == "remedy":
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(doc))
        else:
            o = self.attention(q, k, v, doc)
        return self.head(h + o.transpose(1, 2).reshape(b, S, 16))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


pytestmark = pytest.mark.filterwarnings("ignore:captured as opaque")
IDS, TARGET = (
    torch.randint(0, 20, (4, S), generator=torch.Generator().manual_seed(n)) for n in (1, 2)
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["attribute", "forward", "statistics"])
def test_without_gradients_it_is_opaque(kind: str) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    with torch.no_grad():
        want = torch.stack([model(IDS[i : i + 2]) for i in (0, 2)]).flatten(0, 1)
    pipe = pdcompile.compile(
        model, loss_fn=loss_fn, microbatches=2, stages=2, costs="estimated",
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )  # fmt: skip
    result = pipe.eval_step(IDS, target=TARGET)
    assert torch.equal(result.outputs, want)
    before = float(result.loss)
    pipe.step(IDS, target=TARGET)
    assert float(pipe.eval_step(IDS, target=TARGET).loss) < before


@pytest.mark.slow
def test_the_remedy_trains() -> None:
    with pytest.raises(TraceError, match="flex_attention on values that need a gradient") as caught:
        pdcompile.trace(Net("forward", frozen=False), IDS)
    assert "F.scaled_dot_product_attention" in str(caught.value.remedy)
    torch.manual_seed(0)
    model = Net("remedy", frozen=False)
    pipe = pdcompile.compile(model, loss_fn=loss_fn, microbatches=2, stages=2, costs="estimated")
    losses = [float(pipe.step(IDS, target=TARGET).loss) for _ in range(3)]
    assert losses[2] < losses[0]


def test_what_is_no_data_is_refused() -> None:
    mask = create_block_mask(causal, None, None, S, S, device="cpu", BLOCK_SIZE=8)
    with pytest.raises(TraceError, match="is a BlockMask") as caught:
        pdcompile.trace(Net("input"), (IDS, mask))
    assert caught.value.where == "given"

    class Compiled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise torch._dynamo.exc.Unsupported("as a compiled function says")

    with pytest.raises(TraceError, match="calls a function that torch") as caught:
        pdcompile.trace(Compiled(), torch.ones(4, 4))
    assert "without torch.compile" in str(caught.value.remedy)
