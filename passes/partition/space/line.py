"""Lines: the work of a model one after the other, and what lies before each of its points.

The line of a linear order has its prefixes as points.  The line of a path has the places where the
path can be cut; a cut there says what surely lies before it and what surely does not, and what is
beside it may lie on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.path.beside import Array, sides

Places = NDArray[np.intp]


@dataclass(frozen=True)
class Amounts:
    """Of each kind, what lies before the points of a line; zeros where a line does not say."""

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
        least, most: what surely lies before each place, and all that may.
        beside: the most work that may be on either side of one place.
        received, returned: bytes that cross each place forward and backward.
        cuts: places where a stage may end; None: everywhere between them too.
    """

    least: Amounts
    most: Amounts
    beside: float
    received: Array
    returned: Array
    cuts: Places | None = None

    @property
    def exact(self) -> bool:
        """Are its places those of a plan, not of a bound?"""
        return self.cuts is not None

    @property
    def whole(self) -> float:
        return float(self.most.work[-1])

    @staticmethod
    def of_order(model: Model) -> Line:
        """The groups in the order in which they are numbered."""
        places = Amounts(*(np.concatenate(([0.0], row.cumsum())) for row in _rows(model)))
        sizes = [
            (flow, flow.forward_bytes, flow.backward_bytes) for flow in model.flows if not flow.tied
        ]
        crossing = np.zeros((2, model.num_groups + 1))
        for flow, *both in sizes:
            first, last = flow.sources[0] + 1, max(flow.sinks) + 1
            crossing[:, first] += both
            if last <= model.num_groups:
                crossing[:, last] -= both
        received, returned = crossing.cumsum(1)
        return Line(places, places, 0.0, received, returned, np.arange(model.num_groups + 1))

    @staticmethod
    def along(model: Model, path: Sequence[int]) -> Line:
        """The groups of a path, and what lies beside it."""
        size = len(path)
        number = {v: n for n, v in enumerate(path, start=1)}
        low, high = sides(model.num_groups, model.arcs, number, size)
        least, most = [], []
        for row in _rows(model):
            sure = np.bincount(high, row, size + 2).cumsum()[: size + 1]
            behind = np.bincount(low, row, size + 2)[::-1].cumsum()[::-1]
            open_ = row.sum() - np.concatenate((behind[1 : size + 1], [0.0]))
            # Nothing lies before the first stage, nothing behind the last one.
            sure[0], open_[-1] = 0.0, row.sum()
            least.append(sure)
            most.append(np.maximum(open_, sure))
        beside = float((most[0] - least[0]).max(initial=0.0))
        none = np.zeros(size + 1)
        return Line(Amounts(*least), Amounts(*most), beside, none, none)

    def cheap(self, share: float, least: int) -> Line:
        """The line with cuts only where little crosses: `share` times the least of all, or more
        where this leaves fewer than `least` cuts."""
        assert self.cuts is not None
        crossing = (self.received + self.returned)[self.cuts]
        inner = np.sort(crossing[1:-1])
        if not len(inner):
            return self
        limit = max(share * inner[0], inner[min(least, len(inner)) - 1])
        keep = crossing <= limit
        keep[[0, -1]] = True
        return Line(
            self.least, self.most, self.beside, self.received, self.returned, self.cuts[keep]
        )


def _rows(model: Model) -> list[Array]:
    """Of each group, in the order of `Amounts`."""
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
