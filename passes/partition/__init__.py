"""Stage of each op: the planner's search and its proof."""

from pdcompile.passes.partition.search import partition as partition
