"""Why no assignment exists: limits in conflict, and changes of which each is enough.

Precedence along the flow of data and a parameter's price on every holder are no limits: they are
what the model is.  A set of limits is asked about as a whole: can they hold together?  A conflict
is a set that cannot, and of which every part can; QuickXplain (Junker, AAAI 2004) finds one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pdcompile.errors import CostError, InfeasibleError, NotFoundError
from pdcompile.passes.partition.budget import Budget, OutOfTimeError
from pdcompile.passes.partition.model import Model, build
from pdcompile.passes.partition.search import any_assignment_of
from pdcompile.plan.embedded import unusable_numbers
from pdcompile.problem import PartitionProblem, Wish
from pdcompile.units import format_bytes

EXPLAIN_SECONDS = 5.0
ENTRIES = ("pins", "together", "apart", "forbidden")

Holds = Callable[[Sequence["Limit"]], bool]  # can these limits hold together?


def validate(problem: PartitionProblem) -> None:
    """Refuse what no solver can work on.

    Raises:
        CostError: a time or size is negative or not finite, or a link or device has no speed.
        InfeasibleError: no items or no stages.
    """
    if not problem.stages:
        raise InfeasibleError("a pipeline of 0 stages", remedy="ask for 1 or more stages")
    if not problem.items:
        raise InfeasibleError("the graph has no ops to place", remedy="give a model that computes")
    for name in ("items", "traffic", "shared", "stages", "memory"):
        for path, message, remedy in unusable_numbers(getattr(problem, name), f"problem.{name}"):
            raise CostError(message, where=path, remedy=remedy)


def refuse_contradictions(problem: PartitionProblem) -> None:
    """Raise InfeasibleError when constraints contradict each other whatever the memory is.

    Only what shows without a search; `partition` finds the rest.
    """
    try:
        build(problem)
    except InfeasibleError as contradiction:
        raise no_assignment(problem, Budget(EXPLAIN_SECONDS), 0, contradiction) from None


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that can be given up: a wish of a person, memory, or that no stage is empty."""

    text: str
    wish: Wish | None = None
    memory: bool = False


def limits_of(problem: PartitionProblem) -> tuple[Limit, ...]:
    """Everything that can be given up; wishes first, because the first are blamed first."""
    found = [Limit(wish.text, wish) for wish in problem.wishes]
    for name in ENTRIES:  # an entry that no wish lists is one of its own
        known = {entry for wish in problem.wishes for entry in getattr(wish, name)}
        for entry in dict.fromkeys(getattr(problem, name)):
            if entry not in known:
                own: dict[str, Any] = {name: (entry,)}
                found.append(Limit(f"{name} {entry}", Wish(f"{name} {entry}", **own)))
    if problem.max_stages is not None and all(one.max_stages is None for one in problem.wishes):
        text = f"at most {problem.max_stages} stages"
        found.append(Limit(text, Wish(text, max_stages=problem.max_stages)))
    if not problem.allow_empty:
        found.append(Limit(f"something on each of {len(problem.stages)} stages"))
    sizes = sorted(size for one in problem.stages if (size := one.memory_bytes) is not None)
    if sizes:
        shown = " to ".join(dict.fromkeys(map(format_bytes, (sizes[0], sizes[-1]))))
        found.append(Limit(f"{shown} of memory a stage", memory=True))
    return tuple(found)


def keeping(problem: PartitionProblem, limits: Collection[Limit]) -> PartitionProblem:
    """The problem under these of its limits alone."""
    wishes = tuple(limit.wish for limit in limits if limit.wish is not None)
    counts = [wish.max_stages for wish in wishes if wish.max_stages is not None]
    memory = any(limit.memory for limit in limits)
    entries: dict[str, Any] = {
        name: tuple(dict.fromkeys(chain.from_iterable(getattr(wish, name) for wish in wishes)))
        for name in ENTRIES
    }
    return replace(
        problem if memory else problem.without_memory_limits(),
        allow_empty=all(limit.memory or limit.wish is not None for limit in limits),
        max_stages=min(counts, default=None),
        wishes=wishes,
        **entries,
    )


def irreducible(limits: Sequence[Limit], holds: Holds) -> tuple[Limit, ...]:
    """A conflict of these, which cannot hold together: of the first ones where either do."""

    def within(known: tuple[Limit, ...], fresh: bool, rest: tuple[Limit, ...]) -> tuple[Limit, ...]:
        if fresh and not holds(known):
            return ()
        if len(rest) == 1:
            return rest
        first, second = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        later = within((*known, *first), bool(first), second)
        earlier = within((*known, *later), bool(later), first)
        return (*earlier, *later)

    return within((), True, tuple(limits)) if limits else ()


