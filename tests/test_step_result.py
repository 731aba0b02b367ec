"""Lazy losses and results."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple

import pytest
import torch
from torch import Tensor

from pdcompile.batch.step_result import (
    LazyLoss,
    StepResult,
    check_loss,
    own_loss,
    scaled_loss,
    total_loss,
)
from pdcompile.errors import ConfigError

Output = namedtuple("Output", ["loss", "logits"])


class Delivery:
    """A loss that arrives when told."""

    def __init__(self) -> None:
        self.arrived = False
        self.asked = 0

    def resolve(self) -> Tensor:
        self.asked += 1
        if not self.arrived:
            raise ConnectionError("peer is gone")
        return torch.tensor(2.5, requires_grad=True)


def test_a_loss_is_asked_for_once_and_only_when_needed() -> None:
    delivery = Delivery()
    loss = LazyLoss(delivery.resolve, lambda: delivery.arrived)
    assert not loss.done()
    assert repr(loss) == "LazyLoss(pending)"
    assert delivery.asked == 0
    delivery.arrived = True
    assert loss.done()
    assert float(loss) == loss.item() == 2.5
    assert not loss.wait().requires_grad
    assert f"{loss:.2f}" == "2.50"
    assert repr(loss) == "LazyLoss(2.5)"
    assert delivery.asked == 1
    delivery.arrived = False
    assert loss.done()


def test_a_failed_delivery_raises_for_whoever_asks() -> None:
    delivery = Delivery()
    loss = LazyLoss(delivery.resolve, lambda: False)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="peer is gone"):
            loss.item()
    assert not loss.done()


def test_outputs_are_resolved_once() -> None:
    calls: list[int] = []

    def resolve() -> dict[str, int]:
        calls.append(1)
        return {"y": 3}

    result = StepResult(None, resolve)
    assert calls == []
    assert result.outputs == result.outputs == {"y": 3}
    assert calls == [1]
    assert repr(result) == "StepResult(loss=None)"


def test_where_a_model_may_keep_its_loss() -> None:
    loss = torch.tensor(1.0)
    assert own_loss(loss) is loss
    assert own_loss({"loss": loss, "logits": 0}) is loss
    assert own_loss(Output(loss, 0)) is loss
    for without in (torch.ones(2), {"logits": loss}, Output(None, 0), (loss, 1), None):
        assert own_loss(without) is None


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (1.0, "type float"),
        (torch.ones(3), r"shape \(3,\)"),
        (torch.tensor(1), "int64"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_loss(loss: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_loss(loss, "loss_fn")
    assert caught.value.where == "loss_fn"


def test_losses_are_summed_from_left_to_right() -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    losses = [torch.tensor(value, dtype=torch.float32, requires_grad=True) for value in values]
    expected = ((torch.tensor(1e8) + 1.0) - 1e8) + 1.0
    assert torch.equal(total_loss(losses), expected)
    assert not total_loss(losses).requires_grad
    assert total_loss(losses[:1]).data_ptr() != losses[0].data_ptr()


def test_a_microbatch_without_items_counts_nothing() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    none = (logits * 0).sum() / 0  # a mean over a mask: its gradient is infinite
    assert none.isnan()
    loss = scaled_loss(none, 0.0)
    assert loss.item() == 0.0
    assert not loss.requires_grad
    assert scaled_loss(torch.tensor(3.0), 0.5).item() == 1.5
    assert scaled_loss(torch.tensor(torch.nan), 0.5).isnan()


def test_a_loss_counts_as_its_number() -> None:
    loss = LazyLoss(lambda: torch.tensor(2.5))
    total = 0.0
    for _ in range(2):
        total += loss
    assert total == 5.0
    assert (loss + loss, loss - 1, 1 - loss, 2 * loss, loss / 5) == (5.0, 1.5, -1.5, 5.0, 0.5)
    assert loss < 3 and loss > 2  # noqa: PT018
    assert loss <= 2.5 and loss >= 2.5 and not loss <= 2  # noqa: PT018
    assert loss == 2.5 and 2.5 == loss and loss != 2 and loss != "2.5"  # noqa: PT018, SIM300
    assert loss == LazyLoss(lambda: torch.tensor(2.5))
    assert (-loss, loss**2, round(loss)) == (-2.5, 6.25, 2)
    assert len({loss, loss, LazyLoss(lambda: torch.tensor(2.5))}) == 2
    assert min(loss, LazyLoss(lambda: torch.tensor(1.0))).item() == 1.0
    assert float(torch.tensor(1.0) + loss) == 3.5


def test_what_there_is_instead_of_an_attribute_is_said() -> None:
    result = StepResult(LazyLoss(lambda: torch.tensor(2.5)), lambda: {"logits": 1})
    with pytest.raises(AttributeError, match="step has run backward already"):
        _ = getattr(result.loss, "backward")  # noqa: B009
    with pytest.raises(AttributeError, match=r"loss\.wait\(\)"):
        _ = getattr(result.loss, "detach")  # noqa: B009
    with pytest.raises(AttributeError, match=r"'logits': .* result\.outputs"):
        _ = getattr(result, "logits")  # noqa: B009
    again = copy.copy(result)
    assert again.outputs == {"logits": 1}
    assert not hasattr(result.loss, "backward")


def test_a_result_is_pickled_as_what_came() -> None:
    delivery = Delivery()
    delivery.arrived = True
    outputs = torch.arange(3)
    result = StepResult(LazyLoss(delivery.resolve), lambda: {"logits": outputs})
    again = pickle.loads(pickle.dumps(result))
    assert float(again.loss) == 2.5
    assert torch.equal(again.outputs["logits"], outputs)
    assert again.outputs is again.outputs
    assert pickle.loads(pickle.dumps(result.loss)).done()
    assert pickle.loads(pickle.dumps(StepResult(None, lambda: None))).loss is None
