"""Contract of two ranks: notes ahead of payloads, and the layout of payloads.

gloo delivers bytes: another dtype or shape of the same size arrives without an error, and a
bigger message aborts the receiving process.  So the first message of every channel is a note
that says what follows, and the receiver posts a buffer for the payload only when the note says
what was planned.  It also carries the order of the dimensions in memory: values keep the layout
that the sender's kernels gave them, as they would in one process.  Where every message is to be
checked, or may be absent, there is a note ahead of each.
"""

from __future__ import annotations

import zlib
from functools import cache
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
HEADER_LENGTH = 10 + 2 * MAX_DIMS
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


def laid(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The values side by side in that order of dimensions, the tensor itself where they lie so.

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
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return (tensor if natural(order) else tensor.permute(order)).contiguous()


def from_bytes(flat: Tensor, expected: Expected, order: tuple[int, ...]) -> Tensor:
    """A tensor on the memory of `flat` (the inverse of `laid`)."""
    num_bytes = expected.num_bytes
    memory = (flat if flat.numel() == num_bytes else flat[:num_bytes]).view(expected.dtype)
    if natural(order):
        return memory.view(expected.shape)
    shape = [expected.shape[dim] for dim in order]
    return memory.view(shape).permute(sorted(range(len(order)), key=order.__getitem__))


@cache
def natural(order: tuple[int, ...]) -> bool:
    """True if no dimension changes its place, as in most messages."""
    return order == tuple(range(len(order)))


class Note(NamedTuple):
    """Message over control ahead of a payload: what follows.

    `serial`: of the payload in its channel, where all are noted; `comes`: False for a gradient that
    is absent; `checksum`: of the payload's bytes, 0 where they are not checked.
    """

    plan: int
    channel: Channel
    minibatch: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    serial: int = 0
    comes: bool = True
    checksum: int = 0

    def packed(self) -> Tensor:
        """The int64 header (HEADER_LENGTH,).  Raises ContractError for too many dimensions."""
        if len(self.shape) > MAX_DIMS:
            raise ContractError(
                f"a tensor of {len(self.shape)} dimensions cannot be sent, {MAX_DIMS} at most",
                where=str(self.channel),
                remedy="reshape it, or keep its producer and consumers on one stage",
            )
        padding = [0] * (MAX_DIMS - len(self.shape))
        kind, edge, _, target = self.channel
        fields = [self.plan, kind, edge, target, self.minibatch, _code(self.dtype), self.serial]
        fields += [self.comes, self.checksum, len(self.shape)]
        return torch.tensor([*fields, *self.shape, *padding, *self.order, *padding])

    def check(self, flat: Tensor) -> None:
        """Raise ContractError where a payload in host memory has another checksum."""
        if (here := checksum(flat)) != self.checksum:
            raise ContractError(
                f"message {self.serial} from rank {self.channel.peer} has checksum {here:x} "
                f"instead of {self.checksum:x}",
                where=str(self.channel),
                remedy="look for faulty memory or network",
            )


def read_note(
    channel: Channel, header: Tensor, expected: Expected, plan: int, serial: int = 0
) -> Note:
    """Reads a peer's header and compares it with what was planned.

    Raises ContractError naming every field that differs, the peer's value first.
    """
    theirs = header.tolist()
    ours = [plan, channel.kind, channel.edge, channel.target]
    ours += [expected.minibatch, _code(expected.dtype), serial]
    names = "plan", "kind of channel", "edge", "stage", "minibatch", "dtype", "number"
    wrong = [
        f"{name} {_shown(name, a)} instead of {_shown(name, b)}"
        for name, a, b in zip(names, theirs, ours, strict=False)
        if a != b
    ]
    *_, comes, checksum, dims = theirs[: HEADER_LENGTH - 2 * MAX_DIMS]
    known = 0 <= dims <= MAX_DIMS
    sizes, order = theirs[-2 * MAX_DIMS : -MAX_DIMS], theirs[-MAX_DIMS:]
    shape = tuple(sizes[:dims]) if known else (dims,)
    if shape != expected.shape:
        wrong.append(f"shape {shape} instead of {expected.shape}")
    elif sorted(order[:dims]) != list(range(dims)):
        wrong.append(f"memory order {order[:dims]}")
    if wrong:
        raise ContractError(
            f"rank {channel.peer} is about to send {', '.join(wrong)}",
            where=str(channel),
            remedy="run the same script, plan, stage sources and minibatches on every rank",
        )
    given = expected.minibatch, expected.dtype, shape, tuple(order[:dims])
    return Note(plan, channel, *given, serial, bool(comes), checksum)


def checksum(flat: Tensor) -> int:
    """Checksum of what is in host memory, never 0."""
    return 1 + zlib.crc32(flat_bytes(flat).numpy().tobytes())


def check_result(tensor: object, expected: Expected, name: str, stage: int) -> None:
    """Raise ContractError unless a stage made what the plan says (an edited stage may not)."""
    if not isinstance(tensor, Tensor):
        found = type(tensor).__name__
        raise ContractError(f"result {name!r} of stage {stage} is a {found}, not a tensor")
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        raise ContractError(
            f"result {name!r} of stage {stage} is {dtype_name(tensor.dtype)} "
            f"{tuple(tensor.shape)}, planned was {dtype_name(expected.dtype)} {expected.shape}",
            remedy="if the stage's source was edited, keep the shapes and dtypes of its results",
        )


def _code(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype_name(dtype))


def _shown(name: str, value: int) -> str:
    if name == "dtype" and 0 <= value < len(_DTYPES):
        return _DTYPES[value]
    return f"{value:x}" if name == "plan" else str(value)
