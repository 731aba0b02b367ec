"""Names of ops and inputs: valid Python identifiers, whatever the model's names are."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

_TAKEN = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins)} | {
    "self", "torch", "nn", "F", "operator", "math", "draw", "loss",
}  # fmt: skip


class Names:
    """Makes unique identifiers that are not in `used`."""

    def __init__(self, used: Iterable[str] = ()) -> None:
        self._next: dict[str, int] = {}
        self._used = set(used)

    def new(self, text: str) -> str:
        """An unused identifier that reads like `text`."""
        base = re.sub(r"[^0-9a-zA-Z]+", "_", text).strip("_") or "value"
        if base[0].isdigit():
            base = f"_{base}"
        if base not in _TAKEN and base not in self._used:
            self._used.add(base)
            return base
        while True:
            self._next[base] = self._next.get(base, 0) + 1
            name = f"{base}_{self._next[base]}"
            if name not in self._used:
                self._used.add(name)
                return name
