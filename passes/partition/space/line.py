"""Line of a linear order: the work of a model one after the other, and what lies before each place.

A pipeline that cuts the order into intervals cuts the line at such places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition import lattice
from pdcompile.passes.partition.model import Flow, Model

Array = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True)
class Amounts:
    """Amounts of each kind before the points of a line; zeros where a line does not say."""

    work: Array  # seconds of forward and backward at speed 1
    forward: Array
    backward: Array
    trainable: Array  # bytes
    frozen: Array
    saved: Array


@dataclass(frozen=True)
class Line:
    """Places where the work can be cut.

    Args:
        before: what lies before each place.
        received, returned: bytes that cross each place forward and backward.
        cuts: places where a stage may end.
        at: the place of each group in the order.
    """

    before: Amounts
    received: Array
    returned: Array
    cuts: Places
    at: Places

    @property
    def whole(self) -> float:
        return float(self.before.work[-1])

    @staticmethod
    def of_order(model: Model, order: Sequence[int] = ()) -> Line:
        """The groups in a topological order; as they are numbered where none is given."""
        listed = list(order or range(model.num_groups))
        at = np.empty(len(listed), dtype=np.intp)
        at[listed] = np.arange(len(listed))
        places = Amounts(*(np.concatenate(([0.0], row[listed].cumsum())) for row in _rows(model)))
        crossing = np.zeros((2, model.num_groups + 2))
        for flow in model.flows:
            if not flow.tied:
                both = flow.forward_bytes, flow.backward_bytes
                crossing[:, at[flow.sources[0]] + 1] += both
                crossing[:, max(at[v] for v in flow.sinks) + 1] -= both
        received, returned = crossing[:, :-1].cumsum(1)
        return Line(places, received, returned, np.arange(model.num_groups + 1), at)

    def cheap(self, share: float, least: int) -> Line:
        """The line with cuts only where little crosses: `share` times the least of all, or more
        where this leaves fewer than `least` cuts."""
        crossing = (self.received + self.returned)[self.cuts]
        inner = np.sort(crossing[1:-1])
        if not len(inner) or share == np.inf:
            return self
        limit = max(share * inner[0], inner[min(least, len(inner)) - 1])
        keep = crossing <= limit
        keep[[0, -1]] = True
        return replace(self, cuts=self.cuts[keep])

    def groups(self, begins: Sequence[float]) -> tuple[int, ...]:
        """The stage of each group, of stages before which there is so much work."""
        places = np.searchsorted(self.before.work, begins)
        return tuple((np.searchsorted(places, self.at, "right") - 1).tolist())


def _rows(model: Model) -> list[Array]:
    """Amounts of each group, in the order of `Amounts`."""
    forward, backward = np.array(model.forward), np.array(model.backward)
    return [
        forward + backward,
        forward,
        backward,
        *(
            np.array(row, dtype=np.float64)
            for row in (model.trainable_bytes, model.frozen_bytes, model.saved_bytes)
        ),
    ]


def heaviest_path(model: Model) -> tuple[int, ...]:
    """Groups in a row, each reading a value with a gradient of the one before; the most work."""
    after: list[list[int]] = [[] for _ in range(model.num_groups)]
    for flow in with_gradients(model):
        after[flow.sources[0]] += flow.sinks
    heaviest, following = [0.0] * model.num_groups, [-1] * model.num_groups
    for v in reversed(range(model.num_groups)):
        work, following[v] = max(((heaviest[u], u) for u in after[v]), default=(0.0, -1))
        heaviest[v] = work + model.forward[v] + model.backward[v]
    path, v = [], max(range(model.num_groups), key=heaviest.__getitem__)
    while v >= 0:
        path.append(v)
        v = following[v]
    return tuple(path)


def with_gradients(model: Model) -> list[Flow]:
    """Values of which gradients come back."""
    return [flow for flow in model.flows if not flow.tied and flow.backward_messages > 0]


def sides(
    count: int, arcs: Iterable[tuple[int, int]], number: dict[int, int], size: int
) -> tuple[Places, Places]:
    """The last of the path before every group and the first behind it, as these arcs go.

    Groups of the path have numbers from 1: both are its own number for one of them, 0 and one more
    than there are where there is none before or behind.
    """
    before, after = lattice.neighbours(count, arcs)
    low, high = np.zeros(count, dtype=np.intp), np.full(count, size + 1, dtype=np.intp)
    for v in range(count):
        low[v] = number.get(v) or max((low[u] for u in before[v]), default=0)
    for v in reversed(range(count)):
        high[v] = number.get(v) or min((high[u] for u in after[v]), default=size + 1)
    return low, high
