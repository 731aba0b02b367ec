"""Digests: every change of the bits is seen, however it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.eager.digest import digest, write_state, write_state_sample

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
     torch.ones(8)[::2], torch.ones(2, device="meta"), torch.ones(1).expand(5)],
    ids=["empty", "scalar", "bool", "bfloat16", "conjugate", "turned", "gaps", "meta", "expanded"],
)  # fmt: skip
def test_tensors_of_every_kind_have_one(tensor: Any) -> None:
    assert digest(tensor) == digest(tensor.clone())
    assert write_state(tensor) == write_state(tensor)
    assert write_state_sample(tensor) == write_state_sample(tensor)


def test_a_sample_sees_what_is_written_to_all() -> None:
    tensor = torch.randn(1000)
    before = write_state_sample(tensor)
    tensor.data.mul_(0.5)
    assert write_state_sample(tensor) != before
