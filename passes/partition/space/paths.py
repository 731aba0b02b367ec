"""What must run before and after a stage, whatever the other stages are.

Groups on a path of the graph run one after the other, on one stage or on several.  So the first
forward of a stage J∖I waits for the longest path that ends in I next to it, its backward for the
longest path behind it and back, and the minibatch ends only after the gradients' way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdcompile.passes.partition.model import Model
from pdcompile.passes.partition.segments import Matrix, Segments

MAX_CELLS = 400_000_000  # ideals² x groups; more takes seconds


@dataclass(frozen=True, slots=True)
class Paths:
    """Seconds at speed 1 as matrices [I, J]: `before` forward, `behind` both ways, `back` home."""

    before: Matrix
    behind: Matrix
    back: Matrix

    @staticmethod
    def of(segments: Segments) -> Paths:
        model, size = segments.model, len(segments.ideals)
        n = model.num_groups
        if size * size * n > MAX_CELLS:
            none = np.zeros((1, 1))
            return Paths(none, none, none)
        every, returning = _arcs(model, gradients=False), _arcs(model, gradients=True)
        both = [f + w for f, w in zip(model.forward, model.backward, strict=True)]
        upwards = _reversed(returning)
        return Paths(
            _reaching(segments, every, _longest(model.forward, _reversed(every), range(n))),
            _leaving(segments, upwards, _longest(both, returning, range(n - 1, -1, -1))),
            _reaching(segments, returning, _longest(model.backward, upwards, range(n))),
        )


Arcs = list[list[int]]  # of each group, the groups that its values go to


def _arcs(model: Model, *, gradients: bool) -> Arcs:
    found: list[set[int]] = [set() for _ in range(model.num_groups)]
    for flow in model.flows:
        if not flow.tied and (flow.backward_messages > 0 or not gradients):
            found[flow.sources[0]].update(flow.sinks)
    return [sorted(groups) for groups in found]


def _reversed(arcs: Arcs) -> Arcs:
    found: Arcs = [[] for _ in arcs]
    for a, groups in enumerate(arcs):
        for b in groups:
            found[b].append(a)
    return found


def _longest(seconds: Sequence[float], nearer: Arcs, order: Sequence[int]) -> list[float]:
    """Of each group, the longest path that ends there, itself included."""
    found = [0.0] * len(seconds)
    for v in order:
        found[v] = seconds[v] + max((found[u] for u in nearer[v]), default=0.0)
    return found


def _reaching(segments: Segments, arcs: Arcs, longest: list[float]) -> Matrix:
    """The longest path that ends in I at a group with an arc into J∖I."""
    inside, size = segments.inside, len(segments.ideals)
    result = np.zeros((size, size))
    for p in sorted(range(len(arcs)), key=longest.__getitem__):
        if arcs[p]:
            count = inside[:, arcs[p]].sum(1)
            result[inside[:, p][:, None] & (count[None, :] > count[:, None])] = longest[p]
    return result


def _leaving(segments: Segments, upwards: Arcs, longest: list[float]) -> Matrix:
    """The longest path that begins beyond J at a group with an arc from J∖I."""
    inside, size = segments.inside, len(segments.ideals)
    result = np.zeros((size, size))
    for q in sorted(range(len(upwards)), key=longest.__getitem__):
        if upwards[q]:
            count = inside[:, upwards[q]].sum(1)
            result[~inside[:, q][None, :] & (count[None, :] > count[:, None])] = longest[q]
    return result
