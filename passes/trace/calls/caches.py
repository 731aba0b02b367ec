"""Empties functools caches that a recording filled with its fake tensors."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_OTHERS = ("torch", "pdcompile", "functools", "inspect", "re", "typing")
_CACHE: Any = type(functools.lru_cache(maxsize=1)(len))


def caches() -> list[Any]:
    """All functions of this process that functools.lru_cache or cache wraps."""
    # Twice as fast as looking at the types of all objects: an object refers to its type.
    return [found for found in gc.get_referrers(_CACHE) if type(found) is _CACHE]


@contextmanager
def emptied(known: list[Any]) -> Iterator[None]:
    """Clears the caches among `known` that were filled inside.

    Otherwise a helper that caches a tensor (an index of relative positions) would return the fake
    of one recording to the next one, and to the user's own calls.
    """
    before = [cache.cache_info().misses for cache in known]
    try:
        yield
    finally:
        for cache, misses in zip(known, before, strict=True):
            if cache.cache_info().misses != misses and _is_user(cache):
                cache.cache_clear()


def _is_user(cache: Any) -> bool:
    home = str(getattr(cache, "__module__", "")).split(".")
    # A logging module caches which messages the user has seen (warning_once).
    return home[-1] != "logging" and home[0] not in _OTHERS
