"""Packages: which releases of those that are installed fit."""

from __future__ import annotations

import re

from pdcompile.errors import LaunchError

TORCH = ">=2.11,<2.16"  # as pyproject.toml has it: each minor release of these is tested


def in_range(has: str, wanted: str) -> bool:
    """True if a version is within ``>=2.11,<2.16``; of anything else than such bounds it is."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"[0-9]+", text.partition("+")[0])[:3])

    bounds = wanted.split(",")
    above = all(numbers(has) >= numbers(one) for one in bounds if one.startswith(">="))
    below = all(numbers(has) < numbers(one) for one in bounds if re.match("<(?!=)", one))
    return above and below


def check_torch(has: str) -> None:
    """Raises LaunchError where torch is a release that pdcompile is not made for."""
    if not in_range(has, TORCH):
        raise LaunchError(
            f"torch {has} is installed, and pdcompile is made for torch {TORCH}",
            remedy=f"pip install 'torch{TORCH}'",
        )
