"""The problem inside a plan: what the planner was given, so that it can be asked again.

A plan says which op runs where; `Plan.problem` says what the planner knew when it chose: items
(ops that it keeps together) with their costs, what passes between them, and the limits.  In a file
it is sealed (see `pdcompile.plan.seal`).  Which stage an item is on is not written twice: it
follows from the ops of the stages, so a plan in which a person moved whole items can still be
explained.  One in which an item was torn apart is no such plan: `assignment` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from pdcompile.errors import PlanError
from pdcompile.problem import Item, PartitionProblem

if TYPE_CHECKING:
    from pdcompile.plan.schema import Plan

Finding = tuple[str, str, str]  # path, message, remedy
MOST = 1e30  # of seconds, bytes, and all else that is added up and multiplied
AGAIN = 'make the plan again, or remove its "problem"'


def problem_of(plan: Plan, where: str = "plan.json") -> PartitionProblem:
    """The embedded problem.  Raises PlanError, with the way to get one, where there is none."""
    if plan.problem is None:
        raise PlanError(
            "the plan does not hold the problem that the planner solved: costs, traffic and limits",
            where=f"{where}: problem",
            remedy="make the plan again with this version: pdcompile plan TARGET -o plan.json",
        )
    return plan.problem


def plain(plan: Plan) -> bool:
    """True if the plan is a `Partition`: stage s has rank s alone, and keeps its activations."""
    return all(
        stage.replicas == 1 and not stage.recompute and stage.ranks in ((), (s,))
        for s, stage in enumerate(plan.stages)
    )


def on_stages(problem: PartitionProblem, num_stages: int) -> PartitionProblem:
    """The problem for so many stages, whose number was open: constraints that name one name the
    last, and what is pinned there stays there."""
    last = len(problem.stages) - 1
    if num_stages == last + 1:
        return problem

    def moved(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((item, num_stages - 1 if s == last else s) for item, s in pairs)

    return replace(
        problem,
        pins=moved(problem.pins),
        wishes=tuple(replace(wish, pins=moved(wish.pins)) for wish in problem.wishes),
    )


def assignment(plan: Plan, where: str = "plan.json") -> tuple[int, ...]:
    """The stage of every item of the embedded problem, read off the ops of the stages.

    An item without ops (the model's output, where no op makes it) is on the last stage.

    Raises:
        PlanError: there is no problem, it is of another number of stages, an item is torn
            apart, an op of it is on no stage, or one is on an earlier stage than what it reads;
            `where` names the op.
    """
    problem = problem_of(plan, where)
    if len(problem.stages) != len(plan.stages):
        raise PlanError(
            f"the problem has {len(problem.stages)} stages, and the plan {len(plan.stages)}",
            where=f"{where}: problem.stages",
            remedy=AGAIN,
        )
    stage_of, found = plan.stage_of, list[int]()
    for item in problem.items:
        if absent := [op for op in item.ops if op not in stage_of]:
            raise PlanError(
                f"op {absent[0]!r} of {item.name!r} is on no stage",
                where=f"{where}: stages",
                remedy="add it to the ops of one stage, or plan again",
            )
        stages = [stage_of[op] for op in item.ops]
        for op, stage in zip(item.ops, stages, strict=True):
            if stage != stages[0]:
                raise PlanError(
                    f"op {op!r} is on stage {stage}, and {item.ops[0]!r} on stage {stages[0]}: the "
                    f"planner keeps them together as {item.name!r}",
                    where=f"{where}: stages[{stage}].ops",
                    remedy=f"move all {len(item.ops)} ops of {item.name!r}, or plan again",
                )
        found.append(stages[0] if stages else len(problem.stages) - 1)
    pairs = [(one.producer, consumer) for one in problem.traffic for consumer in one.consumers]
    for first, second in (*pairs, *problem.order):
        if found[first] > found[second]:
            late, early = problem.items[first].name, problem.items[second].name
            raise PlanError(
                f"{early!r} on stage {found[second]} needs what {late!r} makes on stage "
                f"{found[first]}",
                where=f"{where}: stages[{found[first]}].ops",
                remedy=f"move {early!r} to stage {found[first]} or later, or plan again",
            )
    return tuple(found)


def unusable_numbers(part: Any, path: str) -> Iterator[Finding]:
    """Numbers of a plan, a problem or a part of one that count nothing: negative or too large."""
    if isinstance(part, tuple):
        for i, one in enumerate(part):
            yield from unusable_numbers(one, f"{path}[{i}]")
    elif hasattr(part, "__dataclass_fields__"):
        for field in fields(part):
            value = getattr(part, field.name)
            below = f"{path}.{field.name}" if path else field.name
            if field.name in ("speed", "bytes_per_second") and not value > 0:
                yield below, f"{field.name} is {value!r}", "write a number above 0"
            elif field.name == "bytes_per_second":
                continue  # infinite where the cluster names no bandwidth
            elif isinstance(value, int | float) and not 0 <= value <= MOST:
                whose = (getattr(part, name, "") for name in ("name", "value", "fqn"))
                owner = next((f" of {name!r}" for name in whose if name), "")
                message = f"{field.name}{owner} is {value!r}: negative, not finite or too large"
                yield below, message, f"write a number from 0 to {MOST:g}"
            else:
                yield from unusable_numbers(value, below)
        if isinstance(part, Item) and part.trainable_bytes > part.parameter_bytes:
            message = f"{part.trainable_bytes} trainable of {part.parameter_bytes} bytes"
            remedy = "trainable bytes are part of parameter_bytes"
            yield path, f"{part.name!r} has {message}", remedy
    elif isinstance(part, int | float) and not 0 <= part <= MOST:
        yield path, f"{part!r} is negative, not finite or too large", "write a usable number from 0"
