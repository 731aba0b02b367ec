"""Messages: what the bytes say, what the header promises, and who waits for whom."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdcompile.batch import memory_order
from pdcompile.eager.digest import flat_bytes
from pdcompile.eager.gradients import clip
from pdcompile.errors import ContractError
from pdcompile.runtime.transport.contract import (
    HEADER_LENGTH,
    Channel,
    Expected,
    Note,
    from_bytes,
    laid,
    read_note,
)
from pdcompile.runtime.transport.point_to_point import GroupTransport
from pdcompile.runtime.transport.reductions import Board, LocalSums, Norms
from pdcompile.schedule import Kind

DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any shape and dtype: contiguous, permuted, sliced or expanded."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    tensor = torch.randn(shape).mul(9).to(draw(st.sampled_from(DTYPES))).permute(order)
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[..., ::2]
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor.conj() if tensor.is_complex() and draw(st.booleans()) else tensor


@given(tensors())
def test_bytes_carry_any_tensor(tensor: torch.Tensor) -> None:
    order = memory_order(tensor)
    expected = Expected(tuple(tensor.shape), tensor.dtype, 0)
    slot = torch.zeros(flat_bytes(laid(tensor, order)).numel() + 5, dtype=torch.uint8)
    flat = flat_bytes(laid(tensor, order))
    slot[: flat.numel()].copy_(flat)
    arrived = from_bytes(slot, expected, order)
    assert arrived.dtype == tensor.dtype
    assert arrived.shape == tensor.shape
    natural = tuple(range(tensor.dim()))
    assert torch.equal(flat_bytes(laid(arrived, natural)), flat_bytes(laid(tensor, natural)))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 5), (4,), ()])
def test_the_layout_of_dense_values_survives_without_a_copy(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    if value.dim() == 4:
        value = value.contiguous(memory_format=torch.channels_last)
    order = memory_order(value)
    flat = flat_bytes(laid(value, order))
    assert flat.data_ptr() == value.data_ptr()
    arrived = from_bytes(flat, Expected(shape, value.dtype, 0), order)
    assert torch.equal(arrived, value)
    assert all(
        a == b for size, a, b in zip(shape, arrived.stride(), value.stride(), strict=True)
        if size > 1
    )  # fmt: skip


def test_a_slice_of_a_transposed_tensor_keeps_the_order_of_its_dimensions() -> None:
    value = torch.randn(2, 12, 4, 24)[..., :8].transpose(1, 2)
    order = memory_order(value)
    arrived = from_bytes(
        flat_bytes(laid(value, order)), Expected((2, 4, 12, 8), value.dtype, 0), order
    )
    assert torch.equal(arrived, value)
    assert arrived.stride() == (384, 8, 32, 1)
    assert (arrived * 2).stride() == (value * 2).stride()


def test_an_expanded_tensor_arrives_in_natural_order() -> None:
    assert memory_order(torch.randn(4, 1, 3).expand(4, 5, 3)) == (0, 1, 2)


def header(**changes: object) -> torch.Tensor:
    said = {"edge": 3, "shape": (2, 3), "dtype": torch.float32, "minibatch": 7, "plan": 99}
    said |= changes
    tensor = torch.zeros(said["shape"], dtype=said["dtype"])  # type: ignore[call-overload]
    channel = Channel(Kind.VALUE, said["edge"], 1)  # type: ignore[arg-type]
    order = memory_order(tensor)
    return Note(
        said["plan"],
        channel,
        said["minibatch"],
        tensor.dtype,
        tuple(tensor.shape),
        order,  # type: ignore[arg-type]
    ).packed()


def test_a_header_that_keeps_the_contract() -> None:
    expected = Expected((2, 3), torch.float32, 7)
    assert read_note(Channel(Kind.VALUE, 3, 0), header(), expected, 99).order == (0, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edge": 4}, "edge 4 instead of 3"),
        ({"shape": (3, 2)}, r"shape \(3, 2\) instead of \(2, 3\)"),
        ({"shape": (2, 3, 1)}, r"shape \(2, 3, 1\)"),
        ({"dtype": torch.int32}, "dtype int32 instead of float32"),
        ({"minibatch": 8}, "minibatch 8 instead of 7"),
        ({"plan": 98}, "plan 62 instead of 63"),
    ],
)
def test_a_header_that_breaks_it(changes: dict[str, object], words: str) -> None:
    expected = Expected((2, 3), torch.float32, 7)
    with pytest.raises(ContractError, match=f"rank 0 is about to send .*{words}"):
        read_note(Channel(Kind.VALUE, 3, 0), header(**changes), expected, 99)


def test_too_many_dimensions() -> None:
    shape, order = (1,) * 13, tuple(range(13))
    with pytest.raises(ContractError, match="13 dimensions"):
        Note(0, Channel(Kind.VALUE, 0, 0), 0, torch.float32, shape, order).packed()


class _Wire:
    """A process group that notes what it is given to send; nothing ever arrives."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.waited = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Wire:
        self.sent += tensors
        return self

    def wait(self) -> None:
        self.waited += 1


