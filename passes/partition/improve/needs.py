"""By how much many assignments exceed the memory of their stages, found together."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.improve.makespans import Seconds, Stages, Transfers
from pdcompile.passes.partition.model import Model

Bytes = NDArray[np.float64]  # [assignments, stages]


class Needs:
    """Bytes of assignments of a model's groups, as `Evaluation` has them one by one, but for
    rounding."""

    def __init__(self, model: Model):
        rule, stages = model.problem.memory, range(model.num_stages)
        self.model, self.count = model, model.num_stages
        limits = [stage.memory_bytes for stage in model.problem.stages]
        self._limits = np.array([np.inf if one is None else one for one in limits])
        self._saved, self._received, self._returned = np.array([rule.counts(s) for s in stages]).T
        self._copied = np.array([rule.versions_of(s) for s in stages], dtype=np.float64)
        self._updated = np.array([rule.buffers_of(s) + rule.optimizer_factor for s in stages])
        self._trainable, self._frozen, self._saved_bytes, self._workspace = (
            np.array(one, dtype=np.float64)
            for one in (
                model.trainable_bytes, model.frozen_bytes, model.saved_bytes, model.workspace_bytes,
            )
        )  # fmt: skip
        self._transfers = Transfers(model)
        self._there = np.array([float(flow.received_bytes) for flow in model.flows])
        self._back = np.array([flow.returned_bytes for flow in model.flows])

    def excess(self, stages: Stages) -> Seconds:
        """What the stages of each assignment need beyond their limits, as shares of these."""
        if not np.isfinite(self._limits).any():
            return np.zeros(len(stages))
        found: Seconds = (np.maximum(self.of(stages) / self._limits - 1.0, 0.0)).sum(1)
        return found

    def of(self, stages: Stages) -> Bytes:
        size, count = len(stages), self.count
        cell = stages + count * np.arange(size)[:, None]

        def summed(of_groups: Bytes) -> Bytes:
            return _counted(cell.ravel(), np.tile(of_groups, size), (size, count))

        found: Bytes = summed(self._trainable) * (self._copied + self._updated) + summed(
            self._frozen
        )
        found += self._saved * summed(self._saved_bytes)
        workspace = np.zeros(size * count)
        np.maximum.at(workspace, cell.ravel(), np.tile(self._workspace, size))
        found += workspace.reshape(size, count)
        n, flow, _, near, far = self._transfers.of(stages)
        for times, to, num_bytes in (
            (self._received, far, self._there), (self._returned, near, self._back),
        ):  # fmt: skip
            found += times * _counted(n * count + to, num_bytes[flow], (size, count))
        for copy in self.model.copies:
            there = np.zeros((size, count))
            np.put_along_axis(there, stages[:, list(copy.ends)], 1.0, axis=1)
            found += there * copy.bytes * (self._copied if copy.trainable else 1.0)
            if copy.trainable:
                first = there.argmax(1)
                found[np.arange(size), first] += copy.bytes * self._updated[first]
        return found


def _counted(at: Stages, num_bytes: Bytes, shape: tuple[int, int]) -> Bytes:
    """Bytes by place."""
    found: Bytes = np.bincount(at, num_bytes, math.prod(shape)).reshape(shape).astype(np.float64)
    return found
