"""PipeDream's planning problem: replicated stages inside levels of bandwidth, proved."""

from __future__ import annotations

from pdcompile.passes.published.pipedream.plan import solve

__all__ = ["solve"]