def test_a_message_is_sent_from_where_it_lies_also_when_its_channel_opens() -> None:
    """A copy that lives until the receiver has read the header would be one a microbatch."""
    wire = _Wire()
    transport = GroupTransport(wire, rank=0, plan=7, reach=2)
    transport.settle(1)
    tensors = [torch.randn(3, 4), torch.randn(3, 4)]
    sends = [transport.outgoing(Channel(Kind.VALUE, 0, 1)).send(tensor, 0) for tensor in tensors]
    header, *payloads = wire.sent
    assert header.numel() == 8 * HEADER_LENGTH
    assert [p.data_ptr() for p in payloads] == [tensor.data_ptr() for tensor in tensors]
    for send in sends:
        send.wait()
    assert wire.waited == 2  # the header is awaited two calls later
    transport.settle(3)
    assert wire.waited == 3


def test_norms_are_those_of_torch() -> None:
    dtypes = dict.fromkeys(["a", "b", "c", "d"], torch.float32)
    owned = [["a", "d"], ["b", "c"]]
    board: Board = {}
    ranks = [Norms(LocalSums(board, 2, rank), rank, owned, dtypes) for rank in range(2)]
    gradients = {name: torch.randn(5, 7) for name in "abd"}  # c got none
    plain = [torch.nn.Parameter(torch.zeros(5, 7)) for _ in gradients]
    for parameter, gradient in zip(plain, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    parts = [{"a": gradients["a"], "d": gradients["d"]}, {"b": gradients["b"]}]
    for norms, part in zip(ranks, parts, strict=True):
        norms.post(0, part)
    totals = [norms.wait(0) for norms in ranks]
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], torch.nn.utils.clip_grad_norm_(plain, 0.5))
    clip(gradients.values(), totals[0], 0.5)
    for parameter, gradient in zip(plain, gradients.values(), strict=True):
        assert torch.equal(parameter.grad, gradient)


PROFILED = """
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pdcompile.runtime.transport.contract import Channel, Expected
from pdcompile.runtime.transport.point_to_point import GroupTransport
from pdcompile.runtime.transport.reductions import GroupSums
from pdcompile.schedule import Kind

store, made = dist.HashStore(), {}


def connect(rank):
    made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))


threads = [Thread(target=connect, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
a, b = (GroupTransport(made[rank], rank, 7, 1) for rank in range(2))
sums = [GroupSums(made[rank], (0, 1), rank) for rank in range(2)]
for n in range(10):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        expected = Expected((64,), torch.float32, n)
        end = a.incoming(Channel(Kind.CALL, 0, 1))
        posted = [end.receive(expected, n) for _ in range(20)]
        first = sums[0].start(torch.ones(8))
    others = [torch.randn(k) for k in range(1, 2000)]  # take the memory that was freed
    for i in range(20):
        b.defer(b.outgoing(Channel(Kind.CALL, 0, 0)).send(torch.full((64,), float(i)), n))
    second = sums[1].start(torch.ones(8))
    assert [float(one.wait()[3]) for one in posted] == [float(i) for i in range(20)]
    assert float(first.wait()[0]) == float(second.wait()[0]) == 2.0
    b.settle()
print("fine")
del a, b, sums, posted, first, second
made.clear()  # while Python runs: threads of a group that ends with it may abort the process
"""


@pytest.mark.slow
def test_messages_may_outlive_a_profiler() -> None:
    """torch writes into freed memory when what its profiler saw begin ends after it."""
    done = subprocess.run(
        [sys.executable, "-c", PROFILED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fine" in done.stdout
