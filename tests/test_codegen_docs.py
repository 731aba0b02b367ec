"""Pages and pictures that `make docs` writes are those that git has."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_shows_stages_as_they_are_written(monkeypatch):
    """`python docs/sources.py` writes the page anew; read the difference."""
    monkeypatch.chdir(ROOT)
    with torch.random.fork_rng(devices=[]):
        page = runpy.run_path(str(ROOT / "docs" / "sources.py"))["page"]
        assert page() == (ROOT / "docs" / "sources.md").read_text()


@pytest.mark.slow
def test_the_pictures_are_as_they_are_drawn(tmp_path):
    """`python docs/build.py` draws them anew; look at the difference."""
    docs = ROOT / "docs"
    found = runpy.run_path(str(docs / "build.py"))["draw"](tmp_path)
    assert found
    for path in found:
        assert path.read_text() == (docs / path.relative_to(tmp_path)).read_text(), path.name
