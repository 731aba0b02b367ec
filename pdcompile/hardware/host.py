"""One host: memory, cores, disk and network interfaces, as its system tells them.  No torch."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
NETWORK = Path("/sys/class/net")
NO_LIMIT = 1 << 60  # bytes; systems write such numbers for none


def memory_bytes() -> int | None:
    """Memory that processes of this host may use: its own, or the limit of their container if that
    is less; None where the system does not say."""
    found = [limit for limit in (_physical(), _limit()) if limit is not None]
    return min(found, default=None)


def free_bytes() -> int | None:
    """Memory that new processes can have now; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    values = {line.split(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    here = values.get("MemAvailable", "")
    free = int(here) * 1024 if here.isdecimal() else None
    limit, used = _limit(), _number(CGROUP / "memory.current")
    if free is None or limit is None or used is None:
        return free
    return max(0, min(free, limit - used))


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def disk_bytes(path: str | os.PathLike[str] = ".") -> int | None:
    """Free bytes of the disk that a path is on."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def interfaces() -> dict[str, str]:
    """Network interfaces, each with what is known of it: up or down, and its rate if it has one."""
    found = {}
    for _, name in socket.if_nameindex():
        state = _text(NETWORK / name / "operstate") or "unknown"
        rate = _number(NETWORK / name / "speed")
        found[name] = state + (f", {rate} Mbit/s" if rate and rate > 0 else "")
    return found


def own_address() -> str | None:
    """The address that this host's own name stands for; None where it stands for none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _limit() -> int | None:
    """Limit of the control group, in its newer or its older form."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        found = _number(CGROUP / name)
        if found is not None and found < NO_LIMIT:
            return found
    return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
