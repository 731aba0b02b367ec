"""Rules that say which stages share a rank, where ranks hold several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Placement(NamedTuple):
    """Rule for stages that share ranks: the place of each of so many stages on so many ranks.

    Places are ranks in the order in which the pipeline takes them; `name` is for people.
    """

    name: str
    places: Callable[[int, int], tuple[int, ...]]


#: stage s at the place of stage s − R, of R ranks
IN_TURN = Placement("in turn", lambda stages, ranks: tuple(s % ranks for s in range(stages)))
#: from the first rank to the last and back, over and over: two stages a rank make a V
IN_V = Placement(
    "in a V",
    lambda stages, ranks: tuple(
        min(s % (2 * ranks), 2 * ranks - 1 - s % (2 * ranks)) for s in range(stages)
    ),
)


def side_by_side(placement: Sequence[int], replicas: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of every stage, where so many next to each other are a place."""
    return tuple(tuple(range(p * replicas, (p + 1) * replicas)) for p in placement)


def dispatched(placement: Sequence[int], replicas: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of every stage in the order in which they take microbatches: of S stages and R
    ranks, stage s of microbatch i is on rank (i S + s) mod R."""
    count, ranks = len(placement), len({*placement}) * replicas
    return tuple(tuple((i * count + s) % ranks for i in range(replicas)) for s in range(count))
