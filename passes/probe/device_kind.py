"""The kind of a device, as clusters and cost models name it, by the name that its driver tells."""

from __future__ import annotations

import re

#: words of a driver's name -> kind; the first row whose words are all there holds
_ROWS = (
    (("h200",), "h200"), (("h100",), "h100"), (("a100", "80gb"), "a100-80"),
    (("a100",), "a100-40"), (("v100",), "v100"), (("a10g",), "a10g"), (("a10",), "a10"),
    (("l40s",), "l40s"), (("l4",), "l4"), (("t4",), "t4"), (("4090",), "rtx-4090"),
    (("3090",), "rtx-3090"),
)  # fmt: skip


def kind_of_name(name: str) -> str:
    """``NVIDIA A100-SXM4-80GB`` → ``a100-80``; a name that is not known, in small letters."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    for wanted, kind in _ROWS:
        if words.issuperset(wanted):
            return kind
    return "-".join(re.findall(r"[a-z0-9]+", name.lower())) or "device"
