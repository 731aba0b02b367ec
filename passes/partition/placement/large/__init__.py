"""Placement at scale: thousands of groups, thousands of devices."""

from pdcompile.passes.partition.placement.large.solve import solve as solve
