"""Which op goes to which stage: the planner's search and its proof."""

from pdcompile.passes.partition.search import partition as partition
from pdcompile.plan.evaluate import evaluate as evaluate
from pdcompile.plan.evaluate import violations as violations
