"""Timelines for Perfetto and chrome://tracing, in the Trace Event Format.

The one format of timelines in files, of simulations and of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdcompile.report.timeline import COMPUTE, Event

TRACKS = ("compute", "communication")  # of a rank, and the categories of their spans


def trace(events: Sequence[Event], plan: str) -> dict[str, Any]:
    """The JSON object that Perfetto opens: one process a rank, compute and communication tracks.

    Args:
        plan: the plan's fingerprint.
    """
    records: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        stages = sorted({event.stage for event in events if event.rank == rank} - {-1})
        name = f"rank {rank} (stage {', '.join(map(str, stages))})"
        records.append(_meta("process_name", rank, 0, name))
        records += [_meta("thread_name", rank, track, name) for track, name in enumerate(TRACKS)]
    records.extend(map(_span, events))
    return {"displayTimeUnit": "ms", "otherData": {"plan": plan}, "traceEvents": records}


def _meta(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


def _span(event: Event) -> dict[str, Any]:
    action = str(event.action)
    track = int(action not in COMPUTE)
    label = f"{action} {event.microbatch}" if event.microbatch >= 0 else action
    begin, length = event.start_seconds * 1e6, (event.end_seconds - event.start_seconds) * 1e6
    args = {"action": action, "stage": event.stage, "minibatch": event.minibatch,
            "microbatch": event.microbatch}  # fmt: skip
    return {"ph": "X", "name": label, "cat": TRACKS[track], "pid": event.rank, "tid": track,
            "ts": begin, "dur": length, "args": args}  # fmt: skip
