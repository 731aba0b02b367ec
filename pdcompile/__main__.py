"""``python -m pdcompile``, the same as the command ``pdcompile``."""

from __future__ import annotations

from pdcompile.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
