"""The engine: a chain of states that needs the fewest devices, for one threshold at a time.

A pipeline is a path through states (what has been done so far: ideals, prefixes, …) from the
first to the last.  Going from one state to a later one is a stage, and each stage is chosen from
a menu of `Choices`.  Whoever knows the cost model fills the menu with the choices whose load is
at most a threshold; nothing here knows what a load is.

Stages are coupled by the devices and by what is in flight: the sum of the replicas of all later
stages decides how many microbatches a stage holds, hence which choices it has.  So
the suffix of a plan is described by (devices, replicas), and of two suffixes from one state the
one with less of both is at least as good.  Few pairs are left at each state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Plan = TypeVar("Plan")
FAR = 1 << 40  # more replicas than there ever are


@dataclass(frozen=True, slots=True)
class Choices:
    """Columns of equal length, one row for each possible stage.

    States are numbered so that `before` < `after`.  A stage takes `devices` and has `replicas`;
    it can be chosen where the replicas of all later stages add up to at most `reach`.
    """

    before: Ints
    after: Ints
    devices: Ints
    replicas: Ints
    reach: Ints

    def __len__(self) -> int:
        return len(self.before)

    def take(self, rows: NDArray[Any]) -> Choices:
        columns = (self.before, self.after, self.devices, self.replicas, self.reach)
        return Choices(*(column[rows] for column in columns))

    @staticmethod
    def joined(parts: Sequence[Choices]) -> Choices:
        names = ("before", "after", "devices", "replicas", "reach")
        nothing = np.zeros(0, dtype=np.int64)
        columns = [[nothing, *(getattr(part, name) for part in parts)] for name in names]
        return Choices(*(np.concatenate(column) for column in columns))


def fewest_before(choices: Choices, states: int) -> Ints:
    """[state] least devices for what is done there, whatever is in flight; FAR: no way."""
    order = np.argsort(choices.before, kind="stable")
    starts = np.searchsorted(choices.before[order], np.arange(states + 1))
    fewest = np.full(states, FAR, dtype=np.int64)
    fewest[0] = 0
    for state in range(states - 1):
        rows = order[starts[state] : starts[state + 1]]
        if len(rows) and fewest[state] < FAR:
            np.minimum.at(fewest, choices.after[rows], fewest[state] + choices.devices[rows])
    return fewest


def fewest_after(choices: Choices, states: int) -> Ints:
    """[state] least devices for what is not yet done there, whatever is in flight."""
    last = states - 1
    mirrored = Choices(
        last - choices.after,
        last - choices.before,
        choices.devices,
        choices.replicas,
        choices.reach,
    )
    return fewest_before(mirrored, states)[::-1]


def cheapest_chain(choices: Choices, states: int, devices: int) -> list[int] | None:
    """Rows of a chain from state 0 to the last, in pipeline order; None: `devices` do not suffice.

    Exact: it finds a chain whenever there is one, and one with the fewest devices.  Time is
    rows × pairs of (devices, replicas) kept at a state, usually one to ten.
    """
    head = fewest_before(choices, states)
    if head[-1] > devices:
        return None
    keep = np.flatnonzero(head[choices.before] + choices.devices <= devices)
    keep = keep[np.argsort(choices.before[keep], kind="stable")]
    menu = choices.take(keep)
    starts = np.searchsorted(menu.before, np.arange(states + 1))
    width = 4
    used = np.full((states, width), FAR, dtype=np.int64)
    flown = np.full((states, width), FAR, dtype=np.int64)
    used[-1, 0] = flown[-1, 0] = 0
    origin: list[tuple[Ints, Ints]] = [(np.empty(0, np.int64), np.empty(0, np.int64))] * states
    for state in reversed(range(states - 1)):
        first, stop = starts[state], starts[state + 1]
        if first == stop or head[state] >= FAR:
            continue
        after = menu.after[first:stop]
        total = used[after] + menu.devices[first:stop, None]
        fits = (flown[after] <= menu.reach[first:stop, None]) & (total <= devices - head[state])
        row, point = np.nonzero(fits)
        if not len(row):
            continue
        cost = total[row, point]
        load = flown[after[row], point] + menu.replicas[first:stop][row]
        order = np.lexsort((load, cost))
        load = load[order]
        best = np.minimum.accumulate(load)
        order = order[np.flatnonzero(np.r_[True, load[1:] < best[:-1]])]
        if len(order) > width:
            more = ((0, 0), (0, len(order) - width))
            used = np.pad(used, more, constant_values=FAR)
            flown = np.pad(flown, more, constant_values=FAR)
            width = len(order)
        used[state, : len(order)] = cost[order]
        flown[state, : len(order)] = (
            flown[after[row[order]], point[order]] + (menu.replicas[first:stop][row[order]])
        )
        origin[state] = (row[order] + first, point[order])
    if used[0, 0] > devices:
        return None
    chain = []
    state, point_at = 0, 0
    while state < states - 1:
        rows, points = origin[state]
        chain.append(int(keep[rows[point_at]]))
        state, point_at = int(menu.after[rows[point_at]]), int(points[point_at])
    return chain


def cheapest_among(
    parts: Sequence[Choices], states: int, devices: int
) -> list[tuple[int, int, int, int]] | None:
    """(state before, state after, part, replicas) of a chain's stages, from several menus.

    None: `devices` do not suffice.
    """
    choices = Choices.joined(parts)
    chain = cheapest_chain(choices, states, devices)
    if chain is None:
        return None
    ends = np.cumsum([len(part) for part in parts])
    return [
        (
            int(choices.before[row]),
            int(choices.after[row]),
            int(np.searchsorted(ends, row, side="right")),
            int(choices.replicas[row]),
        )
        for row in chain
    ]


def smallest_threshold(
    attempt: Callable[[float], tuple[float, Plan] | None],
    lower: float,
    upper: float,
    *,
    exact: float,
    late: Callable[[], bool] = lambda: False,
    found: Callable[[float, Plan], None] = lambda objective, plan: None,
    refuted: Callable[[float], None] = lambda bound: None,
) -> tuple[float, float, Plan | None]:
    """Bisection for the least threshold at which `attempt` finds a plan.

    `attempt(threshold)` returns a plan and its objective ≤ threshold, or None where there is
    none; `upper` is the objective of a known plan, no plan is below `lower`.  A plan's own
    objective is mostly well below the threshold that found it, so the last question is asked
    early: is there one below upper·(1 − exact)?  `found` and `refuted` hear of every step.

    Returns:
        (proved bound, least objective, its plan; None: none is better than the known one).
    """
    best: Plan | None = None
    while lower < upper * (1 - exact) and not late():
        near = upper <= lower * (1 + 1e-4)
        middle = (lower + upper) / 2 if lower <= 0 or upper < 4 * lower else (lower * upper) ** 0.5
        threshold = upper * (1 - exact) if near else middle
        result = attempt(threshold)
        if result is None:
            lower = threshold
            refuted(lower)
        else:
            # Rounding must not keep a plan from counting as progress.
            upper, best = min(result[0], threshold), result[1]
            found(*result)
    return lower, upper, best


def membership(masks: Sequence[int], size: int) -> NDArray[np.uint8]:
    """[set, group]: 1 where the group is in the set."""
    width = (size + 7) // 8
    raw = b"".join(mask.to_bytes(width, "little") for mask in masks)
    packed = np.frombuffer(raw, dtype=np.uint8).reshape(len(masks), width)
    return np.unpackbits(packed, axis=1, bitorder="little")[:, :size]
