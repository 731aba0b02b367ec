"""Vector clocks (Mattern 1989) of streams, events and threads of a GPU that is not there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.helpers.simulated_gpu import SimulatedGpu


Clock = dict[str, int]


@dataclass
class Memory:
    """A storage: which kind, of which stream, and who touched it."""

    kind: str  # host, pinned, device
    owner: Clock  # the clock of its stream, as it goes on
    wrote: tuple[str, int] | None = None
    read: Clock = field(default_factory=dict)
    alive: Any = None


class Actor:
    """A stream, or a thread of the host."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, {name: 0}

    def learn(self, clock: Clock) -> None:
        for name, count in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def work(self) -> None:
        self.clock[self.name] += 1


class Stream(Actor):
    def __init__(self, gpu: SimulatedGpu, name: str) -> None:
        super().__init__(name)
        self._gpu = gpu

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.clock)


class Event:
    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu, self.clock = gpu, Clock()

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)

    def query(self) -> bool:
        known = self._gpu.host.clock
        return all(known.get(name, 0) >= count for name, count in self.clock.items())

    def synchronize(self) -> None:
        self._gpu.waited(self.clock)
