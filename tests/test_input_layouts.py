"""Inputs that lie in memory otherwise than the example did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.errors import InputError
from tests.helpers.pipelines import by_hand, states_equal


class Tagger(nn.Module):
    """Its loss takes views, which torch refuses of tensors with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 11))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.embedding(ids.view(-1)))
        return nn.functional.cross_entropy(scores, labels.view(-1))


SENTENCES = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(0))
SLICES = SENTENCES[:, :-1], SENTENCES[:, 1:]
DENSE = tuple(part.contiguous() for part in SLICES)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("example", "given"), [(DENSE, SLICES), (SLICES, SLICES), (SLICES, DENSE)])
def test_slices_are_trained_on_as_their_copies(
    example: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor]
) -> None:
    torch.manual_seed(0)
    model, plain = Tagger(), Tagger()
    plain.load_state_dict(model.state_dict())
    with (
        by_hand(model, 2, example, microbatches=2) as pipe,
        pdcompile.reference(plain, microbatches=2) as reference,
    ):
        for batch in (example, given):
            assert float(pipe.step(*batch).loss) == float(reference.step(*batch).loss)
        assert states_equal(model.state_dict(), plain.state_dict()) == []


def test_a_second_dimension_that_counts_samples() -> None:
    torch.manual_seed(0)
    model, plain = Tagger(), Tagger()
    plain.load_state_dict(model.state_dict())
    batch = tuple(part.T.contiguous() for part in DENSE)
    pipe = by_hand(model, 2, batch, microbatches=2, batch_dims=1)
    expected = sum(
        plain(*(part[:, at : at + 2].contiguous() for part in batch)) / 2 for at in (0, 2)
    )
    assert float(pipe.step(*batch).loss) == float(expected.detach())


class Doubling(nn.Module):
    """Doubles its input where the caller has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x[:, 1:].mul_(2)
        return self.layers(x)


def test_an_input_that_forward_writes_is_noted_and_left_alone() -> None:
    x, y = torch.ones(4, 4), torch.ones(4, 1)
    pipe = pdcompile.compile(
        Doubling(), x, example_target=y, loss_fn=nn.functional.mse_loss, optimizer=None,
        cluster=pdcompile.Cluster.local(2), costs="estimated",
    )  # fmt: skip
    (note,) = [note for note in pipe.plan.notes if "in place" in note]
    assert "its input 'x'" in note
    assert "test_input_layouts.py:" in note
    first = float(pipe.step(x, target=y).loss)
    assert torch.equal(x, torch.ones(4, 4))
    assert float(pipe.step(x, target=y).loss) == first


class Two(Doubling):
    """Writes one of its inputs, and reads the other one afterwards."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        result: Tensor = super().forward(x) + other.mean(-1, keepdim=True)
        return result


def _two(other: Tensor) -> pdcompile.Pipeline:
    return pdcompile.compile(
        Two(), (torch.ones(4, 4), other), example_target=torch.ones(4, 1),
        loss_fn=nn.functional.mse_loss, optimizer=None, microbatches=2,
        cluster=pdcompile.Cluster.local(2), costs="estimated",
    )  # fmt: skip


def test_an_input_that_is_written_and_given_twice_is_refused() -> None:
    """Eager would read in the other one what forward wrote."""
    pipe, x, y = _two(torch.ones(4, 4)), torch.ones(4, 4), torch.ones(4, 1)
    assert pipe.step(x, x.clone(), target=y).loss
    for other in (x, x[:]):
        with pytest.raises(InputError, match="'other' is in the same memory") as caught:
            pipe.step(x, other, target=y)
        assert caught.value.where == "x"


class Counting(Two):
    """Writes an input of which every microbatch takes all."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        other.add_(1)
        result: Tensor = self.layers(x) * other
        return result


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", [torch.ones(1, 1), torch.tensor(1.0)])
def test_an_input_that_is_written_for_the_next_microbatch_is_refused(other: Tensor) -> None:
    options: dict[str, Any] = {
        "example_target": torch.ones(4, 1), "loss_fn": nn.functional.mse_loss, "optimizer": None,
        "cluster": pdcompile.Cluster.local(2), "costs": "estimated",
    }  # fmt: skip
    x, y = torch.ones(4, 4), torch.ones(4, 1)
    pipe = pdcompile.compile(Counting(), (x, other), microbatches=2, **options)
    with pytest.raises(InputError, match="every microbatch takes all of it"):
        pipe.step(x, other, target=y)
    whole = pdcompile.compile(Counting(), (x, other), microbatches=1, **options)
    assert float(whole.step(x, other, target=y).loss) == float(whole.step(x, other, target=y).loss)


TARGETS: list[Any] = [{"y": torch.ones(4, 1), "none": None}, [torch.ones(4, 1), (torch.ones(4),)]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_of_several_parts_is_not_needed_for_predictions(target: Any) -> None:
    def loss_fn(output: Tensor, target: Any) -> Tensor:
        return (output - (target["y"] if isinstance(target, dict) else target[0])).square().mean()

    model, x = Doubling().layers, torch.ones(4, 4)
    pipe = pdcompile.compile(
        model, x, example_target=target, loss_fn=loss_fn, microbatches=2,
        cluster=pdcompile.Cluster.local(2), costs="estimated",
    )  # fmt: skip
    assert torch.equal(pipe.predict(x), torch.cat([model(one) for one in x.chunk(2)]))
    with pytest.raises(InputError, match="the target is missing"):
        pipe.step(x)
