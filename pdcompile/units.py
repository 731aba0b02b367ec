"""Bytes, rates and seconds as people write them: ``80 GB``, ``25 Gbit/s``, ``5 us``.

Decimal prefixes are powers of 1000 (``kB``, ``MB``, ``GB``), binary ones of 1024 (``KiB``,
``MiB``, ``GiB``).  `format_*` rounds for a reader; `exact_*` gives a text that parses back to
the same number, for files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from pdcompile.errors import ConfigError

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

# Exact fractions: "5 us" is the float nearest to 0.000005.
BYTES = {f"{prefix}B": Fraction(factor) for prefix, factor in (_DECIMAL | _BINARY).items()}
RATES = {f"{unit}/s": factor for unit, factor in BYTES.items()} | {
    f"{prefix}bit/s": Fraction(factor, 8) for prefix, factor in _DECIMAL.items()
}
SECONDS = {unit: Fraction(1, 1000**i) for i, unit in enumerate(("s", "ms", "us", "ns"))}

_NUMBER = re.compile(
    r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-zµ/]*)\s*", re.ASCII
)
_SYNONYMS = {"byte": "B", "bytes": "B", "KB": "kB", "KB/s": "kB/s", "Kbit/s": "kbit/s", "µs": "us"}
MOST = 2**62  # bytes or seconds: their squares are finite floats


def parse_bytes(value: float | str, *, what: str = "size", where: str | None = None) -> int:
    """Bytes of ``80 GB``, ``7.45 GiB``, ``4096 B`` or a plain whole number (bytes), also 16e9; of a
    text a fraction of a byte is rounded down.

    Raises:
        ConfigError: no such unit, negative, not finite, or a number that is not whole.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < 0 or value != value or value // 1 != value:
            raise _wrong(value, what, BYTES, where)
        if value > MOST:
            raise _too_large(f"of {int(value).bit_length()} bits", what, where)
        return int(value)
    return int(_parse(value, BYTES, what, where))


def parse_rate(value: int | float | str, *, what: str = "rate", where: str | None = None) -> float:
    """Bytes per second of ``100 GB/s``, ``25 Gbit/s``, ``1 GiB/s`` or a plain number."""
    return _scalar(value, RATES, what, where)


def parse_seconds(
    value: int | float | str, *, what: str = "time", where: str | None = None
) -> float:
    """Seconds of ``5 us``, ``1.5 ms``, ``2 s`` or a plain number."""
    return _scalar(value, SECONDS, what, where)


def format_bytes(count: float) -> str:
    """Three digits for a reader: ``1.50 GB``."""
    return _format(count, [(f"{prefix}B", float(one)) for prefix, one in _DECIMAL.items()])


def format_rate(bytes_per_second: float) -> str:
    """Three digits for a reader: ``12.5 GB/s``."""
    return "unlimited" if math.isinf(bytes_per_second) else format_bytes(bytes_per_second) + "/s"


def format_count(count: float) -> str:
    """A whole number, or two digits of a small one: ``1,204``, ``0.12``."""
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


def format_flops(count: float) -> str:
    """Three digits for a reader: ``6.44 GFLOP``."""
    return _format(count, [(f"{prefix}FLOP", float(one)) for prefix, one in _DECIMAL.items()])


def format_seconds(seconds: float) -> str:
    """Three digits for a reader: ``1.25 ms``."""
    return _format(seconds, [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)])


def three_digits(count: int, *, up: bool = True) -> tuple[int, str]:
    """(bytes rounded up or down to three digits, a text that `parse_bytes` reads back)."""
    step = 10 ** max(0, len(str(count)) - 3)
    rounded = (-(-count // step) if up else count // step) * step
    prefix = max((p for p, f in _DECIMAL.items() if f <= max(rounded, 1)), key=_DECIMAL.__getitem__)
    return rounded, f"{rounded / _DECIMAL[prefix]:.3g} {prefix}B"


def exact_bytes(count: int) -> str:
    """A text that `parse_bytes` reads back: the largest unit that divides."""
    decimal = [(factor, f"{prefix}B") for prefix, factor in _DECIMAL.items()]
    binary = [(factor, f"{prefix}B") for prefix, factor in _BINARY.items()]
    factor, unit = max((f, u) for f, u in decimal + binary if count % f == 0)
    return f"{count // factor} {unit}" if count else "0 B"


def exact_rate(bytes_per_second: float) -> str:
    """A text that `parse_rate` reads back exactly."""
    return _exact(bytes_per_second, ("GB/s", "MB/s", "kB/s", "B/s"), RATES)


def exact_seconds(seconds: float) -> str:
    """A text that `parse_seconds` reads back exactly."""
    return _exact(seconds, ("us", "ms", "s"), SECONDS)


def _parse(value: object, units: Mapping[str, Fraction], what: str, where: str | None) -> Fraction:
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _wrong(value, what, units, where)
    unit = _SYNONYMS.get(match[2], match[2])
    if unit not in units:
        raise _wrong(value, what, units, where)
    try:
        result = Fraction(match[1]) * units[unit]
    except ValueError:  # more digits than Python converts
        raise _too_large(f"{match[1][:20]}…", what, where) from None
    if result > (10**300 if units is RATES else MOST):
        raise _too_large(value, what, where)
    return result


def _scalar(value: object, units: Mapping[str, Fraction], what: str, where: str | None) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value < math.inf:
            raise _wrong(value, what, units, where)
        if value > (10**300 if units is RATES else MOST):
            raise _too_large(f"of {int(value).bit_length()} bits", what, where)
        return float(value)
    return float(_parse(value, units, what, where))


def _too_large(value: object, what: str, where: str | None) -> ConfigError:
    return ConfigError(
        f"{what} {value!r} is too large", where=where, remedy="look at the unit and the exponent"
    )


def _wrong(
    value: object, what: str, units: Mapping[str, Fraction], where: str | None
) -> ConfigError:
    return ConfigError(
        f"{what} {value!r} is not a non-negative number with a unit",
        where=where,
        remedy=f"write a number and one of {', '.join(units)}",
    )


def _format(number: float, units: list[tuple[str, float]]) -> str:
    if not math.isfinite(number):
        return str(number)
    if number == 0:
        return f"0 {'s' if units[-1][0] == 's' else units[0][0]}"
    unit, factor = next(((u, f) for u, f in reversed(units) if abs(number) / f >= 0.9995), units[0])
    scaled = number / factor
    if abs(scaled) >= 999.5 or (factor == 1.0 and unit != "s" and scaled == int(scaled)):
        return f"{scaled:.0f} {unit}"
    digits = max(0, 2 - math.floor(math.log10(abs(scaled)))) if scaled else 0
    return f"{scaled:.{min(digits, 2)}f} {unit}"


def _exact(number: float, choices: tuple[str, ...], units: Mapping[str, Fraction]) -> str:
    for unit in choices if number else ():
        scaled = float(f"{number / float(units[unit]):.12g}")
        text = f"{scaled:.12g} {unit}"
        if 1e-3 <= scaled < 1e6 and _scalar(text, units, "number", None) == number:
            return text
    return f"{number!r} {choices[-1]}" if number else f"0 {choices[-1]}"
