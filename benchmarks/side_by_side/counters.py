"""What a process has sent, and the most that it held."""

from __future__ import annotations

import gc
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

_BYTES_SENT = 200  # where struct tcp_info has tcpi_bytes_sent, and after it tcpi_bytes_retrans
_INFO_BYTES = 216
TRAINING = "training"  # from the first call on


def socket_bytes() -> int:
    """Bytes that this process has put on its open TCP connections, as the kernel counts them."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with one:
            inet = one.family in (socket.AF_INET, socket.AF_INET6)
            if inet and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) >= _INFO_BYTES:
                    sent, sent_again = struct.unpack_from("2Q", info, _BYTES_SENT)
                    found += sent - sent_again
    return found


def interface_bytes(interface: str) -> int:
    """Bytes that this network namespace has sent on an interface, headers and all."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise ValueError(f"no interface {interface!r} in /proc/self/net/dev")


class Peak:
    """The most bytes that torch's CPU allocator had given out at one time, since training began."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def read(self, seen: profile) -> None:
        assert seen.profiler is not None
        events = sorted(seen.profiler.kineto_results.events(), key=lambda one: one.start_ns())
        now, trains = 0, False
        for event in events:
            trains = trains or event.name() == TRAINING
            if event.name() == "[memory]":
                now += event.nbytes()
            if trains:
                self.num_bytes = max(self.num_bytes, now)


@contextmanager
def peak_memory() -> Iterator[tuple[Peak, Callable[[], record_function]]]:
    """Around what makes a model and trains it: a peak, filled in at the end, and the mark of the
    training, a context manager.  Weights count, and so does what kernels allocate inside."""
    gc.collect()
    found = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:

        def training() -> record_function:
            gc.collect()
            return record_function(TRAINING)

        yield found, training
    found.read(seen)
