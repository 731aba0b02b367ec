"""Placement at scale: thousands of groups, thousands of devices."""

from pdcompile.passes.published.placement.large.solve import solve as solve
