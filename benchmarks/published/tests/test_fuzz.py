"""Damaged files of published problems: refused with an error of ours, and never executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.tests.helpers.file_formats import MAKERS
from tests.helpers.fuzzing import fuzz


@pytest.mark.parametrize("name", MAKERS)
def test_many_files_of_every_format(name: str, tmp_path: Path) -> None:
    found = fuzz(MAKERS[name](tmp_path), 2000, seed=1)
    assert [(one.what, one.data[:500]) for one in found.findings] == []
    assert found.files == 2000
    assert found.refused > 0
    assert found.kept > 0
