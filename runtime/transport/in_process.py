"""The transport inside one process: every rank's messages in queues, nothing copied.

The same instruction lists run over it as over torch.distributed, so that a debugger sees all
stages.  A receive is ready when the sender has sent; a send is complete at once, because the
tensor itself is handed over.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from pdcompile.runtime.transport.contract import Channel, Expected, check_tensor
from pdcompile.runtime.transport.point_to_point import Done, Handle


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
