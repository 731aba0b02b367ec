"""Which stages share a rank, where ranks hold several."""

from __future__ import annotations

from collections.abc import Callable
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
