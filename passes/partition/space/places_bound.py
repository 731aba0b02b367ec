"""What ranks that hold several stages cannot beat, whatever the cut.

Let x be the seconds of the groups of a path of values with gradients, F + W, on each of N stages,
P_s those of all stages before s that a microbatch passes there and back (F alone where backward is
split), and k = ⌈m/r⌉.  The place of stage s begins with s and its later stages no sooner than the
first microbatch is there, and the last one has to go home from there, so

    T ≥ P_s + k Σ x of s and the later stages on its place,    for each s.

Any weights λ_s ≥ 0 make one bound of these: a group with f and w adds to Σ λ_s T what the stage
that holds it says, at least what the cheapest stage would.  The weights under which all stages say
the same, if f and w had one ratio everywhere, are the best for equal groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdcompile.passes.partition.space.pipelines import PreparedProblem
from pdcompile.passes.partition.space.seats import Seats
from pdcompile.problem.space import Setting
from pdcompile.schedule.registry import kind_of


def seconds_of_places(
    prepared: PreparedProblem,
    setting: Setting,
    seats: Seats,
    replicas: int,
    placement: Sequence[int],
) -> float:
    """Of a minibatch, at least; `placement`: the place of every stage, each of so many replicas."""
    forward, backward = prepared.path_seconds
    kind, share = kind_of(setting.schedule), -(-setting.num_microbatches // replicas)
    first = kind.halves(1.0)[0]  # of a backward, what the stage before waits for
    home = 0.0 if kind.splits_backward else 1.0
    alone = float((forward + first * backward).sum())
    out, back = float(forward.sum()), home * float(backward.sum())
    # One stage has an N-th of it at least, and the other microbatches pass it before or after.
    most = alone + (share - 1) * max(out, back) / len(placement)
    work = float((forward + backward).sum())
    if share > 1 and out + back > 0:
        weights = _weights(share, (out + back) / work, placement)
        total = weights.sum()
        ahead = total - weights.cumsum()  # of the stages that wait for one
        here = np.array(
            [
                sum(w for w, p in zip(weights[: s + 1], placement, strict=False) if p == place)
                for s, place in enumerate(placement)
            ]
        )
        each = np.outer(forward, share * here + ahead)
        each += np.outer(backward, share * here + home * ahead)
        most = max(most, float(each.min(axis=1).sum() / total))
    return most / seats.fastest * (1 - 1e-9)


def _weights(share: int, waited: float, placement: Sequence[int]) -> NDArray[np.float64]:
    """One a stage; `waited`: of a group's seconds, those that later stages wait for."""
    found: list[float] = []
    before: dict[int, int] = {}  # the last stage of each place
    for s, place in enumerate(placement):
        since = before.get(place)
        # What the stages between say of the one before on this place, and not of this one.
        rest = 1.0 / waited + sum(found) if since is None else sum(found[since + 1 :])
        found.append(waited * rest / (share - waited))
        before[place] = s
    return np.array(found)
