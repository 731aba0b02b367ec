"""Recording: when each instruction of this process's ranks began and ended, as a timeline.

What is drawn beside the forecast: `passes.simulate` gives events of the same form.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from pdcompile.schedule import Instruction, Phase
from pdcompile.schedule.program import RecordedEvent

KEPT = 8  # minibatches, the last ones: the first of a run set up what later ones have
NOTED = frozenset((Phase.COMPUTE, Phase.WAIT_RECV, Phase.WAIT_SEND, Phase.WAIT))
_SAMPLES = 32  # of the clocks' difference


class Recording:
    """Work and waits of the last minibatches; evaluation is left out.

    Ranks of one host agree on the time to a microsecond, those of several as their clocks do.
    """

    def __init__(self) -> None:
        self._minibatches: dict[int, list[RecordedEvent]] = {}
        self._offset = min(time.time() - time.perf_counter() for _ in range(_SAMPLES))

    def add(self, rank: int, ins: Instruction, base: int, began: float) -> None:
        """An instruction has ended that began at `began` of `time.perf_counter`."""
        minibatch, now = base + ins.minibatch, time.perf_counter()
        if ins.action.phase not in NOTED or minibatch < 0:
            return
        if minibatch not in self._minibatches:
            for old in [one for one in self._minibatches if one <= minibatch - KEPT]:
                del self._minibatches[old]
        self._minibatches.setdefault(minibatch, []).append(
            RecordedEvent(
                rank, ins.stage, ins.action.value, minibatch, ins.microbatch,
                began + self._offset, now + self._offset,
            )
        )  # fmt: skip

    def rows(self) -> list[RecordedEvent]:
        """The recording of this process, for `together`."""
        return [one for events in self._minibatches.values() for one in events]


def together(rows: Iterable[Sequence[Any]]) -> tuple[RecordedEvent, ...]:
    """The fields of several processes' events as one recording, from second 0, by start."""
    noted = [RecordedEvent(*fields) for fields in rows]
    events = sorted(noted, key=lambda one: (one.start_seconds, one.rank))
    first = events[0].start_seconds if events else 0.0
    return tuple(
        one._replace(start_seconds=one.start_seconds - first, end_seconds=one.end_seconds - first)
        for one in events
    )
