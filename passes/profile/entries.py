"""A profile as data: measured costs by structural key, and the machine they belong to.

Ops with equal keys do the same work on equal operands, and are measured once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdcompile.errors import CostError

# Of an entry.
SECONDS = ("forward_seconds", "backward_seconds", "forward_dispatch_seconds",
           "backward_dispatch_seconds")  # fmt: skip
_AGAIN = 'measure again (costs="measured"), or use costs="estimated"'


@dataclass(frozen=True, slots=True)
class Entry:
    """Measured seconds of one kind of op; of a GPU also those of the host to queue it there.

    Of a compiled stage also what one microbatch keeps for its backward.
    """

    key: str
    target: str  # for the reader
    forward_seconds: float
    backward_seconds: float = 0.0
    forward_dispatch_seconds: float = 0.0
    backward_dispatch_seconds: float = 0.0
    saved_bytes: int = field(default=0, kw_only=True)  # of a compiled stage


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of one machine at one microbatch size; a GPU's has its name as `device`."""

    torch_version: str
    device: str
    microbatch_size: int
    entries: tuple[Entry, ...]

    def check(self, **here: str | int) -> None:
        """Raises CostError where an entry cannot be, or a field is another one `here`."""
        validate(self.entries, "costs")
        for name, own in here.items():
            if (there := getattr(self, name)) != own:
                raise CostError(
                    f"the profile is stale: its {name} is {there}, here it is {own}",
                    remedy=_AGAIN,
                )


def validate(entries: Sequence[Entry], where: str) -> None:
    """Raises CostError for what is no number of seconds, and repeated keys."""
    seen: set[str] = set()
    for i, entry in enumerate(entries):
        place = f"{where}: entries[{i}] ({entry.target})"
        if entry.key in seen:
            raise CostError(f"key {entry.key!r} appears twice", where=place, remedy="remove one")
        seen.add(entry.key)
        for name in (*SECONDS, "saved_bytes"):
            if not 0 <= getattr(entry, name) < math.inf:
                raise CostError(
                    f"{name} is negative or not finite",
                    where=place,
                    remedy="costs are 0 or more",
                )
