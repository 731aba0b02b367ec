"""Loads of all stages between the cuts of a chain that are not too far from each other.

A chain of cuts c_0, c_1, …, c_m is a list of down-closed sets of groups, in an order in which no
set comes before one that it contains.  The stage from c_i to c_j is the difference of the two.
With n_e(c) pins of a value e inside a cut and A_t(c) = [n_e(c) ≥ t], a stage touches e when it
is not so that n_e(c_i) = n_e(c_j), and holds all of e when n_e(c_i) = 0 and n_e(c_j) = |e|:

    paid = Σ_{t<|e|} A_t(c_i)·A_{t+1}(c_j) − Σ_{t≥1} A_t(c_i) − A_{|e|}(c_j)·(1 − A_1(c_i))

Every A_t is a sum of steps along the chain, hence the cost of all stages is a sum of steps of i,
of steps of j, and of corners [i ≥ a][j ≥ b], which prefix sums over the band add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdcompile.passes.published.placement.large.arrays import Floats, Ints


@dataclass(frozen=True, slots=True)
class Steps:
    """What the values cost along a chain: `begin[i]` and `end[j]` are added to the cost of the
    stage from i to j, and so is every corner with corner_begin ≤ i and corner_end ≤ j."""

    begin: Floats  # [cut]
    end: Floats
    corner_begin: Ints
    corner_end: Ints
    corner_cost: Floats


def steps_of(cuts: int, value_of: Ints, at: Ints, costs: Floats) -> Steps:
    """The steps of values whose pins enter the chain for good: pin p is inside the cuts from
    `at[p]` on.  Pins are sorted by value, then by `at`."""
    begin, end = np.zeros(cuts + 1), np.zeros(cuts + 1)
    if not len(at):
        none = np.zeros(0, dtype=np.int64)
        return Steps(begin[:-1], end[:-1], none, none, np.zeros(0))
    cost = costs[value_of]
    same = value_of[1:] == value_of[:-1]
    first = np.concatenate(([True], ~same))
    last = np.concatenate((~same, [True]))
    np.add.at(begin, at, -cost)  # −Σ_{t≥1} A_t(c_i)
    np.add.at(end, at[first], cost[first])  # A_0·A_1(c_j)
    np.add.at(end, at[last], -cost[last])  # −A_{|e|}(c_j)
    inner_begin, inner_end = at[:-1][same], at[1:][same]  # A_t(c_i)·A_{t+1}(c_j)
    return Steps(
        np.cumsum(begin)[:-1],
        np.cumsum(end)[:-1],
        np.concatenate((inner_begin, at[first])),
        np.concatenate((inner_end, at[last])),
        np.concatenate((cost[:-1][same], cost[first])),  # and A_1(c_i)·A_{|e|}(c_j)
    )


def band_costs(steps: Steps, width: int) -> Floats:
    """[i, d]: what the values cost the stage from cut i to cut i + d + 1, for d < width.

    Entries beyond the last cut mean nothing.
    """
    cuts = len(steps.begin)
    begin, end = np.zeros(cuts + 1), np.zeros(cuts + width + 2)
    a, b, cost = steps.corner_begin, steps.corner_end, steps.corner_cost
    near = (b > a) & (b - a <= width)
    late = (b <= a) & (a < cuts)  # j ≥ i ≥ a ≥ b: a step of i alone
    np.add.at(begin, a[late], cost[late])
    early = (b > a) & ~near & (b < cuts)  # inside the band, j ≥ b means i ≥ a
    np.add.at(end, b[early], cost[early])
    flat = np.bincount(
        a[near] * width + (b - a)[near] - 1, weights=cost[near], minlength=cuts * width
    )
    table = flat[: cuts * width].astype(np.float64).reshape(cuts, width)
    np.cumsum(table, axis=1, out=table)
    for i in range(1, cuts):
        table[i, :-1] += table[i - 1, 1:]
        table[i, -1] += table[i - 1, -1]
    table += (steps.begin + np.cumsum(begin)[:-1])[:, None]
    ends = np.concatenate((steps.end + np.cumsum(end)[:cuts], np.zeros(width)))
    table += np.lib.stride_tricks.sliding_window_view(ends[1:], width)[:cuts]
    return table


def differences(prefix: Floats, width: int, beyond: float = np.inf) -> Floats:
    """[i, d]: prefix[i + d + 1] − prefix[i], `beyond` past the last cut."""
    padded = np.concatenate((prefix, np.full(width, beyond)))
    return np.asarray(
        np.lib.stride_tricks.sliding_window_view(padded[1:], width)[: len(prefix)] - prefix[:, None]
    )
