"""Measured times that outlive the process: one file a graph, in the user's cache folder.

A file is found by the digest of what it depends on (the graph's structural keys, torch, the
processor, the number of threads, the microbatch size) and says it again inside.  What does not
agree, or cannot be read, is measured again: nothing in the folder is trusted, and no error in it
stops a compilation.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pdcompile import jsonio
from pdcompile.errors import CostError
from pdcompile.files import cache_folder, read_limited, write_whole
from pdcompile.ir.graph import Op
from pdcompile.passes.profile.entries import Entry, validate

if TYPE_CHECKING:
    import torch

SCHEMA = "pdcompile.cached-profile/4"
# Where the same name means the same work, as long as torch is the same; a user's own function
# or module may have been edited since, and is measured every time.
LASTING = ("torch.", "operator.", "math.", "builtins.")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything besides the ops that times depend on."""

    torch_version: str
    device: str
    device_kind: str  # the processor's own name, or a GPU's and how it multiplies
    num_threads: int
    microbatch_size: int

    @staticmethod
    def here(device: torch.device, microbatch_size: int) -> Environment:
        """The environment of this process."""
        import torch

        from pdcompile.hardware import devices

        kind = processor() if devices.is_host(device) else devices.name_and_modes(device)
        threads = torch.get_num_threads()
        return Environment(torch.__version__, device.type, kind, threads, microbatch_size)


@dataclass(frozen=True, slots=True)
class Cached:
    """A file of the cache; `measured` is a date and time in UTC."""

    environment: Environment
    entries: tuple[Entry, ...]
    measured: str
    schema: str = SCHEMA


def lasting(op: Op) -> bool:
    """True if the op's name, operands and torch's version settle what it does."""
    if op.kind in ("method", "getattr"):
        return True
    own = op.target.startswith("torch.ops.") and not op.target.startswith("torch.ops.aten.")
    return op.kind != "opaque" and op.target.startswith(LASTING) and not own


def load(environment: Environment, keys: Iterable[str]) -> Cached | None:
    """Reads what was measured for these keys in this environment; None without a valid file."""
    wanted = set(keys)
    path = _path(environment, wanted)
    if path is None or not path.is_file():
        return None
    try:
        data = jsonio.loads(read_limited(path), where=str(path), error=CostError)
        found = jsonio.decode(Cached, data, where=str(path), error=CostError)
        validate(found.entries, str(path))
    except (CostError, OSError) as error:
        _LOG.warning("a cached profile is unreadable; measuring again: %s", error)
        return None
    theirs, ours = (found.schema, found.environment), (SCHEMA, environment)
    if theirs != ours or {entry.key for entry in found.entries} - wanted:
        _LOG.warning(
            "a cached profile has another environment or other ops; measuring again: %s", path
        )
        return None
    return found


def save(environment: Environment, keys: Iterable[str], entries: Iterable[Entry]) -> None:
    """Keeps measurements for the next process, all or nothing; a log line when that fails."""
    path = _path(environment, keys)
    if path is None:
        return
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = jsonio.dumps(Cached(environment, tuple(entries), now))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        _LOG.info("the profile is not cached: %s", error)


def processor() -> str:
    """The CPU's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _path(environment: Environment, keys: Iterable[str]) -> Path | None:
    root = cache_folder()
    if root is None:
        return None
    text = "\n".join((SCHEMA, str(environment), *sorted(set(keys))))
    return root / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
