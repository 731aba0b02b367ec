"""Which op goes to which stage: the planner's search and its proof."""

from pdcompile.passes.partition.evaluate import evaluate as evaluate
from pdcompile.passes.partition.evaluate import violations as violations
from pdcompile.passes.partition.search import partition as partition
