"""Reasons for no plan: limits in conflict, by how much memory is short, and what is enough.

Of a problem a set of limits is asked about as a whole: can they hold together?  Precedence along
the flow of data and a parameter's price on every holder are no limits: they are what the model is.
Of a space the least share of the largest device's memory is sought that a plan of it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

import numpy as np

from pdcompile.cluster import Cluster
from pdcompile.errors import InfeasibleError, NotFoundError
from pdcompile.passes.partition.budget import Budget, OutOfTimeError
from pdcompile.passes.partition.chains import Chains
from pdcompile.passes.partition.model import Model, build
from pdcompile.passes.partition.search import any_assignment_of
from pdcompile.passes.partition.segments import Matrix
from pdcompile.passes.partition.space.in_turn import SOME
from pdcompile.passes.partition.space.matrices import Matrices
from pdcompile.passes.partition.space.pipelines import PreparedProblem, limited
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.plan import Training
from pdcompile.problem import PartitionProblem, Wish
from pdcompile.problem.constraints import smallest_conflict
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import SearchSpace, Setting
from pdcompile.schedule.registry import kind_of
from pdcompile.units import format_bytes, three_digits

EXPLAIN_SECONDS = 5.0
LESS = 0.99  # of the memory: worth being told
ENTRIES = ("pins", "together", "apart")
RECOMPUTATION = "recomputation (recompute='auto', --recompute auto)"

Holds = Callable[[Collection["Limit"]], bool]  # is there an assignment under these limits alone?


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
    """Something that can be given up: a wish of a person, or else the memory of stages."""

    text: str
    wish: Wish | None = None

    @property
    def memory(self) -> bool:
        return self.wish is None


def limits_of(problem: PartitionProblem) -> tuple[Limit, ...]:
    """Everything that can be given up; wishes first, because the first are blamed first."""
    wishes = [*problem.wishes]
    for name in ENTRIES:  # an entry that no wish lists is one of its own
        known = {entry for wish in problem.wishes for entry in getattr(wish, name)}
        entries = (one for one in dict.fromkeys(getattr(problem, name)) if one not in known)
        of_entry: list[dict[str, Any]] = [{name: (entry,)} for entry in entries]
        wishes += [Wish(f"{name} {own[name][0]}", **own) for own in of_entry]
    found = [Limit(wish.text, wish) for wish in wishes]
    sizes = sorted(size for one in problem.stages if (size := one.memory_bytes) is not None)
    if sizes:
        shown = " to ".join(dict.fromkeys(map(format_bytes, (sizes[0], sizes[-1]))))
        found.append(Limit(f"{shown} of memory a stage"))
    return tuple(found)


def keeping(problem: PartitionProblem, limits: Collection[Limit]) -> PartitionProblem:
    """The problem under these of its limits alone."""
    wishes = tuple(limit.wish for limit in limits if limit.wish is not None)
    memory = any(limit.memory for limit in limits)
    entries: dict[str, Any] = {
        name: tuple(dict.fromkeys(chain.from_iterable(getattr(wish, name) for wish in wishes)))
        for name in ENTRIES
    }
    return replace(
        problem if memory else problem.without_memory_limits(),
        wishes=wishes,
        **entries,
    )


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
    if reason and build(keeping(problem, ())).num_groups < len(problem.stages):
        return reason  # whatever is given up
    within = Budget(min(EXPLAIN_SECONDS, max(1.0, budget.left)), within=budget)

    def holds(chosen: Collection[Limit]) -> bool:
        return any_assignment_of(keeping(problem, chosen), within, seed) is not None

    limits = core = limits_of(problem)
    remedies, known = list[str](), "these conflict, or some of them, which was not found in time"
    try:
        core = smallest_conflict(limits, holds)
        known = "limits that cannot hold together" if len(core) > 1 else "limit that cannot hold"
        remedies = _left_out(limits, core, holds)
    except OutOfTimeError:
        pass
    memory = ["more memory"] if any(limit.memory for limit in core) else []
    if reason is None:
        what = "the constraints contradict each other, the flow of data or that no stage is empty"
        if memory and any(limit.wish for limit in core):
            what = f"memory and constraints contradict each other ({_rule(problem)})"
        elif memory:
            what = (
                f"the model cut into {len(problem.stages)} stages does not fit ({_rule(problem)})"
            )
        reason = InfeasibleError(what)
    if reason.remedy and not (contradiction and (memory or remedies)):
        remedies = [reason.remedy, *remedies]
    error = InfeasibleError(
        f"{reason.message}; {known}: {' and '.join(limit.text for limit in core)}",
        where=reason.where,
        remedy=", or ".join([*memory, *remedies]) or "drop one of these, or ask for fewer stages",
    )
    error.others = tuple(remedies)
    return error


def _left_out(limits: Sequence[Limit], core: Collection[Limit], holds: Holds) -> list[str]:
    """Limits other than memory whose absence is enough: one alone, else several together."""
    texts = [
        f"leave out {limit.text}"
        for limit in core
        if not limit.memory and holds([one for one in limits if one != limit])
    ]
    held = [limit for limit in limits if limit.memory]
    if texts or not any(limit.wish for limit in core) or not holds(held):
        return texts
    for limit in sorted(limits, key=lambda one: one in core):
        if not limit.memory and holds([*held, limit]):
            held.append(limit)
    return [f"leave out {' and '.join(limit.text for limit in limits if limit not in held)}"]


def _simple_reason(problem: PartitionProblem) -> InfeasibleError | None:
    """Reason why no assignment fits, where that shows without a search."""
    model = build(problem)
    n, count = model.num_groups, model.num_stages
    if n < count:
        return InfeasibleError(
            f"{count} stages for {n} items that can be separated",
            remedy=f"ask for at most {n} stages (replicas='any' gives them several devices)",
        )
    for v, group in enumerate(model.members):
        stages = range(model.lowest[v], model.highest[v] + 1)
        sizes = {s: problem.stages[s].memory_bytes for s in stages}
        short, stage = min(
            (0 if size is None else _alone(model, v, s) - size, s) for s, size in sizes.items()
        )
        if short > 0:
            largest = max(group, key=lambda i: problem.items[i].parameter_bytes)
            kept = f" and {len(group) - 1} items kept with it" if len(group) > 1 else ""
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
        model.held_bytes(copy, stage) + model.updated_bytes(copy, stage) * (copy.ends == (group,))
        for copy in model.copies
        if group in copy.ends
    )
    saved = model.problem.holding(stage).saved * model.saved_bytes[group]
    fixed = math.ceil(model.fixed_bytes(group, stage) + copies)
    return fixed + saved + model.workspace_bytes[group]


def _rule(problem: PartitionProblem) -> str:
    held = list(map(problem.holding, range(len(problem.stages))))
    versions = ", ".join(dict.fromkeys(str(one.versions) for one in held))
    gradients = ", ".join(dict.fromkeys(str(one.gradient_buffers) for one in held))
    return (
        f"by the planner's formula: weight versions {versions}, gradients {gradients}, optimizer "
        f"state {held[0].optimizer_factor:g} times the weights"
    )


class Shares(Matrices):
    """The same stages without limits, by the share of their devices' memory that they need."""

    def load(self, p: int, option: StageDeployment, rows: slice) -> Matrix:
        allowed, on = self.structure(p, option.replicas, rows), self.on(p, option)
        needed = self.segments.bytes(on.holding, rows)
        share = needed * 0.0 if on.limit is None else needed / max(on.limit, 1)
        return np.where(allowed, share, np.inf)


