"""Solution: the answer to a published problem of any kind, printed as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Progress = Callable[[float | None, float], None]
"""Called with (objective of the best plan so far or None, lower bound so far)."""

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
ROUNDING = 1e-5  # a relative gap up to this is integer rounding, and counts as none


@dataclass(frozen=True, slots=True)
class StageSolution:
    """One stage: ids as in the file, and what its family of problems says besides.

    `details` holds JSON values under the names of the answer's format: ``"device"``,
    ``"data_parallel"``, ``"load"``, …
    """

    members: tuple[int | str, ...]
    replicas: int = 1
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LevelSolution:
    """A stage of one level of a hierarchy, and the pipeline inside each of its replicas."""

    members: tuple[int | str, ...]
    replicas: int
    inner: tuple[LevelSolution, ...] = ()


@dataclass(frozen=True, slots=True)
class Solution:
    """The best plan found, a proven lower bound, who proved it, and inside which scope.

    `objective` is None when there is no plan: then `status` says whether that is proved
    ("infeasible") or time ran out ("unknown"), and `reason` says why in words.  The unit is
    that of the file's objective, seconds where the file has a unit at all.
    """

    status: Status
    objective: float | None
    bound: float
    prover: str
    seconds: float  # wall time of reading, search and proof
    scope: str
    stages: tuple[StageSolution, ...] = ()
    levels: tuple[LevelSolution, ...] = ()  # outermost first; empty where there is one level
    reason: str = ""

    @staticmethod
    def of(
        objective: float | None, bound: float, prover: str, seconds: float, scope: str, **more: Any
    ) -> Solution:
        """Solution with its status: no plan and an infinite bound is a proof of none."""
        status: Status = "infeasible" if math.isinf(bound) else "unknown"
        if objective is not None:
            bound = min(bound, objective)
            status = "optimal" if relative_gap(objective, bound) == 0 else "feasible"
        return Solution(status, objective, bound, prover, seconds, scope, **more)

    @property
    def gap(self) -> float | None:
        """(objective − bound) / objective; up to 1e-5 counts as 0 (integer rounding)."""
        if self.objective is None:
            return None
        return relative_gap(self.objective, self.bound)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; numbers without a finite value are null."""
        found: dict[str, Any] = {
            "status": self.status,
            "objective": self.objective,
            "bound": self.bound if math.isfinite(self.bound) else None,
            "gap": self.gap,
            "seconds": self.seconds,
            "prover": self.prover,
            "scope": self.scope,
            "stages": [
                {"members": list(stage.members), "replicas": stage.replicas, **stage.details}
                for stage in self.stages
            ],
        }
        if self.levels:
            found["levels"] = [_level(level) for level in self.levels]
        if self.reason:
            found["reason"] = self.reason
        return found


def relative_gap(objective: float, bound: float) -> float:
    """(objective − bound) / objective, 0 up to `ROUNDING`."""
    if objective <= 0:
        return 0.0
    gap = (objective - bound) / objective
    return gap if gap > ROUNDING else 0.0


def _level(level: LevelSolution) -> dict[str, Any]:
    return {
        "members": list(level.members),
        "replicas": level.replicas,
        "inner": [_level(inner) for inner in level.inner],
    }
