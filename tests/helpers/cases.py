"""Cases of parametrized tests, of which the fast run takes some."""

from __future__ import annotations

from typing import Any

import pytest


def case(fast: bool, *values: Any, id: str | None = None) -> Any:
    """One of the fast tests where that is so, else of the slow ones."""
    return pytest.param(*values, id=id, marks=() if fast else pytest.mark.slow)
