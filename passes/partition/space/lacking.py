"""Why nothing of the space fits, and by how much."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pdcompile.cluster import Cluster
from pdcompile.errors import InfeasibleError
from pdcompile.passes.partition.segments import Matrix
from pdcompile.passes.partition.space.chains import Chains
from pdcompile.passes.partition.space.matrices import Bool, Matrices
from pdcompile.passes.partition.space.search import Ground
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.plan import Training
from pdcompile.space import SearchSpace, Setting
from pdcompile.units import format_bytes


class Shares(Matrices):
    """The same stages without limits, by the share of their devices' memory that they need."""

    def load(self, seats: Seats, p: int, r: int, rows: slice) -> tuple[Matrix, Bool]:
        allowed = self.structure(seats, p, r, rows)
        limit = seats.memory(p, r)
        needed = np.minimum.reduce([self.bytes(seats, p, r, rows, one) for one in self.recompute])
        share = needed * 0.0 if limit is None else needed / max(limit, 1)
        return np.where(allowed, share, np.inf), allowed

    def bound(self, seats: Seats, p: int, r: int, rows: slice, load: Matrix, again: Bool) -> Matrix:
        return load


def does_not_fit(
    grounds: Mapping[int, Ground],
    cluster: Cluster,
    space: SearchSpace,
    training: Training,
    *,
    proved: bool,
) -> InfeasibleError:
    """The error that names what lacks: the least memory with which something would fit."""
    share, what = least_share(grounds, cluster, space, training)
    limits = [device.memory_bytes for device in cluster.devices if device.memory_bytes is not None]
    more = [] if True in space.recompute else ["recomputation (--recompute auto)"]
    more += [] if space.replicas == "any" else ["replicas (--replicas any)"]
    others = f", or allow {' or '.join(more)}" if more else ""
    if not limits or not np.isfinite(share):
        wanted = "any number of" if space.stages is None else str(space.stages)
        return InfeasibleError(
            f"the model cannot be cut into {wanted} stages as the constraints ask on "
            f"{len(cluster.devices)} devices",
            where="cluster",
            remedy="ask for fewer stages, or drop constraints",
        )
    if share <= 1:
        reason = "is known to fit" if not proved else "fits once what is under way is counted"
        return InfeasibleError(
            f"no plan of the space {reason}, though by the formula {what} would",
            where="memory",
            remedy=f"give more time or a little more memory{others}",
        )
    least = min(limits)
    return InfeasibleError(
        f"no plan of the space fits: devices have {format_bytes(least)} of memory, and the least "
        f"that any plan needs is {share:.3g} times that ({what})",
        where="memory",
        remedy=f"raise memory to {format_bytes(int(np.ceil(least * share)))}, add devices{others}",
    )


def least_share(
    grounds: Mapping[int, Ground], cluster: Cluster, space: SearchSpace, training: Training
) -> tuple[float, str]:
    """The least share of memory over all settings on all devices in rank order, and where."""
    best, what = float("inf"), ""
    seats = Seats(cluster, tuple(range(len(cluster.devices))))
    counts = space.counts(len(seats.ranks))
    for m, ground in sorted(grounds.items()):
        for schedule in space.schedules:
            setting = Setting(
                schedule, m, 0, training.optimizer_factor, training.max_grad_norm is not None
            )
            shares = Shares(ground.segments, setting, counts == (1,), space.recompute, ground.last)
            for used in range(1, len(seats.ranks) + 1):
                part = Seats(cluster, seats.ranks[:used])
                found = Chains(shares, part, counts, space.stages).solve()
                if found < best:
                    best, what = found, f"{schedule}, {m} microbatches, {used} devices"
    return best, what
