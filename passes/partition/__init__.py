"""Stage of each op: the planner's search and its proof."""

from pdcompile.passes.partition.answer import partition as partition
