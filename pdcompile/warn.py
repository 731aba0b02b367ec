"""Warnings at a line of the user's code, each shown once."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

_BETWEEN = ("torch", "typer", "click")  # packages whose frames lie between the user's and ours
_SPECS = [find_spec(name) for name in _BETWEEN]
_FILES = (__file__, *(spec.origin for spec in _SPECS if spec is not None and spec.origin))
FOLDERS = tuple(f"{Path(file).parent}/" for file in _FILES)  # ours is the first
_BETWEEN_FILES = (*FOLDERS, warnings.__file__)
_SIZES = re.compile(r"\[[\d, ]+\]")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither ours nor torch's."""
    frame = _of_user()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _of_user() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN_FILES):
        frame = frame.f_back
    return frame


@contextmanager
def each_once() -> Iterator[None]:
    """Shows a warning once for each place, while the context lasts.

    Python itself forgets what it has shown whenever filters change, which torch does on many
    calls, and a model is called many times before it is captured.  Sizes in a text make no other
    warning, and what torch warns of below a line of ours or of a stage is shown at the user's.
    """
    seen: set[tuple[str, type[Warning], str, int]] = set()
    told: set[tuple[str, type[Warning]]] = set()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def first(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            *rest: Any,
            **named: Any,
        ) -> None:
            text, place = _SIZES.sub("[]", str(message)), (filename, lineno)
            if below := filename.startswith((*FOLDERS, "<pdcompile")):
                frame = _of_user()
                place = place if frame is None else (frame.f_code.co_filename, frame.f_lineno)
            key = (text, category, *place)
            if key not in seen and not (below and (text, category) in told):
                seen.add(key)
                told.add((text, category))
                filename, lineno = place
                show(message, category, filename, lineno, *rest, **named)

        warnings.showwarning = first
        yield
