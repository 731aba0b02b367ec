"""Verbs about the machines that are here."""

from __future__ import annotations

# Each verb adds itself to the application.
from pdcompile.cli.hardware import doctor, probe  # noqa: F401
