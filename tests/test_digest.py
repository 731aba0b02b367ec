"""Bytes and digests of tensors, whatever their strides are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile.eager.digest import digest, flat_bytes

SINGLE = torch.arange(8.0).as_strided((1,), (4,))  # contiguous, with a stride of its own


@pytest.mark.parametrize(
    "tensor", [SINGLE, torch.tensor(3.0), torch.arange(6).reshape(2, 3).t(), torch.empty(0, 2)]
)
def test_bytes_are_those_of_a_copy(tensor: Tensor) -> None:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert torch.equal(flat_bytes(tensor), copy.reshape(-1).view(torch.uint8))


def test_digests_tell_values_apart() -> None:
    assert digest(SINGLE) == digest(torch.zeros(1)) != digest(torch.ones(1))


class Strided(nn.Module):
    """With a buffer of one element, whose stride is not 1, that training writes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.register_buffer("seen", torch.zeros(2, 4)[:1, 0])

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        for layer in self.layers:
            x = layer(x)
        return x * self.seen


def test_one_element_of_a_larger_tensor_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Strided()
    assert model.seen.stride() == (4,)
    x = torch.ones(4, 16)
    with pdcompile.compile(
        model, (x,), example_target=x, loss_fn=nn.functional.mse_loss, stages=2, microbatches=2,
        costs="estimated", progress=False, verify="full",
    ) as pipe:  # fmt: skip
        pipe.prepare()
        pipe.step(x, target=x)
        pipe.save(tmp_path / "checkpoint")
        pipe.step(x, target=x)
        pipe.load(tmp_path / "checkpoint")
        assert float(pipe.full_state_dict()["seen"]) == 2.0  # once a microbatch
