"""What holds for all tests: none reads or writes the user's cache of measured times.

Processes that tests start inherit it.  A test of the cache itself names a folder of its own.
Where slow tests are left out (`-m "not slow"`), properties are tried on fewer examples.
"""

from __future__ import annotations

import os

import hypothesis
import pytest

os.environ["PDCOMPILE_CACHE"] = "off"
# Several workers share the cores: threads that wait for each other would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

FEW_EXAMPLES = 25
_SETTINGS = "_hypothesis_internal_use_settings"  # where @settings leaves what it was given


@pytest.fixture
def one_capture_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pdcompile.compile` captures a model of `tests.helpers.models` once for all tests."""
    from tests.helpers.captures import capture_once  # imports torch, which not all tests need

    monkeypatch.setattr("pdcompile.driver.capture", capture_once)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr != "not slow":
        return
    for item in items:
        test = getattr(item, "obj", None)
        given = getattr(test, _SETTINGS, None)
        if given is not None and given.max_examples > FEW_EXAMPLES:
            setattr(test, _SETTINGS, hypothesis.settings(given, max_examples=FEW_EXAMPLES))
