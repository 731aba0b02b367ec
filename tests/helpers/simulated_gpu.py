"""A GPU that is not there: CPU tensors, and a clock for every stream that says what it may touch.

Everything is computed at once and in the order of the host, so that results are the CPU's.  What is
checked is the order that a GPU would have been given.  Each stream and thread of the host has a
vector clock (Mattern 1989): it counts its own work, and knows of others what an event, a wait or
the order of the host has told it.  Work that touches memory has to know of the work that wrote it,
and what writes has to know of all that read; memory that is freed goes back to its stream, and may
not be in use by another one.  As torch's allocators have it, pinned memory may be freed while a
copy is queued.  Besides: host and device memory do not mix in one op, gloo gets none of the
device's and NCCL nothing else, and what the host waits for is noted.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdcompile.cluster import Device
from pdcompile.hardware import devices
from pdcompile.runtime import device as runtime_device
from pdcompile.runtime.device import Deferred, QueuedDevice
from pdcompile.runtime.transport import device_groups
from pdcompile.runtime.transport.launch import World
from tests.helpers.simulated_groups import Gloo, nccl
from tests.helpers.vector_clocks import Actor, Clock, Event, Memory, Stream

GPU = torch.device("cpu", 0)  # as an argument it is another device than "cpu"; tensors are alike
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")
_CROSSES = ("copy_", "_to_copy")
_OWN = ("simulated_gpu.py", "simulated_groups.py", "vector_clocks.py", "contextlib.py")


class SimulatedGpu(TorchDispatchMode):
    """Within it every plan is for GPUs, this process has one, and `QueuedDevice` runs on it.

    `violations`: what was out of order; `waits`: where the main thread waited for the device;
    `forget`: methods of streams and events that do nothing, to see that it is noticed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.violations: list[str] = []
        self.waits: list[str] = []
        self.ops: Counter[str] = Counter()  # by stream
        self.copied_bytes = 0
        self._memory: dict[int, Memory] = {}
        self._threads = threading.local()
        self._numbers: Counter[str] = Counter()
        self._present = self._users = Stream(self, "user")
        self._stack = ExitStack()

    # -- the parts of torch.cuda that are used -------------------------------------------------

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, self.numbered("stream"))

    def Event(self, blocking: bool = False) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self._present

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._present = self._present, stream
        try:
            yield
        finally:
            self._present = before

    # -- who knows what ------------------------------------------------------------------------

    def numbered(self, name: str) -> str:
        self._numbers[name] += 1
        return f"{name} {self._numbers[name]}"

    @property
    def host(self) -> Actor:
        """The thread that runs."""
        if not hasattr(self._threads, "actor"):
            self._threads.actor = Actor(self.numbered("thread"))
        found: Actor = self._threads.actor
        return found

    def waited(self, clock: Clock) -> None:
        """The host has waited for what the clock counts."""
        if threading.current_thread() is threading.main_thread():
            self.waits.append(_place())
        self.host.learn(clock)

    def memory(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        found = self._memory.get(storage._cdata)
        return found if found is not None else self._seen(storage, "host")

    def _seen(self, storage: torch.UntypedStorage, kind: str) -> Memory:
        key = storage._cdata
        found = self._memory[key] = Memory(kind, self._present.clock)
        found.alive = weakref.ref(storage, lambda _: self._freed(self._memory.pop(key)))
        return found

    def _freed(self, memory: Memory) -> None:
        touched = {**memory.read, **({} if memory.wrote is None else dict([memory.wrote]))}
        knows = Actor("")
        # A program begins after what the user has queued, and the user goes on after it.
        for clock in (self.host.clock, memory.owner, self._users.clock, self._present.clock):
            knows.learn(clock)
        # The last to hold what was summed may be a thread of gloo's own, which has done that.
        of_gloo = isinstance(threading.current_thread(), threading._DummyThread)
        for name, count in touched.items():
            gloo = name.startswith("gloo")
            if gloo and of_gloo:
                continue
            held = memory.kind == "device" or (memory.kind == "pinned" and gloo)
            if held and knows.clock.get(name, 0) < count:
                self.violations.append(f"{memory.kind} memory is freed while {name} uses it")

    def touch(self, memory: Memory, actor: Actor, what: str, *, writes: bool) -> None:
        """Someone works with memory, whose clock has counted that."""
        before = dict(memory.read) if writes else {}
        if memory.wrote is not None:
            name, count = memory.wrote
            before[name] = max(count, before.get(name, 0))
        for name, count in before.items():
            if actor.clock.get(name, 0) < count:
                self.violations.append(
                    f"{actor.name} {'writes' if writes else 'reads'} ({what}, {_place()}) without "
                    f"waiting for {name}"
                )
        if writes:
            memory.wrote, memory.read = (actor.name, actor.clock[actor.name]), {}
        else:
            memory.read[actor.name] = actor.clock[actor.name]

    def host_reads(self, tensor: Tensor, what: str) -> None:
        """Python reads numbers of a tensor: of the device it has to wait for them."""
        memory = self.memory(tensor)
        if memory.kind == "device":
            self._present.learn(self.host.clock)
            self.waited(self._present.clock)
        if memory.kind != "host":
            self.host.work()
            self.touch(memory, self.host, what, writes=False)

    # -- every op ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [(x, self.memory(x)) for x in tree_leaves((args, kwargs)) if _plain(x)]
        made = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        device = kwargs.get("device")
        on_device = any(memory.kind == "device" for _, memory in given)
        outputs = [x for x in tree_leaves(made) if _plain(x)]
        fresh = [x for x in outputs if x.untyped_storage()._cdata not in self._memory]
        if _is_view(func) and not fresh:
            return made
        moves = name in _CROSSES and (name == "copy_" or device is not None)
        kind = "device" if on_device and not moves else "host"
        if device is not None and given:
            kind = "host" if device.index is None else "device"
        elif device is not None and device.index is not None:
            kind = "device"
        elif not given and self._present is not self._users and not _of_runtime():
            kind = "device"  # a stage's own, or autograd's
        for one in fresh:
            self._seen(one.untyped_storage(), kind)
        if on_device or kind == "device":
            self._queue(func, name, args, kwargs, given, outputs)
        else:
            self._at_once(func, args, name, given)
        return made

    def _queue(
        self, func: Any, name: str, args: Any, kwargs: Any, given: Any, outputs: list[Tensor]
    ) -> None:
        stream = self._present
        stream.learn(self.host.clock)
        stream.work()
        self.ops[stream.name] += 1
        kinds = {memory.kind for x, memory in given if x.dim() or name in ("cat", "stack")}
        if name in _CROSSES:
            kinds |= {self.memory(x).kind for x in outputs}
            if kinds > {"device"}:
                self.copied_bytes += outputs[0].nbytes
                asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
                if not asynchronous:
                    self.waited(stream.clock)
                elif "host" in kinds:
                    self.violations.append(f"{_place()} copies without waiting, not from pinned")
        elif kinds > {"device"} and (stream is not self._users or _of_runtime()):
            self.violations.append(f"{name} ({_place()}) gets tensors of {' and '.join(kinds)}")
        written = _written(func, args, outputs)
        for _, memory in given:
            if id(memory) not in {id(self.memory(x)) for x in written}:
                self.touch(memory, stream, name, writes=False)
        for one in written:
            self.touch(self.memory(one), stream, name, writes=True)
        if name in _WAITS:
            self.waited(stream.clock)

    def _at_once(self, func: Any, args: Any, name: str, given: Any) -> None:
        pinned = [(x, memory) for x, memory in given if memory.kind == "pinned"]
        if pinned:
            written = {id(self.memory(x)) for x in _written(func, args, [])}
            self.host.work()
            for _, memory in pinned:
                self.touch(memory, self.host, name, writes=id(memory) in written)

    # -- in place of what asks for a GPU -------------------------------------------------------

    def pinned_like(self, tensor: Tensor) -> Tensor:
        found = torch.empty_like(tensor, device="cpu")
        memory = self.memory(found)
        memory.kind, memory.wrote = "pinned", None
        return found

    def pin(self, memory: Tensor) -> None:
        self.memory(memory).kind = "pinned"

    def to_host(self, tensor: Tensor) -> Tensor:
        if self.memory(tensor).kind != "device":
            return tensor
        self.host_reads(tensor, "to_host")
        found = tensor.clone()
        self.memory(found).kind = "host"
        return found

    def __enter__(self) -> SimulatedGpu:
        enter, patch = self._stack.enter_context, mock.patch.object
        self.host.work()
        enter(patch(Device, "on_host", False))
        enter(patch(devices, "gpus", lambda: 8))
        enter(patch(devices, "gpu", lambda _: GPU))
        enter(patch(devices, "on_host", lambda tensor: self.memory(tensor).kind != "device"))
        enter(patch(devices, "to_host", self.to_host))
        enter(patch(runtime_device, "QueuedDevice", lambda device: QueuedDevice(device, self)))
        enter(patch(QueuedDevice, "pinned_like", lambda _, tensor: self.pinned_like(tensor)))
        enter(patch(devices, "pin", self.pin))
        connected = World._connected
        enter(patch(World, "_connected", lambda *given: Gloo(self, connected(*given))))
        enter(patch(device_groups, "connected", partial(nccl, self)))
        enter(patch(torch.distributed, "is_nccl_available", lambda: True))
        for name in ("numpy", "tolist"):
            enter(patch(torch.Tensor, name, _reading(self, name)))
        plain = torch.UntypedStorage.__getitem__
        enter(patch(torch.UntypedStorage, "__getitem__", _indexing(self, plain)))
        self._follow_threads(enter)
        super().__enter__()
        return self

    def _follow_threads(self, enter: Callable[[Any], Any]) -> None:
        """Knowledge of a thread, which goes with what it is given to do, and back to who waits for
        that."""
        made, run, wait = Deferred.__init__, Deferred.run, Deferred.wait

        def init(one: Any, *given: Any) -> None:
            made(one, *given)
            one.known = dict(self.host.clock)

        def running(one: Any) -> None:
            self.host.learn(one.known)
            run(one)

        def waiting(one: Any) -> None:
            work = one._work
            wait(one)
            del work

        def dropping(one: Any, drop: Any = Deferred.drop) -> None:
            one.known = dict(self.host.clock)
            drop(one)

        def waited(one: Any) -> None:
            one.over.wait()
            self.host.learn(one.known)
            waiting(one)

        for name, function in (("__init__", init), ("run", running), ("drop", dropping),
                               ("wait", waited)):  # fmt: skip
            enter(mock.patch.object(Deferred, name, function))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()


def _plain(one: Any) -> bool:
    return isinstance(one, Tensor) and one.layout is torch.strided and not one.is_meta


def _is_view(func: Any) -> bool:
    """Whether it gives another look at memory, and neither reads nor writes it."""
    returns = func._schema.returns
    aliases = [one.alias_info for one in returns if one.alias_info is not None]
    return bool(aliases) and not any(one.is_write for one in aliases)


def _written(func: Any, args: Any, outputs: list[Tensor]) -> list[Tensor]:
    found = list(outputs)
    for one, value in zip(func._schema.arguments, args, strict=False):
        if one.alias_info is not None and one.alias_info.is_write:
            found += [x for x in tree_leaves(value) if _plain(x)]
    return found


def _frames() -> Iterator[tuple[str, str]]:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.endswith(_OWN):
            yield name, frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else ""
        frame = frame.f_back


def _of_runtime() -> bool:
    """Whether the runtime itself makes a tensor, which is on the host unless it says otherwise."""
    name, _ = next(_frames())
    return "/runtime/" in name


def _place() -> str:
    return " < ".join(where for _, where in list(_frames())[:3])


def _reading(gpu: SimulatedGpu, name: str) -> Any:
    plain = getattr(torch.Tensor, name)

    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _plain(self):
            gpu.host_reads(self, name)
        return plain(self, *args, **kwargs)

    return read


def _indexing(gpu: SimulatedGpu, plain: Any) -> Any:
    def read(self: torch.UntypedStorage, index: Any) -> Any:
        memory = gpu._memory.get(self._cdata)
        if memory is not None and memory.kind == "device":
            gpu._present.learn(gpu.host.clock)
            gpu.waited(gpu._present.clock)
        return plain(self, index)

    return read
