"""Point-to-point messages: isend and irecv of torch.distributed, nothing else; or in one process.

Why not send and recv: a gloo send returns only when the peer has posted its receive, so blocking
sends deadlock under most schedules.  Channels are first-in-first-out and apart (see `links`).
Every Work is kept and waited for, and the memory of a message belongs to it until then.

The header of a channel's first message (see `contract`) makes the receiver post its first
payloads only when it waits for them.  Schedules are proved for that (`passes.check.exchange`): a
sender may wait for its sends as usual.  The header itself is awaited some calls later (`settle`).

Inside one process (`LocalTransport`) messages lie in queues, and nothing is copied: the same
instruction lists run over it, so that a debugger sees all stages.  A receive is ready when the
sender has sent; a send is complete at once, because the tensor itself is handed over.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pdcompile.batch import memory_order
from pdcompile.runtime.device import Fetched, Handle, Landing, RankDevice
from pdcompile.runtime.stage.gradients import absent, is_absent
from pdcompile.runtime.transport.contract import (
    HEADER_LENGTH,
    SEAL_BYTES,
    Channel,
    Expected,
    check_seal,
    check_tensor,
    from_bytes,
    header_of,
    read_header,
    seal,
    to_bytes,
)
from pdcompile.runtime.transport.links import Link, TaggedLink, lost
from pdcompile.schedule import Kind
from pdcompile.schedule.instruction import DATA

#: what stays in host memory: the program reads it, or it is for the user's whole state
ON_HOST = frozenset((Kind.CALL, Kind.LOSS, Kind.STATE))
MAY_LACK = frozenset((Kind.GRADIENT, Kind.TIED))  # may be absent (see `absent`)


class Done(Handle):
    """A message that needs no waiting for, such as from another stage of the same rank."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self._tensor = tensor

    def known(self) -> bool:
        return True

    def wait(self) -> Tensor | None:
        return self._tensor


class Transport(Protocol):
    """Interface of the interpreter to either transport."""

    rank: int
    blocking: bool

    def send(
        self, channel: Channel, tensor: Tensor, minibatch: int, *, deferred: bool = False
    ) -> Handle:
        """Post a message; `deferred`: nobody will wait for the handle, `settle` will."""

    def receive(self, channel: Channel, expected: Expected, *, pooled: bool = False) -> Handle:
        """Post a receive; `pooled`: into a slot that comes back with `Handle.free`."""

    def settle(self, call: int | None = None) -> None:
        """A new call begins (or, None, all have ended): wait for old deferred sends."""

    def abandon(self) -> None:
        """Forget every message, so that destroying the group closes its connections."""


