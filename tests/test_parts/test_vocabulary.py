"""Tables and logits that parts share by their vocabulary: as torch computes the whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import loss_fn
from pdcompile.parts.conversions import (
    Alone,
    mean_cross_entropy,
    total,
    using,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)
from pdcompile.parts.turns import in_turns
from tests.helpers.in_parts import compare, written
from tests.test_parts.test_written import FP64, agree, gpt, hugging_face, of_logits, tokens


def exact(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("options", [
    {}, {"ignore_index": 3}, {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "ignore_index": 2}, {"label_smoothing": 0.3, "ignore_index": 1},
])  # fmt: skip
@pytest.mark.parametrize("shape", [(6, 8), (8,), (3, 8, 5)])
def test_cross_entropy_of_split_classes(
    shape: tuple[int, ...], options: dict[str, Any], parts: int
) -> None:
    torch.manual_seed(0)
    dim = min(1, len(shape) - 1)
    whole = (30 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    target = torch.randint(8, (*shape[:dim], *shape[dim + 1 :]))
    expected = F.cross_entropy(whole, target, **options)
    (gradient,) = torch.autograd.grad(expected.sum(), whole)

    def one(part: int) -> tuple[Tensor, Tensor]:
        own = whole.detach().chunk(parts, dim)[part].clone().requires_grad_()
        loss = vocabulary_cross_entropy(own, target, **options)
        return loss.detach(), torch.autograd.grad(loss.sum(), own)[0]

    found = in_turns([partial(one, part) for part in range(parts)])
    for loss, _ in found:
        exact(loss, expected.detach())
    exact(torch.cat([piece for _, piece in found], dim), gradient)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 3, "label_smoothing": 0.1}])
def test_the_mean_over_rows_of_all_parts(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    whole = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([3, 3, 1, 3, 5, 6])  # unequal numbers of rows that count
    expected = F.cross_entropy(whole, target, **options)
    (gradient,) = torch.autograd.grad(expected, whole)

    def one(part: int) -> tuple[Tensor, Tensor]:
        own = whole.detach().chunk(2)[part].clone().requires_grad_()
        loss = mean_cross_entropy(own, target.chunk(2)[part], **options)
        return loss.detach(), torch.autograd.grad(loss, own)[0]

    found = in_turns([partial(one, part) for part in range(2)])
    for loss, _ in found:
        exact(loss, expected.detach())
    exact(torch.cat([piece for _, piece in found]), gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_of_half_precision_adds_in_single(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(64, 512).to(dtype), torch.randint(512, (64,))
    pieces = logits.chunk(2, 1)
    found = in_turns([partial(vocabulary_cross_entropy, one, target) for one in pieces])
    wanted = F.cross_entropy(logits.float(), target).to(dtype)
    assert found[0].dtype == dtype
    assert torch.equal(found[0], wanted)
    rows = torch.zeros(10_000, 64, dtype=dtype)  # whose sum is above what float16 holds
    means = in_turns([partial(mean_cross_entropy, rows, rows[:, 0].long())] * 2)
    assert means[1] == F.cross_entropy(rows[:1].float(), rows[:1, 0].long()).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16), using(Alone(2)):
        assert mean_cross_entropy(rows, rows[:, 0].long()).dtype == torch.float32
        assert vocabulary_cross_entropy(pieces[0], target).dtype == torch.float32


@pytest.mark.parametrize("padding", [None, 0, 5, -1, -8])
def test_embedding_of_split_rows(padding: int | None) -> None:
    torch.manual_seed(0)
    table, ids = torch.randn(8, 3, requires_grad=True), torch.randint(8, (4, 5))
    above = torch.randn(4, 5, 3)
    expected = F.embedding(ids, table, padding)
    (gradient,) = torch.autograd.grad(expected, table, above)

    def one(part: int) -> tuple[Tensor, Tensor]:
        own = table.detach().chunk(2)[part].clone().requires_grad_()
        found = total(vocabulary_embedding(ids, own, padding_idx=padding))
        return found.detach(), torch.autograd.grad(found, own, above)[0]

    found = in_turns([partial(one, part) for part in range(2)])
    assert all(torch.equal(rows, expected.detach()) for rows, _ in found)
    assert torch.equal(torch.cat([piece for _, piece in found]), gradient)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("wrong", [-1, 8])
def test_what_is_no_id_of_the_vocabulary_fails_on_every_part(wrong: int, part: int) -> None:
    ids = torch.tensor([1, wrong])
    with using(Alone(2, part)):
        with pytest.raises(IndexError, match="out of range"):
            vocabulary_embedding(ids, torch.ones(4, 2))
        with pytest.raises(RuntimeError, match="out of bounds"):
            vocabulary_cross_entropy(torch.ones(2, 4), ids)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("GPT", "width"), ("GPT", "width+sequence"),
        pytest.param("Llama", "width", marks=pytest.mark.slow),
        pytest.param("Llama", "width+sequence", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_tied_and_untied_heads_divide_by_vocabulary(name: str, family: Any) -> None:
    model = gpt() if name == "GPT" else hugging_face("Llama", torch.float32)
    inputs = tokens(0) if name == "GPT" else {"input_ids": tokens(0)}
    loss: Any = loss_fn if name == "GPT" else of_logits
    it = written(model, inputs, tokens(1), loss, family=family)
    call = partial(model, **inputs) if isinstance(inputs, dict) else partial(model, inputs)
    agree(it, FP64 if name == "GPT" else 2e-5, lambda: loss(call(), tokens(1)))
    table, head = ("tokens", "tokens") if name == "GPT" else ("model.embed_tokens", "lm_head")
    for fqn in (f"{table}.weight", f"{head}.weight"):
        assert it.shards[fqn].dim == 0
    text = "".join(it.sources.files["stage_0.py"].split())
    after = "scatter" if "sequence" in family else "total"
    assert f"={after}(vocabulary_embedding" in text
    assert "returnvocabulary_cross_entropy(" in text
    assert not it.layouts.stays
    assert "vocabulary" in it.layouts.axes.values()
    assert "positions.weight" not in it.shards  # one row for each place is no vocabulary


class Tagger(nn.Module):
    """Words to classes, all words of a sample at once."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 16, padding_idx=1)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, classes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x))))).transpose(1, 2)