def too_large(
    problem: PartitionProblem, cluster: Cluster, training: Training
) -> InfeasibleError | None:
    """The error where all devices together cannot hold the parameters with one gradient each and
    what the optimizer keeps: whatever the schedule, and whoever holds them."""
    known = [device.memory_bytes for device in cluster.devices if device.memory_bytes is not None]
    count = len(cluster.devices)
    own = [(one.trainable_bytes, one.parameter_bytes) for one in problem.items]
    own += [(one.bytes * one.trainable, one.bytes) for one in problem.shared]
    trained, held = (sum(each) for each in zip(*own, strict=True))
    needed = math.ceil(held + trained * (1 + training.optimizer_factor))
    if len(known) < count or needed <= sum(known):
        return None
    return InfeasibleError(
        "no plan fits, whatever the schedule: parameters, gradients and the optimizer's state "
        f"take {format_bytes(needed)}, and the {count} devices have {format_bytes(sum(known))} of "
        "memory in all",
        where="memory",
        remedy=f"raise memory to {format_bytes(math.ceil(needed / count))} a device, and "
        "what activations take, add devices, or train fewer parameters",
    )


def no_plan(
    problems: Mapping[int, PreparedProblem],
    cluster: Cluster,
    space: SearchSpace,
    training: Training,
    *,
    unproved: Sequence[str],
) -> InfeasibleError:
    """The error when there is no plan: what does not fit and what would help, or none was found.

    Args:
        unproved: why the search proves nothing about plans that it has not found; empty: it
            exhausted the space.  The formula alone may prove that nothing fits.
    """
    short, several = limited(cluster), bool(space.placement)
    share, what, proved = least_share(problems, cluster, space, training)
    unproved = [*unproved] or [SOME] * several
    more = [
        text for text, wider in _wider(space, training)
        if several or share == math.inf
        or least_share(problems, cluster, wider, training)[0] < LESS * share
    ]  # fmt: skip
    more += ["a schedule with one stage a rank"] * several
    others = tuple(f"allow {text}" for text in more)
    if (proved and share == math.inf) or (not short and (several or not unproved)):
        wanted = "any number of" if space.stages is None else str(space.stages)
        fewer = "use fewer devices" if several else "ask for fewer stages" * bool(space.stages)
        groups = next(iter(problems.values())).whole.num_groups
        return InfeasibleError(
            f"the {groups} groups of ops that may be parted cannot be cut into {wanted} stages on "
            f"{len(cluster.devices)} devices, with the constraints that there are",
            where="cluster",
            remedy=", or ".join(filter(None, (fewer, "drop constraints if there are any"))),
        )
    # Two stages of a rank may suit its memory where no single one does.
    most, error = Seats(cluster, ()).largest, InfeasibleError
    message = "no plan of the space fits once messages and updates are counted"
    memory, others = "more memory", ("add devices", *others)
    if proved and most is not None and share > 1 and not space.sharing:
        needed = three_digits(math.ceil(most * share))[1]
        message = (
            f"no plan of the space fits: the largest device has {format_bytes(most)} of memory, "
            f"and {needed} are the least by the planner's formula ({what})"
        )
        memory = f"memory of more than {needed}"
    elif unproved:
        searched = "the space"
        if space.stages is not None:
            searched = f"{space.stages} stages on {len(cluster.devices)} ranks"
        error, others = NotFoundError, ("more time", *others)
        message = (
            f"no plan of {searched} was found that fits, and it is not proved that there is none: "
            + "; ".join(unproved)
        )
    elif share < math.inf:
        message += f"; by the formula alone, and devices as large as the largest, {what} would"
    given = [memory] * short
    found = error(
        message, where="memory" if short else "cluster", remedy="; or ".join([*given, *others])
    )
    found.others = others
    return found


