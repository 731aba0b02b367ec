"""The transport inside one process: every rank's messages in queues, nothing copied.

The same instruction lists run over it as over torch.distributed, so that a debugger sees all
stages.  A receive is ready when the sender has sent; a send is complete at once, because the
tensor itself is handed over.
"""

from __future__ import annotations

from collections import defaultdict, deque

from torch import Tensor

from pdcompile.runtime.transport.contract import Channel, Expected, check_tensor
from pdcompile.runtime.transport.point_to_point import Done, Handle

#: the messages of all ranks of one process, by sender, receiver and channel
Wires = defaultdict[tuple[int, ...], deque[Tensor]]


class LocalTransport:
    """One rank's end of the wires."""

    blocking = False

    def __init__(self, rank: int, wires: Wires) -> None:
        self.rank = rank
        self._queues = wires

    def send(
        self, channel: Channel, tensor: Tensor, minibatch: int, *, deferred: bool = False
    ) -> Handle:
        key = (self.rank, channel.peer, channel.kind, channel.edge, channel.target)
        self._queues[key].append(tensor.detach())
        return Done()

    def receive(self, channel: Channel, expected: Expected, *, pooled: bool = False) -> Handle:
        key = (channel.peer, self.rank, channel.kind, channel.edge, channel.target)
        return _Queued(channel, expected, self._queues[key])

    def settle(self, call: int | None = None) -> None:
        """Nothing is ever outstanding."""

    def abandon(self) -> None:
        self._queues.clear()


class _Queued(Handle):
    def __init__(self, channel: Channel, expected: Expected, queue: deque[Tensor]) -> None:
        self._channel = channel
        self._expected = expected
        self._queue = queue

    def ready(self) -> bool:
        return bool(self._queue)

    def wait(self) -> Tensor:
        tensor = self._queue.popleft()
        check_tensor(tensor, self._expected, f"what came on {self._channel}")
        return tensor
