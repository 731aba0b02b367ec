"""The page about stages shows what is written today."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_shows_stages_as_they_are_written(monkeypatch):
    """`python docs/sources.py` writes the page anew; read the difference."""
    monkeypatch.chdir(ROOT)
    with torch.random.fork_rng(devices=[]):
        page = runpy.run_path(str(ROOT / "docs" / "sources.py"))["page"]
        assert page() == (ROOT / "docs" / "sources.md").read_text()