class GroupTransport:
    """One rank's messages: control over `group`, data over it too or over a link of its own.

    `plan` is a number that all ranks have to have; `reach`: calls that ranks may be apart;
    `sealed`: every message has a checksum and says what it is.  Headers are control.  gloo reads
    and writes host memory: what is on a `device` goes through copies there, while it computes on,
    unless the link of data is NCCL's.
    """

    blocking = True

    def __init__(
        self, group: Any, rank: int, plan: int, reach: int, *, sealed: bool = False,
        data: Link | None = None, device: RankDevice | None = None,
    ) -> None:  # fmt: skip
        self.rank, self._reach = rank, reach
        self.sealed = sealed
        self.device = device or RankDevice()
        self._sent: Counter[Channel] = Counter()  # messages, where they are sealed
        self.control: Link = TaggedLink(group)
        self._data = data or self.control
        self._plan = plan
        self._call = 0
        self._outgoing: dict[Channel, tuple[int, ...]] = {}  # memory order of open channels
        self._incoming: dict[Channel, _Incoming] = {}
        self._deferred: deque[tuple[int, _Transfer]] = deque()

    def send(
        self, channel: Channel, tensor: Tensor, minibatch: int, *, deferred: bool = False
    ) -> Handle:
        order = self._outgoing.get(channel)
        if order is None:
            order = self._outgoing[channel] = memory_order(tensor)
            if channel.kind is not Kind.CALL:
                header = header_of(channel, tensor, order, minibatch, self._plan)
                told = Fetched(to_bytes(header, (0,)))
                self._defer(_Transfer(self.control, told, channel, sending=True))
        if self.tells_absence(channel):
            lacks = self.device.on_host(tensor) and is_absent(tensor)
            told = Fetched(torch.tensor([not lacks], dtype=torch.uint8))
            self._defer(_Transfer(self.control, told, channel, sending=True))
            if lacks:
                return Done()
        flat = self._payload(tensor, channel, order, minibatch)
        sent = _Transfer(self.link(channel), flat, channel, sending=True)
        if not deferred:
            return sent
        self._defer(sent)
        return Done()

    def _payload(
        self, tensor: Tensor, channel: Channel, order: tuple[int, ...], minibatch: int
    ) -> Fetched:
        """The bytes of a message, where its link reads them."""
        flat, direct = to_bytes(tensor, order), self.link(channel).direct
        if direct and not self.sealed:
            return Fetched(self.device.place(flat))
        found = Fetched(flat) if channel.kind is Kind.CALL else self.device.fetch(flat)
        if not self.sealed:
            return found
        closed = seal(found.wait(), channel, self._sent[channel], minibatch, self._plan)
        self._sent[channel] += 1
        return Fetched(self.device.place(closed) if direct else closed)

    def receive(self, channel: Channel, expected: Expected, *, pooled: bool = False) -> Handle:
        state = self._incoming.get(channel)
        if state is None:
            state = self._incoming[channel] = _Incoming(self, channel, self._plan)
        return _Received(state, expected, pooled)

    def settle(self, call: int | None = None) -> None:
        if call is not None:
            self._call = call
        while self._deferred and (call is None or self._deferred[0][0] <= call - self._reach):
            self._deferred.popleft()[1].wait()
        if call is None:
            self.device.drain()  # peers wait for what it sends

    def abandon(self) -> None:
        self.control.abandon()
        self._data.abandon()
        for state in self._incoming.values():
            state.waiting.clear()
        self._deferred.clear()
        self._outgoing.clear()
        self._incoming.clear()

    def _defer(self, sent: _Transfer) -> None:
        self._deferred.append((self._call, sent))

    def link(self, channel: Channel) -> Link:
        """Link of the messages of a channel."""
        return self._data if channel.kind in DATA else self.control

    def tells_absence(self, channel: Channel) -> bool:
        """True if control says before each message if it comes: for gradients that may be absent,
        which the host has to know, where the message itself does not come to the host."""
        return channel.kind in MAY_LACK and self.link(channel).direct


class _Transfer(Handle):
    """A message in the hands of a link, and its memory, which is the link's until `wait`.

    No other place holds the Work, and no frame does while an error passes: connections close
    only when the last Work is gone, and a traceback may live long.
    """

    def __init__(self, link: Link, flat: Fetched, channel: Channel, *, sending: bool) -> None:
        self._flat: Fetched | None = flat
        self._channel = channel
        self._work: Any = None
        try:
            self._work = link.start(flat, channel, sending=sending)
            return
        except RuntimeError as error:
            text = str(error)
        raise lost(channel.peer, text)

    def wait(self) -> None:
        try:
            self._work.wait()
            self._work = self._flat = None
            return
        except RuntimeError as error:
            text = str(error)
        self._work = None
        raise lost(self._channel.peer, text)


class _Incoming:
    """The receiving end of a channel: its slots, and its header until that was read."""

    def __init__(self, transport: GroupTransport, channel: Channel, plan: int) -> None:
        self.order: tuple[int, ...] | None = (0,) if channel.kind is Kind.CALL else None
        self.slots: list[Tensor] = []
        self.waiting: list[_Received] = []  # posted when the header has been read
        self.sealed = transport.sealed
        self.device = RankDevice() if channel.kind in ON_HOST else transport.device
        self.may_lack = channel.kind in MAY_LACK
        self.told = transport.tells_absence(channel)
        self._direct = transport.link(channel).direct
        self._posted = 0
        self._transport = transport
        self._channel = channel
        self._plan = plan
        if self.order is None:
            self._header = torch.zeros(HEADER_LENGTH, dtype=torch.int64)
            header = Fetched(self._header.view(torch.uint8))
            self._arriving = _Transfer(transport.control, header, channel, sending=False)

    def transfer(self, flat: Tensor, *, control: bool = False) -> _Transfer:
        link = self._transport.control if control else self._transport.link(self._channel)
        return _Transfer(link, Fetched(flat), self._channel, sending=False)

    def landing(self, target: Tensor) -> Landing:
        """Memory in which the next message arrives, on its way to `target`."""
        return Landing(target) if self._direct else self.device.landing(target)

    def opened(self) -> tuple[int, ...]:
        """The memory order; waits for the header, compares it, posts what was held back."""
        if self.order is None:
            self._arriving.wait()
            first = self.waiting[0].expected
            self.order = read_header(self._channel, self._header, first, self._plan)
            while self.waiting:
                self.waiting.pop(0).post()
        return self.order

    def take_number(self) -> int:
        """Number of the message whose receive is posted now."""
        self._posted += 1
        return self._posted - 1

    def check(self, flat: Tensor, serial: int, minibatch: int) -> None:
        """Raise ContractError unless a sealed message is what was to come."""
        check_seal(flat, self._channel, serial, minibatch, self._plan)

    def slot(self, num_bytes: int) -> Tensor:
        """A buffer that no live message uses; the pool grows to what is in flight at once."""
        while self.slots:
            slot = self.slots.pop()
            if slot.numel() >= num_bytes:
                return slot
        return self.device.empty(num_bytes)


