"""The planner's space beyond the straight cut: replicas, recomputation, warm-up, placement."""

from pdcompile.passes.partition.space.candidates import measure as measure
from pdcompile.passes.partition.space.candidates import violations as violations
from pdcompile.passes.partition.space.pipelines import best as best
