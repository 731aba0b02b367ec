"""Known critical paths: they tell without the clock that an assignment takes longer than another.

The order of a flush is given, so a path that is critical in one assignment is a chain of work in
every other one whose stages have its hops (`PipelineTimes.critical_path`).  Near a good assignment
a few dozen paths decide about nearly all others, each in a fiftieth of what the clock takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdcompile.plan.evaluate import Evaluation
from pdcompile.plan.makespan import Path

MOST = 64  # paths


@dataclass
class KnownPaths:
    """Critical paths of one deployment, those first that told something last."""

    paths: list[Path] = field(default_factory=list)

    def seconds(self, plan: Evaluation, below: float) -> float:
        """Seconds of a plan; where they are not `below` a limit, no less than that limit."""
        if not plan.chained:
            return plan.seconds
        for n, path in enumerate(self.paths):
            if (least := plan.times.along(path)) >= below:
                self.paths.insert(0, self.paths.pop(n))
                return least
        path = plan.times.critical_path(plan.warmup, plan.m)
        self.paths = [path, *self.paths[: MOST - 1]]
        least = plan.times.along(path)
        return least if least >= below else plan.seconds
