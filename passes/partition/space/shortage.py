"""Why nothing of the space fits, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from pdcompile.cluster import Cluster
from pdcompile.errors import InfeasibleError, NotFoundError
from pdcompile.passes.partition.budget import Budget
from pdcompile.passes.partition.infeasible import EXPLAIN_SECONDS
from pdcompile.passes.partition.segments import Matrix
from pdcompile.passes.partition.space.chains import Chains
from pdcompile.passes.partition.space.in_turn import SOME
from pdcompile.passes.partition.space.matrices import Matrices
from pdcompile.passes.partition.space.pipelines import PreparedProblem, limited
from pdcompile.passes.partition.space.seats import Positions, Seats
from pdcompile.plan import Training
from pdcompile.problem import PartitionProblem
from pdcompile.problem.deployment import StageDeployment
from pdcompile.problem.space import SearchSpace, Setting
from pdcompile.schedule.registry import kind_of
from pdcompile.units import format_bytes

RECOMPUTATION = "recomputation (recompute='auto', --recompute auto)"
FEWER = "ask for fewer stages, or drop constraints"


class Shares(Matrices):
    """The same stages without limits, by the share of their devices' memory that they need."""

    def load(self, seats: Positions, p: int, option: StageDeployment, rows: slice) -> Matrix:
        allowed = self.structure(seats, p, option.replicas, rows)
        limit, needed = seats.memory(p, option.replicas), self.bytes(seats, p, option, rows)
        share = needed * 0.0 if limit is None else needed / max(limit, 1)
        return np.where(allowed, share, np.inf)

    def bound(
        self, seats: Positions, p: int, option: StageDeployment, rows: slice, load: Matrix
    ) -> Matrix:
        return load


def too_large(
    problem: PartitionProblem, cluster: Cluster, training: Training
) -> InfeasibleError | None:
    """The error where all devices together cannot hold the parameters with one gradient each and
    what the optimizer keeps: whatever the schedule, and whoever holds them."""
    limits = [device.memory_bytes for device in cluster.devices]
    known = [limit for limit in limits if limit is not None]
    own = [(item.trainable_bytes, item.parameter_bytes) for item in problem.items]
    own += [(one.bytes * one.trainable, one.bytes) for one in problem.shared]
    trained, held = (sum(each) for each in zip(*own, strict=True))
    needed = held + trained * (1 + training.optimizer_factor)
    if len(known) < len(limits) or needed <= sum(known):
        return None
    return InfeasibleError(
        f"no plan fits, whatever the schedule: parameters, gradients and the optimizer's state "
        f"take {format_bytes(math.ceil(needed))}, and the {len(limits)} devices have "
        f"{format_bytes(sum(known))} of memory in all",
        where="memory",
        remedy=f"raise memory to {format_bytes(math.ceil(needed / len(limits)))} a device, and "
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
    least = least_share(problems, cluster, space, training)
    unproved = [*unproved] or [SOME] * several
    more = [] if True in space.recompute else [RECOMPUTATION]
    if space.replicas != "any" and any(kind_of(name).takes_replicas for name in space.schedules):
        more.append("replicas (replicas='any', --replicas any)")
    more += ["a schedule with one stage a rank"] * several
    others = f", or allow {' or '.join(more)}" if more else ""
    impossible = least.proved and not math.isfinite(least.share)
    if impossible or (not short and (several or not unproved)):
        wanted = "any number of" if space.stages is None else str(space.stages)
        return InfeasibleError(
            f"the model cannot be cut into {wanted} stages as the constraints ask on "
            f"{len(cluster.devices)} devices",
            where="cluster",
            remedy="drop constraints" if space.stages is None else FEWER,
        )
    # Two stages of a rank may suit its memory where no single one does.
    most, share = least.largest, least.share
    if least.proved and most is not None and share > 1 and not space.sharing:
        return InfeasibleError(
            f"no plan of the space fits: the largest device has {format_bytes(most)} of memory, "
            f"and the least that any plan needs is {share:.3g} times that ({least.what})",
            where="memory",
            remedy=f"raise memory to at least {format_bytes(math.ceil(most * share))}, "
            f"add devices{others}",
        )
    if unproved:
        return NotFoundError(
            "no plan of the space was found that fits, and it is not proved that there is none: "
            + "; ".join(unproved),
            where="memory" if short else "cluster",
            remedy=f"give more time{' or memory' if short else ''}, ask for less{others}",
        )
    known = f"; by the formula alone, and devices as large as the largest, {least.what} would"
    return InfeasibleError(
        "no plan of the space fits once messages and updates are counted"
        + known * math.isfinite(share),
        where="memory",
        remedy=f"give a little more memory{others}",
    )


class Least(NamedTuple):
    """The least share of the largest device's memory that a plan needs by the formula, and where.

    `largest`: that memory, None where a device has no limit; `proved`: no plan needs less,
    whichever devices it takes in which order.
    """

    largest: int | None
    share: float
    what: str
    proved: bool


def least_share(
    problems: Mapping[int, PreparedProblem],
    cluster: Cluster,
    space: SearchSpace,
    training: Training,
) -> Least:
    """Over all settings, as if all devices were as large as the largest."""
    limits = [device.memory_bytes for device in cluster.devices]
    most = None if None in limits else max(limit for limit in limits if limit is not None)
    same = tuple(replace(device, memory_bytes=most) for device in cluster.devices)
    alike = replace(cluster, devices=same)
    best, what = math.inf, ""
    proved = not space.placement and all(one.complete for one in problems.values())
    budget, again = Budget(EXPLAIN_SECONDS), max(space.recompute)  # which takes less memory
    cases = product(sorted(problems), space.schedules, space.extra_warmup, range(1, len(same) + 1))
    for m, schedule, extra, used in () if space.placement else cases:
        if budget.late:
            proved = False
            break
        setting = Setting(schedule, m, extra, training.optimizer_factor, training.joint)
        prepared = problems[m]
        shares = Shares(
            prepared.segments,
            setting,
            space.straight,
            space.decides_recomputation,
            prepared.last(prepared.segments.model),
        )
        menu = tuple(StageDeployment(r, again) for r in space.counts(used))
        seats = Seats(alike, tuple(range(used)))
        found = Chains(shares, seats, menu, space.stages, widths=space.widths).solve()
        if found < best:
            best, what = found, f"{schedule}, {m} microbatches, {used} devices"
    return Least(most, best, what, proved)
