"""Point-to-point messages over torch.distributed: isend and irecv, nothing else.

Why not send and recv: a gloo send returns only when the peer has posted its receive, so blocking
sends deadlock under most schedules.  One tag a channel keeps channels first-in-first-out and
apart.  Every Work is kept and waited for, and the memory of a message belongs to it until then.

The header of a channel's first message (see `contract`) makes the receiver post its first
payloads only when it waits for them.  A sender must not wait for that, or a schedule that was
proved with receives posted ahead could deadlock: what is sent in the call that opens a channel
is copied, and its completion is awaited two calls later (`settle`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pdcompile.runtime.contract import (
    HEADER_LENGTH,
    Channel,
    Expected,
    Kind,
    from_bytes,
    header_of,
    memory_order,
    read_header,
    to_bytes,
)


class PeerLost(RuntimeError):
    """The connection to a rank broke: it died, or it closed because of an error somewhere."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(f"lost the connection to rank {peer}: {text}")
        self.peer = peer


class Handle:
    """A message under way. `wait` returns the tensor of a receive.

    `memory` is the address of the slot that a pooled receive is in.
    """

    memory = -1

    def ready(self) -> bool:
        """Whether wait may be called now: on a blocking transport always."""
        return True

    def wait(self) -> Tensor | None:
        raise NotImplementedError

    def free(self) -> None:
        """Give a pooled slot back: nobody reads the tensor any more."""


class Done(Handle):
    """A message that needs no waiting for."""

    def wait(self) -> None:
        return None


class Transport(Protocol):
    """What the interpreter asks of either transport."""

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
    """One rank's messages in a gloo process group that is used for nothing else."""

    blocking = True

    def __init__(self, group: Any, rank: int, plan: int) -> None:
        self.rank = rank
        self._group = group
        self._plan = plan
        self._call = 0
        self._outgoing: dict[Channel, _Outgoing] = {}
        self._incoming: dict[Channel, _Incoming] = {}
        self._deferred: deque[tuple[int, _Sent]] = deque()

    def send(
        self, channel: Channel, tensor: Tensor, minibatch: int, *, deferred: bool = False
    ) -> Handle:
        state = self._outgoing.get(channel)
        if state is None:
            state = _Outgoing(memory_order(tensor), self._call)
            self._outgoing[channel] = state
            if channel.kind is not Kind.CALL:
                header = header_of(channel, tensor, state.order, minibatch, self._plan)
                self._defer(_Sent(channel, to_bytes(header, (0,)), self._isend))
        payload = to_bytes(tensor, state.order)
        opening = state.opened == self._call
        sent = _Sent(channel, payload.clone() if opening else payload, self._isend)
        if not (deferred or opening):
            return sent
        self._defer(sent)
        return Done()

    def receive(self, channel: Channel, expected: Expected, *, pooled: bool = False) -> Handle:
        state = self._incoming.get(channel)
        if state is None:
            state = self._incoming[channel] = _Incoming(channel, self._irecv, self._plan)
        return state.post(expected, pooled)

    def settle(self, call: int | None = None) -> None:
        if call is not None:
            self._call = call
        while self._deferred and (call is None or self._deferred[0][0] <= call - 2):
            self._deferred.popleft()[1].wait()

    def abandon(self) -> None:
        self._group = None
        self._deferred.clear()
        self._outgoing.clear()
        self._incoming.clear()

    def _defer(self, sent: _Sent) -> None:
        self._deferred.append((self._call, sent))

    def _isend(self, flat: Tensor, channel: Channel) -> Any:
        return self._group.send([flat], channel.peer, channel.tag)

    def _irecv(self, flat: Tensor, channel: Channel) -> Any:
        return self._group.recv([flat], channel.peer, channel.tag)


class _Outgoing:
    def __init__(self, order: tuple[int, ...], opened: int) -> None:
        self.order = order
        self.opened = opened  # the call that sent the first message


class _Sent(Handle):
    """Holds the bytes until they are gone: isend does not copy."""

    def __init__(
        self, channel: Channel, flat: Tensor, isend: Callable[[Tensor, Channel], Any]
    ) -> None:
        self._flat: Tensor | None = flat
        self._channel = channel
        self._work = _guarded(channel, lambda: isend(flat, channel))

    def wait(self) -> None:
        work, self._work = self._work, None
        _guarded(self._channel, work.wait)
        self._flat = None


class _Incoming:
    """The receiving end of a channel: its slots, and its header until that was read."""

    def __init__(
        self, channel: Channel, irecv: Callable[[Tensor, Channel], Any], plan: int
    ) -> None:
        self.channel = channel
        self.irecv = irecv
        self.order: tuple[int, ...] | None = (0,) if channel.kind is Kind.CALL else None
        self.slots: list[Tensor] = []
        self._plan = plan
        self._waiting: list[_Received] = []
        if self.order is None:
            self._header = torch.zeros(HEADER_LENGTH, dtype=torch.int64)
            self._work = _guarded(channel, lambda: irecv(self._header.view(torch.uint8), channel))

    def post(self, expected: Expected, pooled: bool) -> Handle:
        received = _Received(self, expected, pooled)
        if self.order is None:
            self._waiting.append(received)
        else:
            received.post()
        return received

    def open(self) -> None:
        """Wait for the header, compare it, and post what was held back."""
        work, self._work = self._work, None
        _guarded(self.channel, work.wait)
        first = self._waiting[0].expected
        self.order = read_header(self.channel, self._header, first, self._plan)
        for received in self._waiting:
            received.post()
        self._waiting.clear()

    def slot(self, num_bytes: int) -> Tensor:
        """A buffer that no live message uses; the pool grows to what is in flight at once."""
        while self.slots:
            slot = self.slots.pop()
            if slot.numel() >= num_bytes:
                return slot
        return torch.empty(num_bytes, dtype=torch.uint8)


class _Received(Handle):
    def __init__(self, source: _Incoming, expected: Expected, pooled: bool) -> None:
        self.expected = expected
        self._source = source
        self._pooled = pooled
        self._flat: Tensor | None = None
        self._work: Any = None

    def post(self) -> None:
        num_bytes = max(1, self.expected.num_bytes)
        # Autograd may keep a gradient's memory as a parameter's .grad: those get memory of
        # their own, only activations use slots.
        flat = (
            self._source.slot(num_bytes)
            if self._pooled
            else torch.empty(num_bytes, dtype=torch.uint8)
        )
        self._flat = flat
        self.memory = flat.untyped_storage().data_ptr()
        channel = self._source.channel
        self._work = _guarded(channel, lambda: self._source.irecv(flat[:num_bytes], channel))

    def wait(self) -> Tensor:
        if self._source.order is None:
            self._source.open()
        assert self._flat is not None
        assert self._source.order is not None
        work, self._work = self._work, None
        _guarded(self._source.channel, work.wait)
        return from_bytes(self._flat, self.expected, self._source.order)

    def free(self) -> None:
        if self._pooled and self._flat is not None:
            self._source.slots.append(self._flat)
            self._flat = None


def _guarded(channel: Channel, call: Callable[[], Any]) -> Any:
    """Run a call into gloo; a broken connection becomes PeerLost without a trace of the Work."""
    try:
        return call()
    except RuntimeError as error:
        text = str(error).splitlines()[0].partition(". ")[0].rpartition("] ")[2]
    raise PeerLost(channel.peer, text)
