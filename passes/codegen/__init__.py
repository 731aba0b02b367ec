"""Stages as source: importable files that a person can read, edit and run."""

from __future__ import annotations

from pdcompile.passes.codegen.generate import generate
from pdcompile.passes.codegen.load import module_of, read, set_draw, stage_classes
from pdcompile.passes.codegen.write import write

__all__ = ["generate", "module_of", "read", "set_draw", "stage_classes", "write"]
