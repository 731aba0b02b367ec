"""Which two states a stage can lie between, in a plan that is better than a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pdcompile.passes.partition.chain_program import Ints
from pdcompile.passes.published.piper.bounds import weighted
from pdcompile.passes.published.piper.model import Floats, Menu
from pdcompile.passes.published.piper.segments import Space

ENTRIES = 1 << 21  # of a matrix that is held at a time
WEIGHTS = (1.0, 0.7, 0.4)  # of seconds against bytes, when devices are counted


@dataclass(frozen=True, slots=True)
class Pairs:
    """Stages of one menu: states, seconds of the cut edges, seconds for each further replica."""

    menu: Menu
    before: Ints
    after: Ints
    cut: Floats
    resent: Floats

    def __len__(self) -> int:
        return len(self.before)


def pairs(space: Space, menu: Menu, threshold: float, most: int) -> Pairs | None:
    """All that have a choice below `threshold` and leave enough devices for the rest.

    What is before and after them is counted in device-seconds and device-bytes
    (`bounds.weighted`).  None: there are more than `most`.
    """
    problem = space.problem
    limit, rate = problem.memory_bytes, problem.bytes_per_second
    source = space.has[:, [edge.source for edge in problem.edges]]
    target = space.has[:, [edge.target for edge in problem.edges]]
    leaves = source * menu.leaving
    stays = (leaves * (1 - target)).sum(axis=1)
    total = leaves.sum(axis=1)
    gone = space.has @ np.array([float(item is None) for item in menu.items])
    busy = space.has @ np.array([0.0 if i is None else i.seconds.min() for i in menu.items])
    held = space.has @ np.array([0.0 if i is None else i.first.min() for i in menu.items])
    spent = space.has @ menu.resent
    count = space.has.sum(axis=1)
    rests = (
        []
        if math.isinf(threshold)
        else [space.has @ weighted(problem, weight, threshold) for weight in WEIGHTS]
    )
    found: list[tuple[Ints, Ints, Floats, Floats]] = []
    number = 0
    states = len(space.masks)
    step = max(1, ENTRIES // states)
    for low in range(0, states, step):
        part = slice(low, min(states, low + step))
        inside = (space.has[part] @ space.has.T == count[part, None]) & (count[part, None] < count)
        inside &= gone[part, None] == gone
        # Sums of bytes are exact where bytes are whole; of others a little is forgiven.
        inside &= held - held[part, None] <= limit * (1 + 1e-12)
        i, j = np.nonzero(inside)
        i += low
        if threshold < math.inf:
            seconds = busy[j] - busy[i]
            fits = seconds <= threshold * max(menu.widths) * (1 + 1e-9)
            i, j = i[fits], j[fits]
        enters = (source[part] * menu.entering) @ target.T
        out = leaves[part] @ target.T
        inner = np.einsum("ie,ie->i", source[part] * menu.entering, target[part])
        moved = (enters[i - low, j] - inner[i - low]) + (stays[j] - (total[i] - out[i - low, j]))
        cut = np.maximum(moved, 0.0) / rate
        resent = np.maximum(spent[j] - spent[i], 0.0)
        if threshold < math.inf:
            # Rounding of sums over all nodes, and of the threshold itself.
            seconds = np.maximum(busy[j] - busy[i], 0.0) + cut - 1e-12 * busy[-1]
            width = np.maximum(1.0, np.ceil(seconds / threshold - 1e-9))
            fits = width <= max(menu.widths)
            for along in rests:
                rest = along[i] + along[-1] - along[j]
                fits &= rest + width * menu.degree <= problem.devices * (1 + 1e-9) + 1e-9
            i, j, cut, resent = i[fits], j[fits], cut[fits], resent[fits]
        number += len(i)
        if number > most:
            return None
        found.append((i.astype(np.int64), j.astype(np.int64), cut, resent))
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    return Pairs(menu, columns[0], columns[1], columns[2], columns[3])
