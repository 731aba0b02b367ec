"""Process groups of a GPU that is not there: they note which memory they get, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from pdcompile.releases.torch_internals import gloo_options
from tests.helpers.vector_clocks import Actor, Clock, Stream

if TYPE_CHECKING:
    from tests.helpers.simulated_gpu import SimulatedGpu


class Gloo:
    """A gloo group that looks at the memory that it gets."""

    def __init__(self, gpu: SimulatedGpu, group: Any) -> None:
        self._gpu, self._group = gpu, group

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._work(tensors, self._group.send(tensors, peer, tag), writes=False)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._work(tensors, self._group.recv(tensors, peer, tag), writes=True)

    def allreduce(self, tensors: list[Tensor]) -> Any:
        return self._work(tensors, self._group.allreduce(tensors), writes=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _work(self, tensors: list[Tensor], work: Any, *, writes: bool) -> Any:
        gpu, memory = self._gpu, self._gpu.memory(tensors[0])
        if memory.kind == "device":
            gpu.violations.append("gloo gets memory of the device")
        actor = Actor(gpu.numbered("gloo"))
        actor.learn(gpu.host.clock)
        actor.work()
        if memory.kind == "pinned":
            gpu.touch(memory, actor, "gloo", writes=writes)
        return Work(gpu, work, {actor.name: 1})


class Nccl:
    """A NCCL group: a stream of its own, whose work is that of a gloo group."""

    def __init__(self, gpu: SimulatedGpu, group: Any) -> None:
        self._gpu, self._group = gpu, group
        self._stream, self._program = Stream(gpu, gpu.numbered("nccl")), gpu.host

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        assert tag == 0
        self._queue(tensors, writes=False)
        return self._work(self._group.send(tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        assert tag == 0
        self._queue(tensors, writes=True)
        return self._work(self._group.recv(tensors, peer, tag))

    def allreduce(self, tensors: list[Tensor]) -> Any:
        self._queue(tensors, writes=True)
        return self._work(self._group.allreduce(tensors))

    def abort(self) -> None:
        """Whatever of its work the program has not seen the end of is lost, here and at its peers;
        a thread of its own calls this."""
        stream, self._group = self._stream, None
        if self._program.clock.get(stream.name, 0) < stream.clock[stream.name]:
            self._gpu.violations.append(f"a group is freed while {stream.name} has work")

    def _queue(self, tensors: list[Tensor], *, writes: bool) -> None:
        """It begins after what the present stream has queued."""
        gpu, memory = self._gpu, self._gpu.memory(tensors[0])
        if memory.kind != "device":
            gpu.violations.append(f"NCCL gets memory of the {memory.kind}")
        gpu._present.learn(gpu.host.clock)
        self._stream.learn(gpu._present.clock)
        self._stream.work()
        gpu.ops["nccl"] += 1
        gpu.touch(memory, self._stream, "nccl", writes=writes)

    def _work(self, work: Any) -> Any:
        return QueuedWork(self._gpu, work, dict(self._stream.clock))


class QueuedWork:
    def __init__(self, gpu: SimulatedGpu, work: Any, clock: Clock) -> None:
        self._gpu, self._work, self._clock = gpu, work, clock

    def wait(self) -> None:
        """The present stream waits, and the host goes on."""
        self._work.wait()
        self._gpu._present.learn(self._clock)


def nccl(
    gpu: SimulatedGpu, store: Any, rank: int, ranks: tuple[int, ...], _: Any, timeout: Any
) -> Nccl:
    options = gloo_options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return Nccl(gpu, dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), options))


class Work:
    def __init__(self, gpu: SimulatedGpu, work: Any, clock: Clock) -> None:
        self._gpu, self._work, self._clock = gpu, work, clock

    def wait(self) -> None:
        self._work.wait()
        self._gpu.host.learn(self._clock)
