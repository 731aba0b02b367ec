"""A profile as data: measured costs by structural key, and the machine they belong to.

Ops with equal keys do the same work on equal operands, and are measured once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdcompile import jsonio
from pdcompile.errors import CostError, os_errors_as
from pdcompile.files import read_limited, write_whole

SCHEMA = "pdcompile.profile/3"
# Of an entry.
SECONDS = ("forward_seconds", "backward_seconds", "forward_dispatch_seconds",
           "backward_dispatch_seconds")  # fmt: skip
_AGAIN = 'measure again (costs="measured"), or use costs="estimated"'


@dataclass(frozen=True, slots=True)
class Entry:
    """Measured seconds of one kind of op; of a GPU also those of the host to queue it there."""

    key: str
    target: str  # for the reader
    forward_seconds: float
    backward_seconds: float = 0.0
    forward_dispatch_seconds: float = 0.0
    backward_dispatch_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of one machine at one microbatch size; a GPU's has its name as `device`."""

    torch_version: str
    device: str
    microbatch_size: int
    entries: tuple[Entry, ...]
    schema: str = SCHEMA

    def to_json(self) -> str:
        """Readable strict JSON, the inverse of `from_json`."""
        return jsonio.dumps(self)

    @staticmethod
    def from_json(text: str | bytes, where: str = "profile.json") -> Profile:
        """Reads a profile; raises CostError for anything else: NaN, repeated keys, …"""
        data = jsonio.loads(text, where=where, error=CostError, remedy=_AGAIN)
        found = jsonio.decode(Profile, data, where=where, error=CostError)
        if found.schema != SCHEMA:
            raise CostError(
                f"schema {found.schema!r} is not supported",
                where=where,
                remedy=f"this version reads {SCHEMA!r}: measure again",
            )
        if found.microbatch_size < 1:
            raise CostError(
                f"microbatch_size is {found.microbatch_size}; expected at least 1",
                where=where,
                remedy=_AGAIN,
            )
        validate(found.entries, where)
        return found

    def save(self, path: str | Path) -> None:
        """Writes to a file, all or nothing.  Raises CostError when it cannot be written."""
        with os_errors_as(CostError, "cannot write the profile", path, "choose another place"):
            write_whole(Path(path), self.to_json().encode())

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Reads a file; raises CostError when it cannot be read or does not hold a profile."""
        with os_errors_as(
            CostError, "cannot read the profile", path, 'costs="measured" needs no file'
        ):
            text = read_limited(path)
        return Profile.from_json(text, where=str(path))

    def check(self, *, torch_version: str, device: str, microbatch_size: int) -> None:
        """Raises CostError when it was measured elsewhere: it would rank ops wrongly."""
        for name, here in (
            ("torch_version", torch_version),
            ("device", device),
            ("microbatch_size", microbatch_size),
        ):
            there = getattr(self, name)
            if there != here:
                raise CostError(
                    f"the profile is stale: its {name} is {there}, here it is {here}",
                    remedy=_AGAIN,
                )


def validate(entries: Sequence[Entry], where: str) -> None:
    """Raises CostError for negative numbers and repeated keys."""
    seen: set[str] = set()
    for i, entry in enumerate(entries):
        place = f"{where}: entries[{i}] ({entry.target})"
        if entry.key in seen:
            raise CostError(f"key {entry.key!r} appears twice", where=place, remedy="remove one")
        seen.add(entry.key)
        for name in SECONDS:
            if getattr(entry, name) < 0:
                raise CostError(
                    f"{name} is negative", where=place, remedy="costs are 0 seconds or more"
                )
