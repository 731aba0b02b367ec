"""Contract of two ranks: headers before the first payload of a channel, and layout of payloads.

gloo delivers bytes: another dtype or shape of the same size arrives without an error, and a
bigger message aborts the receiving process.  So the first message of every channel is a header
that says what follows, and the receiver posts a buffer for the payload only when the header says
what was planned.  The header also carries the order of the dimensions in memory: values keep
the layout that the sender's kernels gave them, as they would in one process.
"""

from __future__ import annotations

import zlib
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from pdcompile.eager.digest import flat_bytes
from pdcompile.errors import ContractError
from pdcompile.ir.graph import DTYPE_BYTES
from pdcompile.ir.targets import dtype_name
from pdcompile.schedule import Kind

MAX_DIMS = 12
MAX_EDGES = 1 << 16  # where ranks hold several stages
HEADER_LENGTH = 6 + 2 * MAX_DIMS
SEAL_BYTES = 5 * 8
_DTYPES = tuple(DTYPE_BYTES)


class Channel(NamedTuple):
    """A first-in-first-out stream of messages of one kind and edge with one other rank."""

    kind: Kind
    edge: int
    peer: int
    target: int = -1  # the stage that receives, where its rank holds several

    @property
    def tag(self) -> int:
        return ((self.target + 1) * MAX_EDGES + self.edge) * len(Kind) + self.kind

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.edge} with rank {self.peer}"


class Expected(NamedTuple):
    """Message that a receiver waits for: a tensor of this shape and dtype, of this minibatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    minibatch: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def to_bytes(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The values as flat bytes in that order of dimensions, without a copy where they lie so.

    A tensor with gaps (a slice) arrives without them, its dimensions in the order that they had:
    what kernels compute from it is laid out as in one process.  At least one byte: an empty
    message still is a message.

    Raises ContractError for a sparse gradient, whose size no receiver could know.
    """
    if tensor.layout != torch.strided:
        raise ContractError(
            "a sparse gradient is to be sent to another rank",
            remedy="keep all that reads its parameter on one stage (constraints=, or another "
            "plan), or leave sparse=True out",
        )
    if not tensor.numel():
        return torch.zeros(1, dtype=torch.uint8, device=tensor.device)
    return flat_bytes(tensor.detach().resolve_conj().resolve_neg().permute(order))


def from_bytes(flat: Tensor, expected: Expected, order: tuple[int, ...]) -> Tensor:
    """A tensor on the memory of `flat` (the inverse of `to_bytes`)."""
    memory = flat[: expected.num_bytes].view(expected.dtype)
    position = {dim: at for at, dim in enumerate(order)}
    shape = [expected.shape[dim] for dim in order]
    return memory.view(shape).permute([position[dim] for dim in range(len(order))])


def header_of(
    channel: Channel, tensor: Tensor, order: tuple[int, ...], minibatch: int, plan: int
) -> Tensor:
    """The int64 header (HEADER_LENGTH,) that goes before the first payload of a channel."""
    if tensor.dim() > MAX_DIMS:
        raise ContractError(
            f"a tensor of {tensor.dim()} dimensions cannot be sent, {MAX_DIMS} at most",
            where=str(channel),
            remedy="reshape it, or keep its producer and consumers on one stage",
        )
    padding = [0] * (MAX_DIMS - tensor.dim())
    fields = [plan, channel.kind, channel.edge, minibatch, _code(tensor.dtype), tensor.dim()]
    return torch.tensor(fields + list(tensor.shape) + padding + list(order) + padding)


def read_header(channel: Channel, header: Tensor, expected: Expected, plan: int) -> tuple[int, ...]:
    """Compare a peer's header with what was planned; the memory order that it announces.

    Raises ContractError naming every field that differs, the peer's value first.
    """
    theirs = header.tolist()
    ours = [plan, channel.kind, channel.edge, expected.minibatch, _code(expected.dtype)]
    names = ("plan", "kind of channel", "edge", "minibatch", "dtype")
    wrong = [
        f"{name} {_shown(name, a)} instead of {_shown(name, b)}"
        for name, a, b in zip(names, theirs, ours, strict=False)
        if a != b
    ]
    dims = theirs[5]
    known = 0 <= dims <= MAX_DIMS
    shape = tuple(theirs[6 : 6 + dims]) if known else (dims,)
    order = tuple(theirs[6 + MAX_DIMS : 6 + MAX_DIMS + dims])
    if shape != expected.shape:
        wrong.append(f"shape {shape} instead of {expected.shape}")
    elif sorted(order) != list(range(dims)):
        wrong.append(f"memory order {order}")
    if wrong:
        raise ContractError(
            f"rank {channel.peer} is about to send {', '.join(wrong)}",
            where=str(channel),
            remedy="run the same script, plan, stage sources and minibatches on every rank",
        )
    return order


def seal(flat: Tensor, channel: Channel, serial: int, minibatch: int, plan: int) -> Tensor:
    """A message with its checksum and what it is behind it, which `check_seal` compares.

    `serial`: of the message in its channel, which tells the microbatch.
    """
    fields = [zlib.crc32(flat.numpy().tobytes()), plan, channel.tag, minibatch, serial]
    return torch.cat((flat, torch.tensor(fields).view(torch.uint8)))


def check_seal(flat: Tensor, channel: Channel, serial: int, minibatch: int, plan: int) -> None:
    """Compare a sealed message with what was planned.

    Raises ContractError naming every field that differs.
    """
    size = flat.numel() - SEAL_BYTES
    theirs = flat[size:].clone().view(torch.int64).tolist()
    ours = [zlib.crc32(flat[:size].numpy().tobytes()), plan, channel.tag, minibatch, serial]
    names = ("checksum", "plan", "channel", "minibatch", "number in its channel")
    wrong = [
        f"{name} {a:x} instead of {b:x}" if name in ("checksum", "plan") else
        f"{name} {a} instead of {b}"
        for name, a, b in zip(names, theirs, ours, strict=True)
        if a != b
    ]  # fmt: skip
    if wrong:
        raise ContractError(
            f"message {serial} from rank {channel.peer} has {', '.join(wrong)}",
            where=str(channel),
            remedy="if only the checksum differs, look for faulty memory or network; otherwise run "
            "the same script, plan, stage sources and minibatches on every rank",
        )


def check_tensor(tensor: object, expected: Expected, what: str) -> None:
    """Raise ContractError unless a stage made what the plan says (an edited stage may not)."""
    if not isinstance(tensor, Tensor):
        raise ContractError(f"{what} is a {type(tensor).__name__}, not a tensor")
    if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
        raise ContractError(
            f"{what} is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, planned was "
            f"{dtype_name(expected.dtype)} {expected.shape}",
            remedy="if the stage's source was edited, keep the shapes and dtypes of its results",
        )


def _code(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype_name(dtype))


def _shown(name: str, value: int) -> str:
    if name == "dtype" and 0 <= value < len(_DTYPES):
        return _DTYPES[value]
    return f"{value:x}" if name == "plan" else str(value)