def tagger(words: int = 512, classes: int = 96) -> Tagger:
    torch.manual_seed(0)
    return Tagger(words, classes).double()


LOSSES: dict[str, Any] = {
    "options": partial(F.cross_entropy, ignore_index=7, label_smoothing=0.1, reduction="sum"),
    "module": nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=7),
    "weights": partial(F.cross_entropy, weight=torch.rand(96).double()),
    "probabilities": lambda x, y: F.cross_entropy(x, F.one_hot(y, 96).transpose(1, 2).double()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_divided_or_say_why_not(name: str) -> None:
    model, loss = tagger(), LOSSES[name]
    target = tokens(1) % 9
    it = written(model, tokens(0), target, loss)
    agree(it, FP64, lambda: loss(model(tokens(0)), target))
    divided = "return vocabulary_cross_entropy(" in it.sources.files["stage_0.py"]
    assert divided == (name in ("options", "module"))
    said = {"weights": "it has weight", "probabilities": "no numbers of classes"}
    assert [said[name] in one.reason for one in it.layouts.stays] == ([] if divided else [True])
    assert it.shards["words.weight"].dim == 0


def test_a_vocabulary_that_does_not_divide_stays_whole_and_says_so() -> None:
    model = tagger(511, 95)
    it = written(model, tokens(0), tokens(1, vocabulary=95), F.cross_entropy)
    agree(it, FP64, lambda: F.cross_entropy(model(tokens(0)), tokens(1, vocabulary=95)))
    said = [f"{one.op}: {one.reason}" for one in it.layouts.stays]
    assert "words: vocabulary (511) does not divide by 2" in said
    assert any("vocabulary (95) does not divide by 2" in one for one in said)
    assert "words.weight" not in it.shards


def test_small_tables_stay_whole() -> None:
    model = tagger(words=32)
    for length, divided in ((96, False), (16, True)):
        ids = tokens(0, length, vocabulary=32)
        it = written(model, ids, tokens(1, length), F.cross_entropy)
        assert ("words.weight" in it.shards) == divided


def test_what_the_caller_reads_is_whole() -> None:
    model = tagger()
    it = written(model, tokens(0), tokens(1), F.cross_entropy, outputs=True)
    compare(it, lambda: F.cross_entropy(model(tokens(0)), tokens(1)), FP64)
    (port,) = it.sources.interfaces[0].train.outputs
    assert port.shape[1] == 96
    assert "vocabulary_cross_entropy" not in it.sources.files["stage_0.py"]
    assert it.shards["head.weight"].dim == 0
