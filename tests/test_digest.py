"""Digests: every change of the bits is seen, however it was made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pdcompile
from pdcompile.eager.digest import digest, digest_of_ends, flat_bytes, write_state

WRITES: list[Callable[[Any], Any]] = [
    lambda t: t.data.neg_(),
    lambda t: t.data.copy_(t.data.flip(0)),
    lambda t: t.data.clamp_(-0.1, 0.1),
    lambda t: t.detach().numpy().__setitem__((3, 3), 7.0),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("turned", [False, True])
def test_writes_that_no_counter_counts_are_seen(write: Any, turned: bool) -> None:
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    tensor = torch.nn.Parameter(values.t() if turned else values)
    before = write_state(tensor)
    write(tensor)
    assert tensor._version == before[0]
    assert write_state(tensor) != before


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_writes_of_sparse_tensors_are_seen(layout: torch.layout) -> None:
    dense = torch.eye(6) + torch.eye(6).roll(1, 0)
    tensor = dense.to_sparse(layout=layout)
    before = write_state(tensor)
    assert write_state(tensor) == before
    values = tensor._values() if layout is torch.sparse_coo else tensor.values()
    values.data[3] = 7.0
    assert write_state(tensor)[2] != before[2]


def test_where_the_entries_of_a_sparse_tensor_lie_counts() -> None:
    assert digest(torch.eye(6).to_sparse()) != digest(torch.eye(6).roll(1, 0).to_sparse())


@given(st.integers(0, 6 * 8 * 32 - 1))
def test_each_bit_counts(bit: int) -> None:
    tensor = torch.arange(48.0).reshape(6, 8)
    before = digest(tensor)
    tensor.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8
    assert digest(tensor) != before


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0), torch.tensor(1.5), torch.ones(3, dtype=torch.bool), torch.ones(4).bfloat16(),
     torch.randn(4, dtype=torch.complex64).conj(), torch.ones(2, 3, 4).transpose(0, 2),
     torch.ones(8)[::2], torch.ones(2, device="meta"), torch.ones(1).expand(5),
     torch.ones(8).as_strided((1,), (4,))],
    ids=["empty", "scalar", "bool", "bfloat16", "conjugate", "turned", "gaps", "meta", "expanded",
         "single"],
)  # fmt: skip
def test_tensors_of_every_kind_have_one(tensor: Any) -> None:
    assert digest(tensor) == digest(tensor.clone())
    assert write_state(tensor) == write_state(tensor)
    assert write_state(tensor, digest_of_ends) == write_state(tensor, digest_of_ends)


def test_a_sample_sees_what_is_written_to_all() -> None:
    tensor = torch.randn(1000)
    before = write_state(tensor, digest_of_ends)
    tensor.data.mul_(0.5)
    assert write_state(tensor, digest_of_ends) != before


SINGLE = torch.arange(8.0).as_strided((1,), (4,))  # contiguous, with a stride of its own


@pytest.mark.parametrize(
    "tensor", [SINGLE, torch.tensor(3.0), torch.arange(6).reshape(2, 3).t(), torch.empty(0, 2)]
)
def test_bytes_are_those_of_a_copy(tensor: Tensor) -> None:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert torch.equal(flat_bytes(tensor), copy.reshape(-1).view(torch.uint8))


class Strided(nn.Module):
    """Model with a buffer of one element, whose stride is not 1, that training writes."""

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
