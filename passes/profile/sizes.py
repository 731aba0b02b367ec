"""Costs at several microbatch sizes, of which two or three are measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pdcompile.ir.graph import OpGraph
from pdcompile.passes.profile import Progress, Say, apply, profile, recalled
from pdcompile.passes.profile.fitted import fitted
from pdcompile.passes.profile.store import Profile

if TYPE_CHECKING:
    from torch import nn

MIDDLE_FROM = 8  # times the smallest size: the largest one from which a third is measured


def measured_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Which of the sizes to measure: the ends, and one in the middle where they are far apart."""
    ordered = sorted(set(sizes))
    if len(ordered) <= 2:
        return tuple(ordered)
    low, high = ordered[0], ordered[-1]
    ends = (low, high)
    if high < MIDDLE_FROM * low:
        return ends
    middle = (low * high) ** 0.5
    return (low, min(ordered[1:-1], key=lambda size: abs(size / middle - middle / size)), high)


class Sizes:
    """The graph with costs of one microbatch, at every size of a search.

    Args:
        costs, device_kind: as for `profile`; only measured ones are fitted.
        sizes: microbatch sizes that will be asked for; others are fitted as well.
    """

    def __init__(
        self,
        graph: OpGraph,
        model: nn.Module | None,
        sizes: Sequence[int],
        *,
        costs: Any = "measured",
        device_kind: str = "cpu",
        progress: Progress | None = None,
        say: Say | None = None,
    ) -> None:
        self._graph, self._model, self._costs = graph, model, costs
        self._device_kind = device_kind
        self._progress = progress
        self._say = say or (lambda _: None)
        self._profiles: list[Profile] = []
        self._wanted = measured_sizes(sizes)
        others = sorted(set(sizes) - set(self._wanted))
        if costs == "measured" and others:
            self._say(
                f"costs at microbatch sizes {', '.join(map(str, others))} follow from those "
                f"measured at {', '.join(map(str, self._wanted))}: alpha + beta x work for each "
                "kind of op"
            )

    def at(self, size: int) -> OpGraph:
        """The graph with costs at this size.  Raises what `profile` raises."""
        if self._costs != "measured":
            return profile(
                self._graph, self._model, microbatch_size=size, costs=self._costs,
                device_kind=self._device_kind, progress=self._progress, say=self._say,
            )  # fmt: skip
        if not self._profiles:
            self._profiles = [
                recalled(
                    self._graph, self._model, microbatch_size=one,
                    progress=self._progress, say=self._say,
                )
                for one in self._wanted
            ]  # fmt: skip
        for known in self._profiles:
            if known.microbatch_size == size:
                return apply(self._graph, known)
        return apply(self._graph, fitted(self._graph, self._profiles, size))
