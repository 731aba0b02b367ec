"""Autocast regions as text: ``cpu:bfloat16``, or ``cpu:off`` where one is switched off in another.

Ops, plans and JSON hold the text; only this file makes and reads it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pdcompile.errors import ConfigError

OFF = "off"
_DTYPES = ("bfloat16", "float16")


def autocast_text(given: Any, device: str = "cpu") -> str | None:
    """The text for the option ``autocast=``: a dtype, its name, or a ``torch.autocast`` object.

    Args:
        device: kind of the device that the model runs on; a torch.autocast object has its own.

    Raises:
        ConfigError: it is none of these, or a dtype that autocast does not have.
    """
    if given is None:
        return None
    if hasattr(given, "fast_dtype") and hasattr(given, "device"):
        if not getattr(given, "_enabled", True):
            return None
        if not getattr(given, "_cache_enabled", True):
            raise ConfigError(
                "autocast without its cache (cache_enabled=False) is not available",
                remedy="leave cache_enabled out: weights are then cast once a microbatch",
            )
        given, device = given.fast_dtype, str(given.device)
    name = given if isinstance(given, str) else str(given)
    name = name.removeprefix("torch.")
    if device in ("cpu", "cuda") and name.startswith(f"{device}:"):
        name = name.removeprefix(f"{device}:")
    if name not in _DTYPES:
        raise ConfigError(
            f"autocast={given!r} is not a dtype of an autocast region",
            remedy="None, 'bfloat16', torch.bfloat16, torch.float16, or torch.autocast(…)",
        )
    return f"{device}:{name}"


def autocast_region(text: str | None) -> AbstractContextManager[Any]:
    """The context manager for a text; an empty one for None."""
    if text is None:
        return nullcontext()
    import torch

    device, _, dtype = text.rpartition(":")
    if dtype == OFF:
        return torch.autocast(device or "cpu", enabled=False)
    return torch.autocast(device or "cpu", dtype=getattr(torch, dtype))
