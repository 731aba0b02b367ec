"""The planner's space beyond the straight cut: replicas, recomputation, warm-up, placement."""

from pdcompile.passes.partition.space.evaluate import measure as measure
from pdcompile.passes.partition.space.evaluate import violations as violations
from pdcompile.passes.partition.space.search import best as best
