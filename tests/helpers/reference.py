"""The folder of other people's problems that tests read, and never copy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DEFAULT = Path(__file__).parents[2].parent / "shared" / "reference"


def folder(name: str) -> Path:
    """Folder `name` of the reference data; skips the test where there is none."""
    found = Path(os.environ.get("PDCOMPILE_REFERENCE", DEFAULT)) / name
    if not found.is_dir():
        pytest.skip(f"no reference data at {found}; set PDCOMPILE_REFERENCE to its folder")
    return found