def no_assignment(
    problem: PartitionProblem,
    budget: Budget,
    seed: int = 0,
    contradiction: InfeasibleError | None = None,
    *,
    proved: bool = True,
) -> InfeasibleError:
    """The error to raise: what does not fit, which limits conflict, and what would help.

    Takes at most `EXPLAIN_SECONDS`, and says less when they are over.

    Args:
        contradiction: between constraints, where there is one.
        proved: a search proved that there is no assignment; else only what shows without a search
            does, and a NotFoundError says that time was up.
    """
    reason = contradiction or _simple_reason(problem)
    if reason is None and not proved:
        return NotFoundError(
            "no plan was found within the time limit, and it is not proved that there is none",
            remedy="raise time_limit",
        )
    within = Budget(min(EXPLAIN_SECONDS, max(1.0, budget.left)), within=budget)

    def assigned(chosen: Collection[Limit]) -> tuple[int, ...] | None:
        return any_assignment_of(keeping(problem, chosen), within, seed)

    limits, remedies = limits_of(problem), list[str]()
    core, known = limits, "these conflict, or some of them, which was not found in time"
    try:
        core = irreducible(limits, lambda chosen: assigned(chosen) is not None)
        known = "limits that cannot hold together" if len(core) > 1 else "limit that cannot hold"
        remedies = _left_out(limits, core, assigned)
    except OutOfTimeError:
        pass
    message = reason.message if reason is not None else _in_words(problem, core)
    memory = ["more memory"] if any(limit.memory for limit in core) else []
    if reason is not None and reason.remedy and not (contradiction and (memory or remedies)):
        remedies = [reason.remedy, *remedies]
    error = InfeasibleError(
        f"{message}; {known}: {' and '.join(limit.text for limit in core)}",
        where=None if reason is None else reason.where,
        remedy=", or ".join([*memory, *remedies]) or "drop one of these, or ask for fewer stages",
    )
    error.others = tuple(remedies)
    return error


def _left_out(
    limits: Sequence[Limit],
    core: Collection[Limit],
    assigned: Callable[[Collection[Limit]], tuple[int, ...] | None],
) -> list[str]:
    """Limits other than memory whose absence is enough: one alone, else several together."""
    texts = []
    for limit in core:
        stage_of = None if limit.memory else assigned([one for one in limits if one != limit])
        if stage_of is not None and limit.wish is None:
            used = len(set(stage_of))
            texts.append(f"ask for fewer stages ({used} of them can hold everything)")
        elif stage_of is not None:
            texts.append(f"leave out {limit.text}")
    held = [limit for limit in limits if limit.memory]
    if texts or not any(limit.wish for limit in core) or assigned(held) is None:
        return texts
    for limit in sorted(limits, key=lambda one: one in core):
        if not limit.memory and assigned([*held, limit]) is not None:
            held.append(limit)
    gone = [limit.text for limit in limits if limit not in held]
    return [f"leave out {' and '.join(gone)}"]


def _simple_reason(problem: PartitionProblem) -> InfeasibleError | None:
    """Why no assignment fits, where that shows without a search."""
    model = build(problem)
    n, count = model.num_groups, model.num_stages
    if n < count and not problem.allow_empty:
        return InfeasibleError(
            f"{count} stages for {n} items that can be separated",
            remedy=f"ask for at most {n} stages (replicas='any' gives them several devices)",
        )
    for v in range(n):
        stages = range(model.lowest[v], model.highest[v] + 1)
        sizes = {s: problem.stages[s].memory_bytes for s in stages}
        short, stage = min(
            (0 if size is None else _alone(model, v, s) - size, s) for s, size in sizes.items()
        )
        if short > 0:
            largest = max(model.members[v], key=lambda i: problem.items[i].parameter_bytes)
            extra = len(model.members[v]) - 1
            kept = f" and {extra} items kept with it" if extra else ""
            return InfeasibleError(
                f"stage memory {format_bytes(sizes[stage] or 0)} cannot hold "
                f"{problem.items[largest].name!r}{kept}: "
                f"{format_bytes(_alone(model, v, stage))} ({_rule(problem)})",
                where=f"stage {stage}",
            )
    return None


def _alone(model: Model, group: int, stage: int) -> int:
    """Bytes that a group needs on a stage, alone."""
    copies = sum(
        model.held_bytes(copy, stage)
        + (model.updated_bytes(copy, stage) if copy.ends == (group,) else 0)
        for copy in model.copies
        if group in copy.ends
    )
    return (
        math.ceil(model.fixed_bytes(group, stage) + copies)
        + model.saved(stage) * model.saved_bytes[group]
        + model.workspace_bytes[group]
    )


def _in_words(problem: PartitionProblem, core: Iterable[Limit]) -> str:
    """When nothing simpler explains it."""
    if not any(limit.memory for limit in core):
        return "the constraints contradict each other or the flow of data"
    if any(limit.wish for limit in core):
        return f"memory and constraints contradict each other ({_rule(problem)})"
    return f"the model cut into {len(problem.stages)} stages does not fit ({_rule(problem)})"


def _rule(problem: PartitionProblem) -> str:
    rule, stages = problem.memory, range(len(problem.stages))
    versions, gradients = (
        ", ".join(dict.fromkeys(str(count(s)) for s in stages))
        for count in (rule.versions_of, rule.buffers_of)
    )
    return (
        f"by the planner's formula: weight versions {versions}, gradients {gradients}, optimizer "
        f"state {rule.optimizer_factor:g} times the weights"
    )
