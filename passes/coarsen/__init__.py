"""Turns a graph with costs into the planner's problem, with what may not be cut as items.

Three steps: join what a cut would make wrong (`spans`), join what can be joined without losing
the optimum (`neutral`), and add up costs, traffic and shared parameters of the items that
remain.  What the user asks for (`wishes`) binds items, with the words to name it.  The problem's
`scope` says which rules were used, since a certificate holds inside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcompile.errors import ConfigError, CostError, some
from pdcompile.ir.graph import OpGraph
from pdcompile.passes.coarsen.constraints import Constraints
from pdcompile.passes.coarsen.items import Assembly
from pdcompile.passes.coarsen.neutral import join_neutral
from pdcompile.passes.coarsen.spans import Groups, close_cycles, join_spans, join_users
from pdcompile.passes.partition.space.no_plan import refuse_contradictions
from pdcompile.problem import (
    ANY_CUT,
    ONE_GROUP,
    PartitionProblem,
    StageLimits,
)
from pdcompile.problem.constraints import Constraint
from pdcompile.units import format_seconds

__all__ = ["coarsen"]


def coarsen(
    graph: OpGraph,
    stages: tuple[StageLimits, ...],
    *,
    num_microbatches: int,
    constraints: Sequence[Constraint] = (),
    own_ages: bool = False,
) -> PartitionProblem:
    """Items in topological order, the traffic between them, and everything that binds them.

    Every op is in exactly one item.  What the user wants together stays several items, listed in
    `together`.  One item is pinned to the last stage: it holds the ops of the loss, or what makes
    the last of the model's output, and stands for the consumer of the whole output.

    Args:
        own_ages: weights of stages differ in age: all users of a parameter are on one.

    Raises:
        CostError: an op has no cost.
        ConfigError: a constraint names nothing, or a stage that is not there.
        InfeasibleError: constraints contradict each other or what may not be cut.
    """
    if not stages:
        raise ConfigError("a pipeline needs at least one stage, got 0", remedy="stages=1")
    b = _microbatch_size(graph)
    wishes = Constraints.resolve(graph, constraints)
    groups = Groups(len(graph.ops) + 1)
    join_spans(graph, groups)
    if own_ages:
        join_users(graph, groups)
    close_cycles(graph, groups)
    moved_seconds = join_neutral(graph, groups, b, wishes.marks(groups))
    assembly = Assembly.of(graph, groups, b)
    given = wishes.bind(assembly.item_of, len(stages), groups)
    given = (*given, assembly.output_wish(given, len(stages) - 1))
    problem = PartitionProblem(
        items=assembly.items(),
        traffic=assembly.traffic(),
        stages=stages,
        shared=assembly.shared(),
        order=assembly.order(),
        together=tuple(dict.fromkeys(group for wish in given for group in wish.together)),
        pins=tuple(sorted({pin for wish in given for pin in wish.pins})),
        apart=tuple(sorted({pair for wish in given for pair in wish.apart})),
        in_flight=(1,) * len(stages),
        num_microbatches=num_microbatches,
        scope=_scope(graph, groups, moved_seconds, constraints),
        wishes=given,
    )
    if constraints:
        refuse_contradictions(problem)
    return problem


def _microbatch_size(graph: OpGraph) -> int:
    sizes = set()
    for op in graph.ops:
        if op.cost is None:
            raise CostError(
                f"op '{op.name}' ({op.target}) has no cost",
                where=op.source,
                remedy="run pdcompile.passes.profile.profile on the graph first",
            )
        sizes.add(op.cost.microbatch_size)
    if len(sizes) > 1:
        raise CostError(f"costs are of different microbatch sizes: {sorted(sizes)}")
    return sizes.pop() if sizes else graph.batch_size


def _scope(
    graph: OpGraph, groups: Groups, moved_seconds: float, constraints: Sequence[Constraint]
) -> str:
    under = f"constraints {some([*map(str, constraints)], 8)}" if constraints else ""
    if not groups.reasons:
        return under or ANY_CUT
    rules = ", ".join(f"{reason} ({n})" for reason, n in sorted(groups.reasons.items()))
    items = len(groups.members())
    text = f"cuts between {items} groups of the {len(graph.ops)} ops; {ONE_GROUP}{rules}"
    if moved_seconds:
        text += f"; {format_seconds(moved_seconds)} of ops moved into other groups"
    return f"{text}; {under}" if under else text
