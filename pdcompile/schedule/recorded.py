"""RecordedEvent: an instruction that ran, and when: what a run notes and a trace file holds."""

from __future__ import annotations

from typing import NamedTuple


class RecordedEvent(NamedTuple):
    """One instruction that took time, with the same fields as an event of the simulator.

    `action` is the text of an `Action`; seconds are those of the hosts' clocks, from where the
    timeline begins.
    """

    rank: int
    stage: int
    action: str
    minibatch: int
    microbatch: int
    start_seconds: float
    end_seconds: float
