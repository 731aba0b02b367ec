"""PipeDream's planning problem: replicated stages inside levels of bandwidth, proved."""

from __future__ import annotations

from pdcompile.passes.partition.hierarchy.plan import solve

__all__ = ["solve"]
