"""Verbs that write source: stages to read and edit, and plans for other runtimes."""

from __future__ import annotations

# Each verb adds itself to the application.
from pdcompile.cli.sources import dump, export  # noqa: F401
