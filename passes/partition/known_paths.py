"""Known critical paths: they tell without the clock that an assignment takes longer than another.

The order of a flush is given, so a path that is critical in one assignment is a chain of work in
every other one whose stages have its hops (`PipelineTimes.critical_path`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pdcompile.plan.evaluate import Deployment, Evaluation
from pdcompile.plan.makespan import Path
from pdcompile.plan.times import PipelineTimes

MOST = 64  # paths


@dataclass
class KnownPaths:
    """Critical paths by their order of tasks, those first that told something last."""

    _paths: dict[object, list[Path]] = field(default_factory=dict)

    def of(self, on: Deployment) -> list[Path]:
        """Those of a deployment."""
        order = on.schedule, on.num_microbatches, tuple(on.ranks), tuple(on.in_flight), on.homes
        return self._paths.setdefault(order, [])

    def seconds(self, plan: Evaluation, below: float) -> float:
        """Seconds of a plan; where they are not `below` a limit, no less than that limit."""
        if not plan.bounded:
            return plan.seconds
        paths = self.of(plan.deployment)
        for n, path in enumerate(paths):
            if (least := along(path, plan.times)) >= below:
                paths.insert(0, paths.pop(n))
                return least
        paths[:] = [plan.times.critical_path(plan.warmup, plan.m), *paths[: MOST - 1]]
        least = along(paths[0], plan.times)
        return least if least >= below else plan.seconds


def along(path: Path, times: PipelineTimes) -> float:
    """Seconds of a chain of work; −∞ where one of its hops is missing."""
    hops = [(count, times.hops[kind].get(hop)) for hop, kind, count in path.hops]
    parts: list[tuple[float, float | None]] = [*zip(path.forward, times.forward, strict=True)]
    parts += [*zip(path.backward, times.backward, strict=True), *hops]
    parts += [(share, times.reduction(s)) for s, share in path.sums]
    known = [count * seconds for count, seconds in parts if seconds is not None]
    return math.fsum(known) if len(known) == len(parts) else -math.inf