class _Received(Handle):
    def __init__(self, source: _Incoming, expected: Expected, pooled: bool) -> None:
        self.expected = expected
        self._source = source
        self._pooled = pooled
        self._flat: Tensor | None = None
        if source.order is None:
            source.waiting.append(self)
        else:
            self.post()

    def post(self) -> None:
        if self._source.told:
            self._told = torch.zeros(1, dtype=torch.uint8)
            self._transfer = self._source.transfer(self._told, control=True)
        else:
            self._begin()

    def _begin(self) -> None:
        # Autograd may keep a gradient's memory as a parameter's .grad: gradients get memory of
        # their own, only activations use slots.
        size = max(1, self.expected.num_bytes) + (SEAL_BYTES if self._source.sealed else 0)
        source, self._serial = self._source, self._source.take_number()
        self._flat = source.slot(size) if self._pooled else source.device.empty(size)
        self.memory = self._flat.untyped_storage().data_ptr()
        self._landing = source.landing(self._flat[:size])
        self._transfer = source.transfer(self._landing.memory)

    def wait(self) -> Tensor:
        order = self._source.opened()
        self._transfer.wait()
        if self._source.told:
            if not self._told:
                return absent(torch.empty(self.expected.shape, dtype=self.expected.dtype))
            self._begin()
            self._transfer.wait()
        assert self._flat is not None
        if self._source.sealed:
            came = self._source.device.fetch(self._landing.memory).wait()
            self._source.check(came, self._serial, self.expected.minibatch)
        if self._landing.beside and self._source.may_lack:
            there = from_bytes(self._landing.memory, self.expected, order)
            if is_absent(there):  # which the host has to know
                return there
        self._landing.arrived()
        del self._landing
        return from_bytes(self._flat, self.expected, order)

    def free(self) -> None:
        if self._pooled and self._flat is not None:
            self._source.slots.append(self._flat)
            self._flat = None


@dataclass(slots=True)
class Wire:
    """Messages on one channel: the k-th receive gets the k-th send, whenever it is waited for."""

    messages: dict[int, Tensor] = field(default_factory=dict)  # sent and not yet waited for
    num_sent: int = 0
    num_posted: int = 0


#: of all ranks of one process, by sender, receiver and channel
Wires = defaultdict[tuple[int, ...], Wire]


class LocalTransport:
    """One rank's end of the wires."""

    blocking = False

    def __init__(self, rank: int, wires: Wires) -> None:
        self.rank = rank
        self._wires = wires

    def send(
        self, channel: Channel, tensor: Tensor, minibatch: int, *, deferred: bool = False
    ) -> Handle:
        key = (self.rank, channel.peer, channel.kind, channel.edge, channel.target)
        wire = self._wires[key]
        wire.messages[wire.num_sent] = tensor.detach()
        wire.num_sent += 1
        return Done()

    def receive(self, channel: Channel, expected: Expected, *, pooled: bool = False) -> Handle:
        key = (channel.peer, self.rank, channel.kind, channel.edge, channel.target)
        return _Queued(channel, expected, self._wires[key])

    def settle(self, call: int | None = None) -> None:
        """No-op: no message is ever outstanding."""

    def abandon(self) -> None:
        self._wires.clear()


class _Queued(Handle):
    def __init__(self, channel: Channel, expected: Expected, wire: Wire) -> None:
        self._channel = channel
        self._expected = expected
        self._wire = wire
        self._number = wire.num_posted
        wire.num_posted += 1

    def ready(self) -> bool:
        return self._number in self._wire.messages

    def wait(self) -> Tensor:
        tensor = self._wire.messages.pop(self._number)
        check_tensor(tensor, self._expected, f"what came on {self._channel}")
        return tensor
