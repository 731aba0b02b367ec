"""Shows an error that several ranks end with once, by one of them."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

from pdcompile.runtime.failure.watchdog import end_by_sigterm

SETTLE_SECONDS = 0.5  # in which other ranks come to the same error
_CONNECT_SECONDS = 2.0
_KEY = "errors"


class _Entry(NamedTuple):
    """An error that a rank ends with; `derived`: it says that another rank failed first."""

    rank: int
    derived: bool
    digest: str


@contextmanager
def _without_sigterm() -> Iterator[None]:
    """torchrun's SIGTERM, which comes as soon as one rank has ended, has to wait till the end."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if came:
            end_by_sigterm()


@_without_sigterm()
def show_once(text: str, show: Callable[[bool], None], *, derived: bool) -> tuple[int, ...]:
    """Show an error, unless another rank has shown the same; `show` is told whether it is the first
    one of all.

    One that is `derived` from another rank's is shown only where none shows its own.  Waits a
    moment for others, since torchrun ends all ranks as soon as one has ended.  In the main thread.

    Returns:
        Other ranks that end with this error, where it was shown by this one.
    """
    own = _Entry(int(os.environ["RANK"]), derived, hashlib.sha256(text.encode()).hexdigest())
    try:
        board = _board()
        board.append(_KEY, f"{own.rank} {derived:d} {own.digest}\n")
        deadline, size = time.monotonic() + SETTLE_SECONDS, int(os.environ["WORLD_SIZE"])
        while len(rows := board.get(_KEY).splitlines()) < size and time.monotonic() < deadline:
            time.sleep(0.02)  # till all ranks have one, or for a moment
    except (OSError, RuntimeError):  # there is no store, or it went with torchrun
        show(True)
        return ()
    lines = (row.decode().split() for row in rows)
    found = [_Entry(int(rank), derived == "1", digest) for rank, derived, digest in lines]
    same = [one.rank for one in found if one.digest == own.digest]
    first = next((one for one in found if not one.derived), found[0])
    if same[0] != own.rank or (derived and not first.derived):
        return ()
    show(own == first)
    return tuple(sorted({*same} - {own.rank}))


def _board() -> Any:
    """torchrun's own store, which outlives the ranks, with keys of this start of theirs.

    Raises OSError or RuntimeError where there is none.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise OSError("the store is in a rank's process")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=_CONNECT_SECONDS)
    with socket.create_connection((address, port), _CONNECT_SECONDS):
        pass  # torch would write pages of a store that is not there
    start = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    return PrefixStore(
        f"pdcompile/{'/'.join(start)}", TCPStore(address, port, is_master=False, timeout=wait)
    )
