"""Causes of rounding at a cut: layouts in memory, orders of sums, names in loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pdcompile.eager.split_backward import Entrance
from tests.helpers.generated import check, mean_square


class Residual(nn.Module):
    """A cast that does nothing between two readers of one tensor."""

    captured_once = True

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        y = h.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return h + self.two(y)


class Masked(nn.Module):
    """Layers in a loop that all read a tensor of the name that their result has."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=ids == 3))


def test_a_cast_that_does_nothing_is_no_place_to_cut() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 7, 32)
    for position in (1, 3, 4, 7):
        sources, report = check(Residual(), x, [position], torch.randn(4, 7, 32), mean_square)
        assert report.differences == (), position
    assert ".to(" not in "".join(sources.files.values())


@pytest.mark.parametrize(
    "position",
    [3, pytest.param(12, marks=pytest.mark.slow), pytest.param(27, marks=pytest.mark.slow)],
)
def test_a_loop_does_not_overwrite_what_it_reads_again(position: int) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 6, 32), "ids": torch.randint(9, (4, 6))}
    _, report = check(Masked(), inputs, [position], torch.randn(4, 6, 8), mean_square)
    assert report.differences == ()


def test_an_entrance_keeps_the_gradient_and_its_layout() -> None:
    entrance = Entrance(torch.randn(4, 6))
    factor = torch.randn(6, 4)
    (entrance.value.t() * factor).sum().backward()
    found = entrance.take()
    assert found is not None
    assert torch.equal(found, factor.t())
    assert found.stride() == (1, 4)
    assert entrance.take() is None


TRAINING, EVALUATION = torch.linspace(0, 1, 8), torch.linspace(5, 6, 8)


class ConstantsByMode(nn.Module):
    """A tensor of the module's surroundings in training, another one in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale = TRAINING if self.training else EVALUATION
        return self.two(torch.tanh(self.one(x) * scale))


@pytest.mark.sample(1)
@pytest.mark.parametrize("position", [1, 2])
def test_each_mode_has_its_own_constants(position: int) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    _, report = check(ConstantsByMode(), x, [position], target, mean_square)
    assert report.differences == ()
