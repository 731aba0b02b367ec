"""Point-to-point messages: isend and irecv of torch.distributed, nothing else.

Why not send and recv: a gloo send returns only when the peer has posted its receive, so blocking
sends deadlock under most schedules.  Channels are first-in-first-out and apart (see `links`).
Every Work is kept and waited for, and the memory of a message belongs to it until then.

The note ahead of a channel's first message (see `contract`) makes the receiver post its first
payloads only when it waits for them.  Schedules are proved for that (`passes.check.exchange`): a
sender may wait for its sends as usual.  Notes themselves are awaited some calls later (`settle`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import count
from typing import Any

import torch
from torch import Tensor

from pdcompile.batch import memory_order
from pdcompile.eager.digest import flat_bytes
from pdcompile.runtime.device import Fetched, Handle, RankDevice
from pdcompile.runtime.stage.gradients import absent, is_absent
from pdcompile.runtime.transport.contract import (
    HEADER_LENGTH,
    Channel,
    Expected,
    Note,
    checksum,
    from_bytes,
    laid,
    natural,
    read_note,
)
from pdcompile.runtime.transport.links import Link, Places, Working
from pdcompile.schedule import Kind
from pdcompile.schedule.instruction import DATA

#: what stays in host memory: the program reads it
ON_HOST = frozenset((Kind.CALL, Kind.LOSS))
SENT = Fetched(torch.empty(0))  # in place of a message that nobody here waits for
MAY_LACK = frozenset((Kind.GRADIENT, Kind.TIED))  # may be absent (see `absent`)


class GroupTransport:
    """One rank's messages: control over `group`, data over it too or over a link of its own.

    `plan` is a number that all ranks have to have; `reach`: calls that ranks may be apart;
    `sealed`: every message has a note with a checksum.  Notes are control.  gloo reads and writes
    host memory: what is on a `device` goes through copies there, while it computes on, unless the
    link of data is NCCL's.
    """

    def __init__(
        self, group: Any, rank: int, plan: int, reach: int, *, sealed: bool = False,
        data: Link | None = None, device: RankDevice | None = None, places: Places | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.plan, self._reach = rank, plan, reach
        self.places = places or Places()
        self.sealed = sealed
        self.device = device or RankDevice()
        self.control = Link(defaultdict(lambda: group))
        self._data = data or self.control
        self._call = 0
        self._outgoing: dict[Channel, _Outgoing] = {}
        self._incoming: dict[Channel, _Incoming] = {}
        self._deferred: deque[tuple[int, Handle]] = deque()

    def outgoing(self, channel: Channel) -> _Outgoing:
        """The sending end of a channel."""
        found = self._outgoing.get(channel)
        if found is None:
            found = self._outgoing[channel] = _Outgoing(self, channel)
        return found

    def defer(self, sent: Handle) -> None:
        """Leave the wait for a message to `settle`."""
        self._deferred.append((self._call, sent))

    def incoming(self, channel: Channel) -> _Incoming:
        """The receiving end of a channel."""
        found = self._incoming.get(channel)
        if found is None:
            found = self._incoming[channel] = _Incoming(self, channel)
        return found

    def settle(self, call: int | None = None) -> None:
        """A new call begins (or, None, all have ended): wait for old deferred sends."""
        if call is not None:
            self._call = call
        while self._deferred and (call is None or self._deferred[0][0] <= call - self._reach):
            self._deferred.popleft()[1].wait()
        if call is None:
            self.device.drain()  # peers wait for what it sends

    def abandon(self) -> None:
        """Forget every message, so that destroying the group closes its connections."""
        self.control.abandon()
        self._data.abandon()
        for state in self._incoming.values():
            state.waiting.clear()
        self._deferred.clear()
        self._outgoing.clear()
        self._incoming.clear()

    def link(self, channel: Channel) -> Link:
        """Link of the messages of a channel."""
        return self._data if channel.kind in DATA else self.control

    def notes_each(self, channel: Channel) -> bool:
        """True if there is a note ahead of each message: where all are checked, and for gradients
        that may be absent, which the host has to know, where they do not come to the host."""
        return self.sealed or (channel.kind in MAY_LACK and self.link(channel).direct)


class _Outgoing:
    """The sending end of a channel: what all of its messages have in common."""

    def __init__(self, transport: GroupTransport, channel: Channel) -> None:
        self._link, self._tag, self._transport = transport.link(channel), channel.tag, transport
        self._order: tuple[int, ...] | None = None  # of the first message, and of all
        self._targets = transport.places.targets(transport.rank, channel.peer)
        self._noted, self._numbers = transport.notes_each(channel), count()  # of those noted each
        self._channel, self._calls = channel, channel.kind is Kind.CALL

    def send(self, tensor: Tensor, minibatch: int) -> Handle:
        """Post a message."""
        if not self._targets:  # another part sends it
            return SENT
        if self._order is None:
            self._order = memory_order(tensor)
            if not self._calls:
                self._tell(tensor, minibatch)
        link, data, device = self._link, laid(tensor, self._order), self._transport.device
        if link.direct:
            flat = Fetched(device.place(flat_bytes(data)))
        else:
            flat = Fetched(data) if self._calls else device.fetch(data)
        if self._noted:
            read = checksum(device.fetch(flat.wait()).wait()) if self._transport.sealed else 0
            comes = not (self._channel.kind in MAY_LACK and link.direct and is_absent(tensor))
            self._tell(tensor, minibatch, next(self._numbers), comes, read)
            if not comes:
                return SENT
        return link.start(flat, self._tag, self._targets)

    def _tell(self, tensor: Tensor, minibatch: int, *of_one: Any) -> None:
        """Send the note ahead of a message; `of_one`: what is noted of each."""
        transport, form = self._transport, (tensor.dtype, tuple(tensor.shape), self._order or ())
        note = Note(transport.plan, self._channel, minibatch, *form, *of_one)
        flat = Fetched(note.packed().view(torch.uint8))
        transport.defer(transport.control.start(flat, self._tag, self._targets))


class _Incoming:
    """The receiving end of a channel, and its first note until that was read."""

    def __init__(self, transport: GroupTransport, channel: Channel) -> None:
        self.order: tuple[int, ...] | None = (0,) if channel.kind is Kind.CALL else None
        self.waiting: list[_Received] = []  # posted when the first note has been read
        self.device = RankDevice() if channel.kind in ON_HOST else transport.device
        self._link, self._tag = transport.link(channel), channel.tag
        self.direct = self._link.direct
        self.lands = self.device.queued and not self.direct  # in host memory, then on the device
        self.may_lack = channel.kind in MAY_LACK
        self.noted = transport.notes_each(channel)
        self.channel, self._source = channel, transport.places.source(channel.peer)
        self._transport = transport
        self.numbers = count()
        if self.order is None:
            self._first = self.note()

    def receive(self, expected: Expected, minibatch: int) -> Handle:
        """Post a receive: of what comes as it is handed on, into a tensor of its shape."""
        order = self.order
        if order is None or not natural(order) or self.noted or self.direct or self.lands:
            return _Received(self, expected._replace(minibatch=minibatch))
        made = torch.empty(expected.shape, dtype=expected.dtype)
        return self.start(made) if made.numel() else _Received(self, expected)

    def start(self, flat: Tensor) -> Working:
        return self._link.begin(Fetched(flat), self._tag, self._source, sending=False)

    def note(self) -> Working:
        """Post the receive of a note."""
        header = torch.zeros(HEADER_LENGTH, dtype=torch.int64).view(torch.uint8)
        control = self._transport.control
        return control.begin(Fetched(header), self._tag, self._source, sending=False)

    def read(self, note: Working, expected: Expected, serial: int = 0) -> Note:
        """Wait for a note.  Raises ContractError where it is not what was planned."""
        header = note.wait().view(torch.int64)
        return read_note(self.channel, header, expected, self._transport.plan, serial)

    def opened(self) -> tuple[int, ...]:
        """The memory order; waits for the first note, and posts what was held back."""
        if self.order is None:
            self.order = self.read(self._first, self.waiting[0].expected).order
            while self.waiting:
                self.waiting.pop(0).post()
        return self.order


class _Received(Handle):
    def __init__(self, source: _Incoming, expected: Expected) -> None:
        self.expected = expected
        self._source = source
        self._transfer: Working | None = None
        if source.order is None:
            source.waiting.append(self)
        else:
            self.post()

    def post(self) -> None:
        source = self._source
        self._serial = next(source.numbers)
        self._note = source.note() if source.noted else None
        if not (source.may_lack and source.direct):
            self._begin()

    def _begin(self) -> Working:
        source = self._source
        make = source.device.pinned if source.lands else source.device.empty
        self._transfer = source.start(make(max(1, self.expected.num_bytes)))
        return self._transfer

    def wait(self) -> Tensor:
        source, expected = self._source, self.expected
        order, note = source.opened(), None
        if self._note is not None:
            note = source.read(self._note, expected, self._serial)
            if not note.comes:
                return absent(torch.empty(expected.shape, dtype=expected.dtype))
        came = (self._transfer or self._begin()).wait()
        if note is not None and note.checksum:
            note.check(source.device.fetch(came).wait())
        found = from_bytes(came, expected, order)
        if not source.lands or (source.may_lack and is_absent(found)):  # the host has to know
            return found
        return source.device.place(found, pinned=True)
