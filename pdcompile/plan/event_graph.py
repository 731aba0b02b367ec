"""Makespans of many partitions at once, which have the same hops.

Who waits for whom in a minibatch follows from the schedule, its warm-up and the hops alone, where
no link carries messages of several hops: so it is recorded once, as a graph of events, and its
longest paths are found for the seconds of many partitions together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdcompile.plan.makespan import EventWalk
from pdcompile.plan.wires import ComputeEvent, Direction, Event, StagePair, Wire, by_distance
from pdcompile.schedule.instruction import Action

ACTIONS = Action.FORWARD, Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT
Seconds = NDArray[np.float64]
Hops = tuple[StagePair, ...]


@dataclass(frozen=True, eq=False)
class EventGraph:
    """Events by how many come before them: of each level whom they wait for.

    Event 0 is the beginning.  What the others take are rows of a table: `ACTIONS` of all stages,
    one after the other, then forward hops and backward hops.
    """

    levels: tuple[tuple[slice, NDArray[np.intp]], ...]
    what: NDArray[np.intp]  # of each event but the first
    ends: NDArray[np.intp]  # [n, stages]: events before the update of each
    size: int

    def done(self, table: Seconds) -> Seconds:
        """When each stage comes to its update, [stages, partitions].

        Args:
            table: seconds, [what, partitions]; -inf for a hop that a partition does not have.
        """
        at = np.zeros((self.size, table.shape[1]))
        at[1:] = table[self.what]
        for own, sources in self.levels:
            at[own] += np.maximum.reduce(at.take(sources, 0), 0, initial=0.0)
        found: Seconds = at[self.ends].max(0)
        return found


@lru_cache(maxsize=64)
def event_graph(
    warmup: tuple[int, ...], num_microbatches: int, schedule: str, forward: Hops, backward: Hops
) -> EventGraph:
    """The events of one minibatch on stages of a rank each, with these hops between them.

    Rows of the table are for hops in the order in which they are given.

    Raises:
        ValueError: the stages wait for each other for ever.
    """
    walk = _Recorder(warmup, num_microbatches, schedule)
    kinds: tuple[tuple[Direction, Hops], ...] = ("forward", forward), ("backward", backward)
    for kind, hops in kinds:
        for hop in hops:
            walk.join([_Recorded(hop, kind, walk)])
        walk.send_in_order(kind, sorted(hops, key=by_distance))
    walk.run()
    return walk.graph()


class _Recorder(EventWalk):
    """A time is the events that are over then; event 0 is over at once."""

    def __init__(self, warmup: Sequence[int], num_microbatches: int, schedule: str):
        self.count = len(warmup)
        nothing = (0.0,) * self.count
        ranks = [(s,) for s in range(self.count)]
        super().__init__(nothing, nothing, ranks, warmup, num_microbatches, schedule)
        self.begin = (0,)
        self.events: list[tuple[tuple[int, ...], int]] = [((), -1)]  # whom it waits for, what
        self.num_hops = 0

    def event(self, after: tuple[int, ...], what: int) -> int:
        self.events.append((after, what))
        return len(self.events) - 1

    def later(self, now: Any, because: Event, wire: Wire, i: int) -> tuple[Any, Event]:
        return _and(now, (wire.arrived[i],)), None

    def computed(self, event: ComputeEvent, now: Any, because: Event) -> tuple[Any, Event]:
        s, action, _ = event
        return (self.event(now, ACTIONS.index(action) * self.count + s),), None

    def has_gradients(self, s: int, now: Any) -> None:
        pass  # what `updated` asks for

    def ended(self, s: int, now: Any, because: Event) -> None:
        self.done[s] = now

    def graph(self) -> EventGraph:
        depth = [0] * len(self.events)
        by_depth: dict[int, list[int]] = defaultdict(list)
        for n, (after, _) in enumerate(self.events):
            depth[n] = 1 + max((depth[one] for one in after), default=-1)
            by_depth[depth[n]].append(n)
        place, levels, what = {0: 0}, [], list[int]()
        for _, events in sorted(by_depth.items())[1:]:
            first = len(place)
            place.update((n, first + i) for i, n in enumerate(events))
            sources = _padded([[place[one] for one in self.events[n][0]] for n in events])
            what += [self.events[n][1] for n in events]
            levels.append((slice(first, len(place)), sources))
        rows: Any = self.done
        ends = _padded([[place[one] for one in own] for own in rows])
        return EventGraph(tuple(levels), np.array(what, dtype=np.intp), ends, len(place))


class _Recorded(Wire):
    def __init__(self, hop: StagePair, kind: Any, walk: _Recorder):
        super().__init__(hop, kind, (0.0,), (min(hop), max(hop)))
        self.walk, self.what = walk, len(ACTIONS) * walk.count + walk.num_hops
        walk.num_hops += 1

    def move(self, ready: list[int]) -> None:
        arrived: list[Any] = self.arrived
        before = len(arrived)
        for sent, posted in list(zip(self.sent, self.posted, strict=False))[before:]:
            after: Any = _and(sent, posted)
            arrived.append(self.walk.event(_and(after, tuple(arrived[-1:])), self.what))
        if len(arrived) > before:
            self.wake(ready)


def _and(one: Any, other: Any) -> tuple[int, ...]:
    """The time when both are over."""
    return tuple(sorted({*one, *other} - {0})) or (0,)


def _padded(rows: list[list[int]]) -> NDArray[np.intp]:
    """[n, rows], with the beginning where a row is shorter."""
    longest = max(map(len, rows))
    return np.array([[*row, *[0] * (longest - len(row))] for row in rows], dtype=np.intp).T