def _wider(space: SearchSpace, training: Training) -> Iterator[tuple[str, SearchSpace]]:
    """Wider spaces, whose plans may take less memory, each behind the words for what it allows; the
    space itself where ranks hold several stages, of which nothing is known."""

    def with_(**changes: Any) -> SearchSpace:
        return space if space.placement else replace(space, **changes)

    if True not in space.recompute:
        yield RECOMPUTATION, with_(recompute=(False, True))
    if space.replicas != "any" and any(kind_of(name).takes_replicas for name in space.schedules):
        yield (
            "replicas (replicas='any', --replicas any)",
            with_(replicas="any", stages=None, in_order=False, recomputed=()),
        )
    at_once = not all(kind_of(name).updates_each for name in space.schedules)
    at_homes = training.optimizer_factor > 0 and at_once and space.replicas != "1"
    if at_homes and not max(space.homes):
        yield "optimizer states at homes (updates='home', --updates home)", with_(homes=(True,))


def least_share(
    problems: Mapping[int, PreparedProblem],
    cluster: Cluster,
    space: SearchSpace,
    training: Training,
) -> tuple[float, str, bool]:
    """The least share of the largest device's memory that a plan needs by the formula, over all
    settings; of which one; and whether it is proved that no plan needs less, whichever devices it
    takes in which order."""
    most = Seats(cluster, ()).largest
    same = tuple(replace(one, memory_bytes=most) for one in cluster.devices)
    alike = replace(cluster, devices=same)
    best, what = math.inf, ""
    proved = not space.placement and all(one.complete for one in problems.values())
    budget, again = Budget(EXPLAIN_SECONDS), max(space.recompute)  # which takes less memory
    cases = product(sorted(problems), space.schedules, space.extra_warmup, range(1, len(same) + 1))
    for m, schedule, extra, used in () if space.placement else cases:
        if budget.late:
            return best, what, False
        setting = Setting(
            schedule, m, extra, training.optimizer_factor, training.joint,
            homes=max(space.homes),  # which takes less memory too
        )  # fmt: skip
        segments, seats = problems[m].segments, Seats(alike, tuple(range(used)))
        menu = tuple(StageDeployment(r, again) for r in space.counts(used))
        shares = Shares(
            segments, setting, seats, menu, last=problems[m].last(segments.model), bounding=False
        )
        chains = Chains(
            len(segments.ideals), used, menu, shares.costs, space.stages, widths=space.widths
        )
        if (found := chains.solve()) < best:
            best, what = found, f"{schedule}, {m} microbatches, {used} devices"
    return best, what, proved
