"""Kinds of devices by their data sheets, and what people and drivers call them.

Peak rates are those of the makers, dense, in units of 1e12 operations a second: float32 without
tensor cores (what torch does unless told otherwise), half precision with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Sheet(NamedTuple):
    """A device by its data sheet; a rate of 0: the device computes that dtype as float32."""

    float32_tera: float
    float16_tera: float
    bfloat16_tera: float
    float64_tera: float
    memory_gigabytes_per_second: float
    host_gigabytes_per_second: float  # of a copy to or from its host: PCIe 3, 4 or 5 on 16 lanes
    words: tuple[str, ...]  # of a driver's name


SHEETS = {  # float32, float16, bfloat16, float64; memory; host
    "v100": Sheet(15.7, 125, 0, 7.8, 900, 12, ("v100",)),
    "t4": Sheet(8.1, 65, 0, 0.25, 320, 12, ("t4",)),
    "a10": Sheet(31.2, 125, 125, 0.49, 600, 25, ("a10",)),
    "a10g": Sheet(35, 70, 70, 0.55, 600, 25, ("a10g",)),
    "l4": Sheet(30.3, 121, 121, 0.47, 300, 25, ("l4",)),
    "l40s": Sheet(91.6, 362, 362, 1.4, 864, 25, ("l40s",)),
    "rtx-3090": Sheet(35.6, 71, 71, 0.56, 936, 25, ("3090",)),
    "rtx-4090": Sheet(82.6, 165, 165, 1.3, 1008, 25, ("4090",)),
    "a100-40": Sheet(19.5, 312, 312, 9.7, 1555, 25, ("a100",)),
    "a100-80": Sheet(19.5, 312, 312, 9.7, 2039, 25, ("a100", "80gb")),
    "h100": Sheet(67, 989, 989, 34, 3350, 50, ("h100",)),
    "h200": Sheet(67, 989, 989, 34, 4800, 50, ("h200",)),
}


HOST_BYTES_PER_SECOND = 12e9  # of a GPU of which nothing is known


def host_bytes_per_second(kind: str) -> float:
    """Rate of copies between a GPU of this kind and its host."""
    sheet = SHEETS.get(kind)
    return sheet.host_gigabytes_per_second * 1e9 if sheet else HOST_BYTES_PER_SECOND


def misspelt(kind: str, host: str, gpu: str) -> Iterator[tuple[str, str]]:
    """Message and remedy for another spelling of a kind that is known, and for an empty one.

    `host` and `gpu`: what the CPU, and a GPU of which nothing is known, are called.
    """
    kinds = (host, gpu, *SHEETS)
    if kind in kinds:
        return
    known = f"known are {', '.join(kinds)}"
    if not kind.strip():
        message = f"the device kind is {kind!r}, which names none"
        yield message, f"leave it out for {host!r}; {known}"
    of_torch = {"gpu": gpu, **{name: name for name in kinds}}
    named = of_torch.get(kind.strip().lower().partition(":")[0])
    if meant := (named,) if named else meant_by(kind):
        names = " or ".join(map(repr, meant))
        yield f"there is no device kind {kind!r}", f"did you mean {names}? {known}"


def kind_of_name(name: str) -> str:
    """``NVIDIA A100-SXM4-80GB`` → ``a100-80``; a name that is not known, in small letters."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    fitting = [kind for kind, sheet in SHEETS.items() if set(words).issuperset(sheet.words)]
    unknown = "-".join(words) or "device"
    return max(fitting, key=lambda kind: len(SHEETS[kind].words), default=unknown)


def meant_by(kind: str) -> tuple[str, ...]:
    """Kinds that one without a data sheet is another spelling of: ``A100`` may be ``a100-40`` or
    ``a100-80``."""

    def plain(name: str) -> str:
        return "".join(re.findall(r"[a-z0-9]+", name.lower()))

    for spelt in (plain, lambda name: plain(name.partition("-")[0])):
        if found := tuple(one for one in SHEETS if spelt(one) == plain(kind)):
            return found
    named = kind_of_name(kind)
    return (named,) if named in SHEETS else ()
